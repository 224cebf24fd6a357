"""A cache that forgets: a layer with a window keeps its window, one without keeps everything, and no output changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from everyformer import (
    Alibi,
    Attention,
    Cache,
    FeedForward,
    Language,
    Layer,
    Model,
    PreNorm,
    Rotary,
    Stack,
    Standard,
    Tokens,
    generate,
)
from everyformer.attention.parse import parse
from everyformer.family.table import MEMBERS
from everyformer.infer.batching import Batcher
from everyformer.infer.decode import most_slots
from everyformer.network.slots import Slots
from tests.network import close, ready
from tests.network.test_cache import PIECES, feed

WINDOW = 3
PATTERNS = (f"causal & window({WINDOW})", "causal", "causal & window(5)")  # of the layers in turn
PROMPTS = [[1, 2, 3, 4, 5, 6, 1, 2], [6], [5, 4, 3]]


def mixed(*patterns: str, score_mods: tuple[Any, ...] = (Rotary(),)) -> Model:
    layers = tuple(Layer((Attention(Standard(2), parse(one), score_mods), FeedForward(16))) for one in patterns)
    return Model(width=8, embed=Tokens(20), body=Stack(len(layers), layers, PreNorm()), outputs=(Language(),))


def kept(cache: Cache) -> list[int]:
    return [entry.tensors[0].shape[2] for entry in cache.entries]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("score_mods", [(Rotary(),), (Alibi(),)], ids=["rotary", "alibi"])
@pytest.mark.parametrize("patterns", [PATTERNS, PATTERNS[:1] * 2])
def test_what_is_forgotten_changes_no_output(patterns, score_mods, side):
    """Sequences of different lengths, padded in the first call and in later ones."""
    network = ready(mixed(*patterns, score_mods=score_mods))
    caches, before = [Cache(), Cache(forget=True)], (0, 0, 0)
    for lengths in [*PIECES, (1, 1, 1), (2, 1, 1)]:
        both = [feed(network, side, cache, before, lengths) for cache in caches]
        for one, two in zip(both[0][1], both[1][1], strict=True):
            close(one, two)
        caches = [output.cache for output, _ in both]
        before = tuple(a + b for a, b in zip(before, lengths, strict=True))
    assert min(kept(caches[1])) < min(kept(caches[0]))


def test_the_keys_of_a_window_take_constant_memory():
    network, token_BT = ready(mixed(*PATTERNS)), torch.arange(120)[None] % 7
    output = network(token_BT[:, :20], cache=Cache(forget=True))
    assert kept(output.cache) == [WINDOW - 1, 20, 4]
    sizes: list[list[int]] = []
    with torch.no_grad():
        for at in range(20, 120):
            output = network(token_BT[:, at : at + 1], cache=output.cache)
            sizes.append([entry.tensors[0].untyped_storage().nbytes() for entry in output.cache.entries])
    close(output.hidden[:, 0], network(token_BT).hidden[:, -1])
    assert kept(output.cache) == [WINDOW - 1, 120, 4] and output.cache.length == 120
    near, far, _ = zip(*sizes, strict=True)
    assert max(near[1:]) == near[1] < far[-1]


def test_a_model_of_windows_alone_forgets_positions_too():
    network, token_BT = ready(mixed(*PATTERNS[:1] * 2)), torch.arange(30)[None] % 7
    cache = network(token_BT, cache=Cache(forget=True)).cache
    assert cache.length == WINDOW - 1 and cache.position_BK.tolist() == [[28, 29]]


def test_forgotten_keys_are_reordered_and_started_anew_but_not_rolled_back():
    network, token_BT = (
        ready(mixed(*PATTERNS)),
        torch.randint(0, 7, (3, 14), generator=torch.Generator().manual_seed(0)),
    )
    cache = network(token_BT[:, :12], cache=Cache(forget=True)).cache
    order = torch.tensor([2, 0, 0])
    moved = network(token_BT[order, 12:], cache=cache.reorder(order)).hidden
    close(moved, network(token_BT).hidden[order, 12:])
    anew = network(token_BT[:, :2], cache=cache.reset(torch.tensor([True, False, False]))).hidden
    close(anew[0], network(token_BT[:1, :2]).hidden[0])
    assert cache.reset(torch.tensor([True] * 3)).forget
    with pytest.raises(ValueError, match=r"cannot roll back 1 positions: Cache\(forget=True\) drops the keys"):
        cache.roll_back(1)
    assert cache.roll_back(0).length == 12


def test_slots_of_a_window_are_few_and_used_again(monkeypatch):
    network = ready(mixed(*PATTERNS))
    slots = Slots.of(network, network(torch.tensor([[1, 2, 3]]), cache=Cache()).cache, 16)
    assert [entry.tensors[0].shape[2] for entry in slots.entries] == [4, 16, 8] and most_slots(network) is None
    grown = slots.grown(64, 3)
    assert [entry.tensors[0].shape[:3] for entry in grown.entries] == [(3, 2, 4), (3, 2, 64), (3, 2, 8)]
    monkeypatch.setattr("everyformer.infer.decode.FEWEST", 4)  # so that the slots grow on the way
    expected = generate(network, PROMPTS, 30, seed=0, cached=False)
    assert generate(network, PROMPTS, 30, seed=0, static=True) == expected
    assert generate(network, PROMPTS, 30, seed=0, static=False) == expected


def test_slots_take_up_a_cache_that_has_forgotten():
    network, token_BT = ready(mixed(*PATTERNS)), torch.arange(24)[None] % 7
    slots = Slots.of(network, network(token_BT[:, :9], cache=Cache(forget=True)).cache, 64)
    for at in range(9, 24):
        logits = slots.step(token_BT[:, at : at + 1])
    close(logits[:, 0], network(token_BT).logits[:, -1])


def test_requests_of_different_lengths_share_the_rows_of_windows():
    network = ready(mixed(*PATTERNS))
    found: dict[int, list[int | None]] = {}
    batcher = Batcher(network, 2)
    numbers = [batcher.submit(prompt, 40, seed=0) for prompt in PROMPTS]
    while batcher.active or batcher.waiting:
        for event in batcher.step():
            found.setdefault(event.number, []).append(event.token)
    expected = [generate(network, [prompt], 40, seed=0, cached=False)[0] for prompt in PROMPTS]
    assert [prompt + found[number] for prompt, number in zip(PROMPTS, numbers, strict=True)] == expected


@pytest.mark.parametrize("name", ["gemma", "gemma2", "mistral"])
def test_the_members_with_windows_forget(name):
    network = ready(MEMBERS[name].value("tiny"))
    token_BT = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(0))
    cache = network(token_BT[:, :30], cache=Cache(forget=True)).cache
    assert kept(cache) == ([15, 15] if name == "mistral" else [15, 30])
    close(network(token_BT[:, 30:], cache=cache).logits, network(token_BT).logits[:, 30:])
