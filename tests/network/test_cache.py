"""The cache: continuing from it equals one pass, however the sequences are padded, reordered or rolled back."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import everyformer
from everyformer import (
    Alibi,
    Cache,
    CrossAttention,
    EncoderDecoder,
    Features,
    Language,
    Learned,
    PostNorm,
    PreNorm,
    Rotary,
    SegmentMemory,
    Shaw,
    SideInputs,
    Sinusoidal,
    Standard,
)
from everyformer.attention.score_mod import RotaryModule
from everyformer.network.cache import LayerInputs
from tests.network import close, model, randn, ready, tokens

WAYS: dict[str, dict[str, Any]] = {
    "none": {},
    "rotary": {"score_mods": (Rotary(),)},
    "learned": {"position": Learned(12)},
    "sinusoidal": {"position": Sinusoidal()},
    "alibi": {"score_mods": (Alibi(),), "residual": PostNorm()},
    "shaw": {"score_mods": (Shaw(2, values=True),)},
}
PATTERNS = ["causal", "causal & window(3)", "by_head(causal, causal & stride(2))"]
ROWS = tokens(3, 10).tolist()
PIECES = [(4, 2, 3), (1, 1, 1), (1, 3, 2)]  # how many tokens of each sequence come with each call


def pad(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """Rows of different lengths as one batch of tokens, and which of them are real."""
    longest = max(map(len, rows))
    batch, visible = [], []
    for row in rows:
        holes = longest - len(row)
        batch.append([0] * holes + row if side == "left" else row + [0] * holes)
        visible.append([False] * holes + [True] * len(row) if side == "left" else [True] * len(row) + [False] * holes)
    return torch.tensor(batch), torch.tensor(visible)


def feed(
    network: Any, side: str, cache: Cache, before: tuple[int, ...], lengths: tuple[int, ...], **options: Any
) -> Any:
    """The next so many tokens of each sequence; the output, and the hidden vectors of each without its padding."""
    x, visible = pad([row[a : a + n] for row, a, n in zip(ROWS, before, lengths, strict=True)], side)
    output = network(x, visible=None if visible.all() else visible, cache=cache, **options)
    return output, [hidden[seen] for hidden, seen in zip(output.hidden, visible, strict=True)]


@pytest.mark.spec(60)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("way", WAYS)
def test_prompts_of_different_lengths_continue_as_each_would_alone(way, pattern, side):
    """Padded left or right, in the first call and in later ones: padding keeps its place in the cache and no query attends to it."""
    network = ready(model(pattern, **WAYS[way]))
    cache, before = Cache(), (0, 0, 0)
    found: list[list[Tensor]] = [[] for _ in ROWS]
    for lengths in PIECES:
        output, parts = feed(network, side, cache, before, lengths)
        cache, before = output.cache, tuple(a + n for a, n in zip(before, lengths, strict=True))
        for row, part in zip(found, parts, strict=True):
            row.append(part)
    for row, text, length in zip(found, ROWS, before, strict=True):
        close(torch.cat(row), network(torch.tensor([text[:length]])).hidden[0])


@pytest.mark.spec(60)
@pytest.mark.parametrize("cuts", [[0, *range(1, 11)], [0, 4, 10], [0, 1, 9, 10]])
@pytest.mark.parametrize("way", WAYS)
def test_pieces_equal_the_whole(way, cuts):
    network, x, cache, found = ready(model(**WAYS[way])), torch.tensor(ROWS), Cache(), []
    for start, end in pairwise(cuts):
        output = network(x[:, start:end], cache=cache)
        cache = output.cache
        found.append(output.hidden)
    close(torch.cat(found, dim=1), network(x).hidden)
    assert cache.length == 10 and network(x).cache is None


@pytest.mark.spec(60)
def test_a_pattern_may_attend_to_the_future_within_one_call_only():
    """Blocks given one at a time equal one pass; a block split over two calls is refused."""
    network, x = ready(model("block(5)")), torch.tensor(ROWS)
    first = network(x[:, :5], cache=Cache())
    second = network(x[:, 5:], cache=first.cache)
    close(torch.cat((first.hidden, second.hidden), dim=1), network(x).hidden)
    half = network(x[:, :3], cache=Cache()).cache
    with pytest.raises(ValueError, match=r"block\(5\) lets cached positions attend to new ones"):
        network(x[:, 3:], cache=half)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 0, 2], [2]])
def test_reordered_sequences_continue_as_if_they_had_started_in_that_order(order, side):
    network, index = ready(model(position=Sinusoidal())), torch.tensor(order)
    cache = feed(network, side, Cache(), (0, 0, 0), (4, 2, 3))[0].cache
    again = tokens(3, 2, seed=5)
    close(network(again[index], cache=cache.reorder(index)).hidden, network(again, cache=cache).hidden[index])


@pytest.mark.parametrize("documents", [False, True])
def test_one_sequence_may_become_several(documents):
    """A beam begins with one prompt."""
    network = ready(model("causal & same_document" if documents else "causal"))
    x, more = torch.tensor(ROWS[:1]), tokens(3, 2, seed=5)
    first = {"side_inputs": SideInputs(torch.zeros(1, 10, dtype=torch.long))} if documents else {}
    then = {"side_inputs": SideInputs(torch.zeros(3, 2, dtype=torch.long))} if documents else {}
    cache = network(x, cache=Cache(), **first).cache.reorder(torch.tensor([0, 0, 0]))
    whole = torch.cat((x.expand(3, -1), more), dim=1)
    options = {"side_inputs": SideInputs(torch.zeros(3, 12, dtype=torch.long))} if documents else {}
    close(network(more, cache=cache, **then).hidden, network(whole, **options).hidden[:, 10:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_rolled_back_cache_continues_exactly(count, side):
    network = ready(model(position=Learned(12)))
    started = feed(network, side, Cache(), (0, 0, 0), (4, 2, 3))[0].cache
    astray = network(tokens(3, count, seed=5), cache=started).cache if count else started
    wanted = feed(network, side, started, (4, 2, 3), (2, 2, 2))[0]
    found = feed(network, side, astray.roll_back(count), (4, 2, 3), (2, 2, 2))[0]
    close(found.hidden, wanted.hidden, 1e-300)
    assert found.cache.length == wanted.cache.length


def test_a_cache_rolled_back_completely_starts_anew():
    network, x = ready(model(position=Learned(12))), torch.tensor(ROWS)
    cache = network(x, cache=Cache()).cache.roll_back(10)
    close(network(x, cache=cache).hidden, network(x).hidden)


@pytest.mark.parametrize(
    ("positions", "begins"),
    [
        ([[0, 1, 2]], True),
        ([[-1, 0, 1]], True),
        ([[0, 1, 2], [-1, -1, -1]], True),
        ([[4, 5, 6]], False),
        ([[4, -1, 5]], False),
        ([[0, 1, 2], [-1, 4, 5]], False),
    ],
)
def test_only_a_cache_that_starts_at_position_0_is_rolled_back_completely(positions, begins):
    cache = Cache(
        3,
        (LayerInputs((torch.zeros(len(positions), 3, 2),)),),
        torch.tensor(positions),
        segment_memory=True,
        has_padding=True,
    )
    with nullcontext() if begins else pytest.raises(ValueError, match=r"does not start at position 0.*keep at least 1"):
        assert cache.roll_back(3).length == 0


@pytest.mark.spec(57, 60)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("way", ["none", "rotary", "sinusoidal", "alibi"])
def test_a_trimmed_cache_is_exact_under_a_window(way, side):
    """causal & window(w) needs the last w - 1 keys: with only those of each sequence the outputs stay the same."""
    network, window, long = ready(model("causal & window(3)", **WAYS[way])), 3, tokens(3, 9, seed=5)
    output, _ = feed(network, side, Cache(), (0, 0, 0), (4, 2, 3))
    cache, found = output.cache, []
    for step in range(9):
        cache = cache.trim(window - 1)
        output = network(long[:, step : step + 1], cache=cache)
        cache = output.cache
        found.append(output.hidden)
        assert cache.length <= window + 2  # the right-padded rows have up to two holes
    assert cache.trim(window - 1).length == window - 1  # and those have gone by
    for row, n in enumerate((4, 2, 3)):
        whole = torch.cat((torch.tensor(ROWS[row][:n]), long[row]))[None]
        close(torch.cat(found, dim=1)[row], network(whole).hidden[0, n:])


def test_one_key_less_than_the_window_needs_is_not_exact():
    network, x = ready(model("causal & window(3)", score_mods=(Rotary(),))), torch.tensor(ROWS)
    cache = network(x[:, :9], cache=Cache()).cache
    whole = network(x).hidden[:, 9:]
    close(network(x[:, 9:], cache=cache.trim(2)).hidden, whole)
    assert (network(x[:, 9:], cache=cache.trim(1)).hidden - whole).abs().max() > 1e-3


def test_a_cache_is_immutable():
    network, x = ready(model(position=Sinusoidal())), torch.tensor(ROWS)
    cache = feed(network, "right", Cache(), (0, 0, 0), (4, 2, 3))[0].cache
    held = [cache.position_BK, *(part for keys in cache.entries for part in (keys.k_BHKE, keys.v_BHKE))]
    before = [part.clone() for part in held]
    one = network(x[:, :2], cache=cache)
    for other in (one.cache.roll_back(2), cache.reorder(torch.tensor([2, 1])), cache.trim(1), cache.roll_back(1)):
        network(x[: other.batch, :1], cache=other)
    two = network(x[:, :2], cache=cache)
    assert all(torch.equal(part, copy) for part, copy in zip(held, before, strict=True))
    assert torch.equal(one.hidden, two.hidden) and cache.length == 4
    with pytest.raises(AttributeError):
        cache.length = 3


@pytest.mark.spec(72)
@pytest.mark.parametrize("trim", [None, 6])
def test_documents_come_with_every_call(trim):
    network, x = ready(model("causal & same_document & window(7)", score_mods=(Rotary(),))), torch.tensor(ROWS)
    documents = torch.tensor([[0] * 3 + [1] * 7, [0] * 5 + [1] * 2 + [2] * 3, [4] * 10])
    cache, found = Cache(), []
    for start, end in pairwise([0, 2, 6, 7, 8, 9, 10]):
        output = network(x[:, start:end], side_inputs=SideInputs(documents=documents[:, start:end]), cache=cache)
        cache = output.cache if trim is None else output.cache.trim(trim)
        found.append(output.hidden)
    close(torch.cat(found, dim=1), network(x, side_inputs=SideInputs(documents=documents)).hidden)


@pytest.mark.parametrize("side", ["left", "right"])
def test_documents_and_padding_together(side):
    network, documents = (
        ready(model("causal & same_document", score_mods=(Rotary(),))),
        [[0, 0, 1, 1], [3, 4], [2, 2, 2]],
    )
    padded, _ = pad(documents, side)
    output, parts = feed(network, side, Cache(), (0, 0, 0), (4, 2, 3), side_inputs=SideInputs(documents=padded))
    last = torch.tensor([[1], [4], [2]])
    _, more = feed(network, side, output.cache, (4, 2, 3), (1, 1, 1), side_inputs=SideInputs(documents=last))
    for row in range(3):
        ids = torch.tensor([[*documents[row], last[row].item()]])
        alone = network(torch.tensor([ROWS[row][: ids.shape[1]]]), side_inputs=SideInputs(documents=ids)).hidden[0]
        close(torch.cat((parts[row], more[row])), alone)


@pytest.mark.spec(15, 60, 62)
@pytest.mark.parametrize("residual", [PreNorm(), PostNorm()])
def test_keys_of_the_encoder_output_are_computed_once(residual, monkeypatch):
    """Cross-attention computes keys and values in the first call only."""
    decoder = model("causal", cross=CrossAttention(Standard(2)), residual=residual, outputs=(Language(),))
    network = ready(EncoderDecoder(encoder=model("full"), decoder=decoder))
    seen_BS = torch.tensor([[True] * 4, [False, True, True, True], [True, True, True, False]])
    memory = network.encode(tokens(3, 4, seed=7), visible=seen_BS)
    x, cache, found = torch.tensor(ROWS), Cache(), []
    calls: list[Any] = []
    wanted = network.decode(x, memory).hidden

    def counted(number: int, read: Any) -> Any:
        def reading(y_BSD: Tensor) -> Any:
            calls.append(number)
            return read(y_BSD)

        return reading

    for number, layer in enumerate(network.decoder.body.layers):
        monkeypatch.setattr(
            layer.sublayers[1].heads, "keys_values", counted(number, layer.sublayers[1].heads.keys_values)
        )
    for step in range(10):
        output = network.decode(x[:, step : step + 1], memory, cache=cache)
        cache = output.cache.reorder(torch.arange(3)).roll_back(0)  # which keep them too
        found.append(output.hidden)
    close(torch.cat(found, dim=1), wanted)
    assert calls == [0, 1]
    order = torch.tensor([2, 0])
    turned = network.decode(x[order, :1], type(memory)(memory.x_BSD[order], seen_BS[order]), cache=cache.reorder(order))
    close(turned.hidden, network.decode(x[:, :1], memory, cache=cache).hidden[order])


@pytest.mark.spec(60)
def test_features_continue_from_a_cache_like_tokens():
    network, x = ready(model(embed=Features(5), position=Sinusoidal())), randn(2, 6, 5)
    cache = network(x[:, :4], cache=Cache()).cache
    close(network(x[:, 4:], cache=cache).hidden, network(x).hidden[:, 4:])


def test_a_segment_memory_with_reset_rows_is_equal_after_saving() -> None:
    network, x_BT = ready(model(memory=SegmentMemory(4), score_mods=(Rotary(),))), tokens(3, 9)
    cache = network(x_BT[:, :5], cache=Cache(segment_memory=True)).cache.reset(torch.tensor([False, True, False]))
    again = Cache.from_state_dict(cache.state_dict())
    assert (again.length, again.segment_memory, again.has_padding) == (cache.length, True, cache.has_padding)
    assert torch.equal(again.position_BK, cache.position_BK)
    found, wanted = (network(x_BT[:, 5:], cache=one) for one in (again, cache))
    assert torch.equal(found.hidden, wanted.hidden) and found.cache.length == wanted.cache.length


@pytest.mark.parametrize("segment_memory", [False, True])
@pytest.mark.parametrize("name", ["transformer-xl", "gtrxl", "adaptive-span"])
def test_the_padding_of_another_sequence_changes_no_later_output(name, segment_memory):
    """Each sequence keeps as many positions as it would alone, however many the cache holds for the padding of the others."""
    network = ready(everyformer.member(name, "tiny"))
    token_BT, visible_BT = tokens(2, 30), torch.ones(2, 30, dtype=torch.bool)
    visible_BT[1, 5:] = False
    begin = Cache(segment_memory=segment_memory, max_length=8)
    together = network(token_BT, visible=visible_BT, cache=begin)
    alone = network(token_BT[:1], cache=begin)
    for _ in range(3):
        together, alone = network(token_BT[:, :6], cache=together.cache), network(token_BT[:1, :6], cache=alone.cache)
        close(together.hidden[:1], alone.hidden)
        assert together.cache.position_BK[0].sort().values[-8:].tolist() == alone.cache.position_BK[0].tolist()


def test_a_cache_of_equal_models_and_equal_sources_is_accepted():
    value = EncoderDecoder(encoder=model("full"), decoder=model(cross=CrossAttention(Standard(2))))
    one, other = ready(value), ready(value)
    encoder_output = one.encode(tokens())
    cache = one.decode(tokens(), encoder_output, cache=Cache()).cache
    copied = replace(encoder_output, x_BSD=encoder_output.x_BSD.clone())
    order = torch.tensor([1, 0, 1])
    turned = replace(encoder_output, x_BSD=encoder_output.x_BSD[order])
    close(other.decode(tokens(), copied, cache=cache).hidden, one.decode(tokens(), encoder_output, cache=cache).hidden)
    one.decode(tokens()[order], turned, cache=cache.reorder(order))
    with pytest.raises(ValueError, match="another encoder output of the same length"):
        one.decode(tokens(), replace(encoder_output, x_BSD=1 + encoder_output.x_BSD), cache=cache)


@pytest.mark.parametrize("way", ["none", "rotary"])
def test_appending_a_token_copies_nothing_that_was_there(way):
    """The keys of one call are those of the next in the same memory, and the memory doubles when it is full."""
    network, cache, moves = ready(model(**WAYS[way])), Cache(), []
    with torch.no_grad():
        for count in range(100):
            before = [x.data_ptr() for entry in cache.entries for x in entry.tensors]
            cache = network(tokens(2, 1, seed=count), cache=cache).cache
            moves.append(before != [x.data_ptr() for entry in cache.entries for x in entry.tensors])
    assert [count for count, moved in enumerate(moves) if moved] == [0, 1, 32, 66]


@pytest.mark.parametrize("way", WAYS)
def test_two_continuations_of_one_cache_do_not_disturb_each_other(way):
    """Whoever appends to an older value gets a copy: after a roll back, a trim, or a second call with the same cache."""
    network = ready(model("causal & window(3)", **WAYS[way]))
    token_BT, other_BT = tokens(2, 8), tokens(2, 8, seed=1)
    with torch.no_grad():
        start = network(token_BT[:, :4], cache=Cache()).cache
        start = network(token_BT[:, 4:5], cache=start).cache  # now there is room
        caches = [start, start, start.roll_back(1), start.trim(4), start.reorder(torch.tensor([0, 1]))]
        news = [token_BT[:, 5:], other_BT[:, 5:], token_BT[:, 4:], other_BT[:, 5:], token_BT[:, 5:]]
        outputs: list[list[Tensor]] = [[] for _ in caches]
        for index in range(3):
            for number, new_BT in enumerate(news):
                output = network(new_BT[:, index : index + 1], cache=caches[number])
                caches[number] = output.cache
                outputs[number].append(output.hidden)
        wholes = [
            network(torch.cat((token_BT[:, :5], new_BT), dim=1)[:, :8] if new_BT.shape[1] == 3 else token_BT).hidden
            for new_BT in news
        ]
    for number, (whole_BTD, found) in enumerate(zip(wholes, outputs, strict=True)):
        first = 4 if number == 2 else 5
        close(torch.cat(found, dim=1), whole_BTD[:, first : first + 3])


def test_gradients_flow_through_a_cache_that_has_room():
    """With gradients, positions are concatenated, so that nothing that a backward pass reads is written to again."""
    network, token_BT = ready(model(score_mods=(Rotary(),))), tokens(2, 6)
    with torch.no_grad():
        cache = network(token_BT[:, :2], cache=Cache()).cache
        cache = network(token_BT[:, 2:3], cache=cache).cache
    first = network(token_BT[:, 3:4], cache=cache)
    second = network(token_BT[:, 4:5], cache=first.cache)
    with torch.no_grad():
        network(token_BT[:, 5:], cache=second.cache)
        network(token_BT[:, 3:4], cache=cache)
    gradients = torch.autograd.grad(second.hidden.sum(), list(network.body.parameters()), allow_unused=True)
    assert any(gradient is not None and bool(gradient.abs().sum() > 0) for gradient in gradients)


def test_a_key_is_turned_once(monkeypatch):
    """The keys of a cache are as rotary turns them, so a call turns those of its own tokens alone."""
    network, turned = ready(model(score_mods=(Rotary(),))), list[int]()
    rotate = RotaryModule._rotate

    def recorded(self: RotaryModule, x_BHTE: Tensor, *rest: Any) -> Tensor:
        turned.append(x_BHTE.shape[2])
        return rotate(self, x_BHTE, *rest)

    monkeypatch.setattr(RotaryModule, "_rotate", recorded)
    cache = network(tokens(2, 5), cache=Cache()).cache
    network(tokens(2, 1), cache=cache)
    assert turned == [5] * 4 + [1] * 4  # queries and keys of two layers
