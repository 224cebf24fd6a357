"""Segment memory (Dai et al. 2019): the inputs of a layer are kept, and later segments attend to them.

The definition is `literal`: one layer after the other, one position after the other, on plain lists.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from everyformer import (
    Alibi,
    Cache,
    FourTerm,
    Gated,
    Language,
    PostNorm,
    PreNorm,
    Rotary,
    SegmentMemory,
    SideInputs,
    Sinusoidal,
    build,
)
from everyformer.network.cache import KVCache, LayerInputs
from tests.network import close, model, ready, tokens

RESIDUALS = [PostNorm(), PreNorm()]
HOW: list[dict[str, Any]] = [
    {"score_mods": (FourTerm(4),)},
    {"score_mods": (FourTerm(4, 2),)},
    {"score_mods": (Rotary(),)},
    {"score_mods": (Alibi(),)},
    {"position": Sinusoidal()},
]


def read(network: Any, x_BT: Tensor, length: int, cache: Cache, **options: Any) -> tuple[Tensor, Cache]:
    """The hidden vectors of segments of a length, and the past after the last."""
    found = []
    for part in x_BT.split(length, dim=1):
        output = network(part, cache=cache, **options)
        cache = output.cache
        found.append(output.hidden)
    return torch.cat(found, dim=1), cache


def literal(network: Any, x_BT: Tensor, length: int, memory: int) -> Tensor:
    """Section 3.2: layer n of a segment has its keys from [SG(what entered layer n of those before); what enters it now].

    For post-norm layers without a rule; everything but the choice of keys is the network's own.
    """
    answers, kept = [], [x_BT.new_zeros(len(x_BT), 0, 8).double() for _ in network.body.layers]
    for part in x_BT.split(length, dim=1):
        h_BTD = network.embed(part)
        for n, layer in enumerate(network.body.layers):
            wide_BKD = torch.cat((kept[n].detach(), h_BTD), dim=1)
            before, heads = kept[n].shape[1], layer.sublayers[0].heads
            q, (k, v) = heads.query(h_BTD), heads.keys_values(wide_BKD)
            score = q @ k.transpose(-1, -2) * heads.scale
            ahead = torch.ones(score.shape[-2:], dtype=torch.bool).triu(before + 1)
            y_BTD = heads.merge(score.masked_fill(ahead, -torch.inf).softmax(-1) @ v)
            kept[n] = wide_BKD[:, -memory:]
            h_BTD = layer.residuals[0].norm(h_BTD + y_BTD)
            h_BTD = layer.residuals[-1].norm(h_BTD + layer.sublayers[-1](h_BTD)[0])
        answers.append(h_BTD)
    return torch.cat(answers, dim=1)


@pytest.mark.spec(86, 87)
@pytest.mark.parametrize("memory", [1, 3, 5, 20])
def test_the_segment_memory_is_the_papers(memory: int) -> None:  # eq. W11
    """Values and gradients: the maps to keys and values learn from the memory, what was before it does not."""
    network, x_BT = ready(model(residual=PostNorm(), memory=SegmentMemory(memory))), tokens(2, 11)
    found, wanted = read(network, x_BT, 3, Cache(segment_memory=True))[0], literal(network, x_BT, 3, memory)
    close(found, wanted)
    direction = torch.randn_like(found)
    weights = list(network.parameters())
    for one, two in zip(*(torch.autograd.grad((y * direction).sum(), weights) for y in (found, wanted)), strict=True):
        close(one, two)
    # Context grows by a segment in each layer: two layers see two segments back, and no further.
    moved = x_BT.clone()
    moved[:, 0] = (moved[:, 0] + 1) % 17
    change_T = (read(network, moved, 3, Cache(segment_memory=True))[0] - found).abs().amax((0, 2))
    reach = max(t for t in range(11) if change_T[t] > 0)
    assert reach == {1: 5, 3: 8, 5: 10, 20: 10}[memory]


@pytest.mark.spec(90)
@pytest.mark.parametrize("how", HOW, ids=lambda how: str(how.get("score_mods", "sinusoidal")))
@pytest.mark.parametrize("residual", RESIDUALS, ids=["post", "pre"])
@pytest.mark.parametrize("hidden", [True, False])
def test_segments_with_enough_memory_equal_one_pass(hidden: bool, residual: Any, how: dict[str, Any]) -> None:
    network, x_BT = ready(model(residual=residual, memory=SegmentMemory(20), **how)), tokens(2, 13)
    for length in (1, 4):
        close(read(network, x_BT, length, Cache(segment_memory=hidden))[0], network(x_BT).hidden)


@pytest.mark.spec(88)
@pytest.mark.parametrize("hidden", [True, False])
def test_a_mask_of_equal_length_makes_the_memory_enough(hidden: bool) -> None:
    """The code's same_length is causal & window(memory): then segments of any length are one long pass, exactly.

    A token sees itself and 3 before it: of a memory of 4 these 3 are kept."""
    network, x_BT = (
        ready(model("causal & window(4)", memory=SegmentMemory(4), score_mods=(FourTerm(4),))),
        tokens(2, 13),
    )
    for length in (1, 3, 7):
        found, cache = read(network, x_BT, length, Cache(segment_memory=hidden))
        close(found, network(x_BT).hidden)
        assert cache.length == 3 and all(type(one) is (LayerInputs if hidden else KVCache) for one in cache.entries)


@pytest.mark.spec(88)
def test_the_memory_may_have_another_length_in_evaluation() -> None:
    network, x_BT = ready(model(memory=SegmentMemory(2), score_mods=(FourTerm(4),))), tokens(2, 13)
    short, cache = read(network, x_BT, 3, Cache())
    long, longer = read(network, x_BT, 3, Cache(max_length=9))
    whole, all_of_it = read(network, x_BT, 3, Cache(max_length=1 << 40))
    assert (cache.length, longer.length, all_of_it.length) == (2, 9, 13)
    close(whole, network(x_BT).hidden)
    close(long[:, :12], whole[:, :12])  # nine positions hold all of the past until the fifth segment
    assert (short - whole).abs().max() > 1e-3


@pytest.mark.spec(86)
@pytest.mark.parametrize("residual", RESIDUALS, ids=["post", "pre"])
def test_a_segment_memory_uses_new_weights_and_cached_keys_do_not(residual: Any) -> None:
    """With the weights at rest both are the same. When they have moved, the memory is seen through the new ones."""
    network, x_BT = ready(model(residual=residual, score_mods=(FourTerm(4),))), tokens(2, 8)
    keys, hidden = (network(x_BT[:, :4], cache=begin).cache for begin in (Cache(), Cache(segment_memory=True)))
    close(*(network(x_BT[:, 4:], cache=cache).hidden for cache in (keys, hidden)))
    with torch.no_grad():
        for layer in network.body.layers:
            layer.sublayers[0].heads.qkv.weight.mul_(0.5)
            layer.residuals[0].norm.weight.mul_(2.0)
    again, stale = (network(x_BT[:, 4:], cache=cache).hidden for cache in (hidden, keys))
    assert (again - stale).abs().max() > 1e-3
    first = network.body.layers[0]
    entered = first.residuals[0].normalize(hidden.entries[0].tensors[0])
    now = KVCache(first.sublayers[0].heads.keys_values(entered))
    fresh = network(x_BT[:, :4], cache=Cache()).cache.entries[0]  # nothing below layer 0 has moved
    close(now.k_BHKE, fresh.k_BHKE)
    close(now.v_BHKE, fresh.v_BHKE)


@pytest.mark.spec(86)
@pytest.mark.parametrize("holes", [1, 3])
@pytest.mark.parametrize("length", [2, 5])
def test_padding_in_a_segment_memory_changes_nothing(holes: int, length: int) -> None:
    """Padding before and within the segments, a memory shorter than the text: each row is as it would be alone."""
    network, x_BT = (
        ready(model("causal & window(4)", memory=SegmentMemory(4), score_mods=(FourTerm(4),))),
        tokens(1, 12),
    )
    wanted = network(x_BT).hidden
    wide_BT = torch.cat((x_BT.new_zeros(1, holes), x_BT[:, :6], x_BT.new_zeros(1, holes), x_BT[:, 6:]), dim=1)
    seen_BT = torch.ones_like(wide_BT, dtype=torch.bool)
    seen_BT[:, :holes] = seen_BT[:, holes + 6 : 2 * holes + 6] = False
    other = tokens(1, wide_BT.shape[1], seed=1)
    cache, found = Cache(segment_memory=True), []
    bounds = [0, holes + 1, *range(holes + 1 + length, wide_BT.shape[1], length), wide_BT.shape[1]]
    for start, end in pairwise(bounds):
        if not bool(seen_BT[:, start:end].any()):
            continue  # a segment without a token of one row is refused
        visible = torch.cat((seen_BT, torch.ones_like(seen_BT)))[:, start:end]
        output = network(torch.cat((wide_BT, other))[:, start:end], visible=visible, cache=cache)
        cache = output.cache
        found.append(output.hidden[0][seen_BT[0, start:end]])
    close(torch.cat(found)[None], wanted)


@pytest.mark.spec(86)
def test_a_memory_is_reordered_rolled_back_and_trimmed() -> None:
    network, x_BT = ready(model(score_mods=(FourTerm(4),))), tokens(3, 9)
    cache = network(x_BT[:, :5], cache=Cache(segment_memory=True)).cache
    order = torch.tensor([2, 0, 0])
    close(network(x_BT[order, 5:], cache=cache.reorder(order)).hidden, network(x_BT[order]).hidden[:, 5:])
    astray = network(x_BT[:, :3], cache=cache).cache
    close(network(x_BT[:, 5:], cache=astray.roll_back(3)).hidden, network(x_BT).hidden[:, 5:])
    kept = cache.trim(2)
    assert kept.length == 2 and torch.equal(kept.entries[1].tensors[0], cache.entries[1].tensors[0][:, 3:])
    with pytest.raises(ValueError, match="it is the cache of another model"):
        network(
            x_BT, cache=replace(cache, entries=tuple(LayerInputs((one.tensors[0][..., :4],)) for one in cache.entries))
        )


@pytest.mark.spec(86, 131)
def test_activation_checkpointing_keeps_the_same_memory_and_gradients() -> None:
    network, x_BT = ready(model(layers=3, score_mods=(FourTerm(4),), outputs=(Language(),))).train(), tokens(2, 8)
    found = []
    for checkpoint_segments in (0, 2):
        network.body.checkpoint_segments = checkpoint_segments
        cache = network(x_BT[:, :4], cache=Cache(segment_memory=True)).cache
        output = network(x_BT[:, 4:], cache=cache)
        gradients = torch.autograd.grad(output.logits.square().sum(), list(network.parameters()))
        found.append((output.hidden, *gradients, *(one.tensors[0] for one in output.cache.entries)))
    for one, two in zip(*found, strict=True):
        close(one, two)


EPISODES = pytest.mark.parametrize("hidden", [True, False])


@pytest.mark.spec(86)
@pytest.mark.parametrize("how", HOW, ids=lambda how: str(how.get("score_mods", "sinusoidal")))
@EPISODES
def test_after_a_reset_a_row_starts_anew_and_the_others_continue(hidden: bool, how: dict[str, Any]) -> None:
    """In a memory that is full, with rows reset at different times: each episode is as it would be alone."""
    network, x_BT = ready(model("causal & window(4)", residual=Gated(), memory=SegmentMemory(4), **how)), tokens(3, 14)
    ends = {3: [0], 6: [0, 2], 9: [1]}  # before which segment which rows begin anew
    cache, found = Cache(segment_memory=hidden), []
    for start in range(0, 14, 3):
        cache = cache.reset(torch.tensor([row in ends.get(start, []) for row in range(3)]))
        output = network(x_BT[:, start : start + 3], cache=cache)
        cache = output.cache
        found.append(output.hidden)
    for row in range(3):
        bounds = [0, *(start for start, rows in ends.items() if row in rows), 14]
        alone = [network(x_BT[row : row + 1, a:b]).hidden for a, b in pairwise(bounds)]
        close(torch.cat(found, dim=1)[row : row + 1], torch.cat(alone, dim=1))


@pytest.mark.spec(86)
@EPISODES
def test_nothing_from_before_a_reset_changes_the_outputs_after_it(hidden: bool) -> None:
    """What was before changes nothing, by exactly 0, even where it was no number; all rows reset are a fresh start to the bit."""
    network, x_BT = ready(model(residual=Gated(), memory=SegmentMemory(6), score_mods=(FourTerm(4),))), tokens(2, 9)
    caches = [network(part[:, :5], cache=Cache(segment_memory=hidden)).cache for part in (x_BT, tokens(2, 9, seed=1))]
    caches.append(replace(caches[0], entries=tuple(one.map(lambda x: x * torch.nan) for one in caches[0].entries)))
    one, two, three = (network(x_BT[:, 5:], cache=cache.reset(torch.tensor([True, False]))).hidden for cache in caches)
    assert torch.equal(one[0], two[0]) and torch.equal(one[0], three[0])
    assert (one[1] - two[1]).abs().max() > 1e-3
    close(one[1:], network(x_BT[1:, 5:], cache=caches[0].reorder(torch.tensor([1]))).hidden)
    again = network(x_BT[:, 5:], cache=caches[2].reset(torch.tensor([True, True])))
    assert torch.equal(again.hidden, network(x_BT[:, 5:], cache=Cache(segment_memory=hidden)).hidden)
    assert caches[0].reset(torch.tensor([False, False])) is caches[0]


@pytest.mark.spec(86)
@EPISODES
def test_episodes_end_within_a_segment_and_between_them(hidden: bool) -> None:
    """A boundary inside a call is told by documents, one between calls by a reset too: each episode is as it would be alone."""
    network = ready(build("gtrxl", "tiny", width=8, heads=2, vocabulary=17, memory=20, episodes=True))
    x_BT, episode_BT = tokens(2, 12), torch.tensor([[0] * 3 + [1] * 3 + [2] * 6, [0] * 6 + [1] * 2 + [2] * 4])
    cache, found = Cache(segment_memory=hidden), []
    for start in (0, 4, 6, 9):
        end = {0: 4, 4: 6, 6: 9, 9: 12}[start]
        if start == 6:
            cache = cache.reset(torch.tensor([True, False]))
        output = network(x_BT[:, start:end], cache=cache, side_inputs=SideInputs(documents=episode_BT[:, start:end]))
        cache = output.cache
        found.append(output.hidden)
    for row in range(2):
        parts = x_BT[row].split(episode_BT[row].unique_consecutive(return_counts=True)[1].tolist())
        alone = [
            network(part[None], side_inputs=SideInputs(documents=torch.zeros_like(part)[None])).hidden[0]
            for part in parts
        ]
        close(torch.cat(found, dim=1)[row], torch.cat(alone))


@pytest.mark.parametrize(
    "given", [torch.tensor([1, 0]), torch.tensor([True]), torch.tensor(True), [True, False]], ids=str
)
def test_a_wrong_argument_of_reset_is_refused(given: Any) -> None:
    cache = ready(model())(tokens(2, 3), cache=Cache()).cache
    with pytest.raises(ValueError, match="reset takes booleans, one for each of the 2 sequences"):
        cache.reset(given)
