"""The contracts along time: future, prefix, cache, segments, rewind, padding, neighbours. study/contracts.py says what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Context
from everyformer.attention.evaluate import structural_positions
from everyformer.attention.span import DynamicSpan, Span
from everyformer.network.cache import Cache
from everyformer.network.depth import Stack
from everyformer.network.network import Network
from everyformer.network.repeat import Repeat
from everyformer.network.residual import Reversible
from everyformer.study.contract_report import BrokenContract, distance, logits_of
from everyformer.study.example import Example

OFFSETS = 9  # first positions that `future` tries


def future(network: Network, inputs: Example) -> float | None:  # eq. K6e
    if not (network.value.body.is_causal() and inputs.is_sequence):
        return None
    worst, half = 0.0, inputs.length // 2
    for offset in ({}, *_offsets(network, inputs)):
        before = inputs.run(network, **offset).hidden
        for time in sorted({1, half, half + 1, inputs.length - 1} - {inputs.length}):
            after = inputs.change_after(time).run(network, **offset).hidden
            worst = max(worst, distance(before[:, :time], after[:, :time]))
    return worst


def _offsets(network: Network, inputs: Example) -> Iterator[dict[str, Tensor]]:
    """First positions of the sequences, so that the positions at which the patterns are likely to change are in their middle."""
    if network.limit is not None or "edges" in inputs.whole:
        return
    patterns = dict.fromkeys(one for sublayer in network.value.body.sublayers() for one in sublayer.patterns())
    found = {at for pattern in patterns for at in structural_positions(pattern)}
    starts = [at - inputs.length // 2 for at in sorted(found) if at > inputs.length and {at - 1, at + 1} <= found]
    starts = starts[:: 1 + len(starts) // OFFSETS]
    batch = len(inputs.inputs)
    for first in range(0, len(starts), batch):
        some = (starts[first : first + batch] * batch)[:batch]
        yield {"position_offset": torch.tensor(some, device=inputs.inputs.device)}


def cache(network: Network, inputs: Example) -> float | None:
    return _in_pieces(network, inputs, segment_memory=False)


def segments(network: Network, inputs: Example) -> float | None:
    return _in_pieces(network, inputs, segment_memory=True)


def _in_pieces(network: Network, inputs: Example, segment_memory: bool) -> float | None:
    """Once token by token after some padding; once in a long piece, a single token and a long piece, without padding.

    The memory holds all earlier positions, because a shorter one is another function.
    """
    if not _continues(network, inputs):
        return None
    whole, half = inputs.run(network), inputs.length // 2
    worst = 0.0
    for start, cuts in ((2, range(1, inputs.length)), (0, sorted({half, half + 1} - {0, inputs.length}))):
        data = inputs.pad(start, 0) if start else inputs
        # The first one drops what no layer can read any more.
        cache, hidden = Cache(max_length=2 * inputs.length, segment_memory=segment_memory, forget=start > 0), []
        for left, right in pairwise((0, *(cut + start for cut in cuts), data.length)):
            output = data.cut(left, right).run(network, cache=cache)
            cache = output.cache or cache
            hidden.append(output.hidden)
        worst = max(worst, distance(torch.cat(hidden, dim=1)[:, start:], whole.hidden))
    return worst


def prefix(network: Network, inputs: Example) -> float | None:
    body = network.value.body
    found = body.prefix()
    if found is None or found.length == 0 or not inputs.is_sequence or network.class_token is not None:
        return None
    device, length = inputs.inputs.device, inputs.length
    length_B = inputs.whole["prefix"] if found.length is None else torch.tensor([found.length], device=device)
    whole, position = inputs.run(network).hidden, torch.arange(length, device=device)
    sees_BQK, exact = _sees(network, inputs)
    ahead_BQK = (position > position[:, None]) & ~(position < length_B[:, None, None])
    if bool((sees_BQK & ahead_BQK).any()):
        raise BrokenContract("the pattern lets a position see a later one that is not in the prefix")
    for time in range(length):
        moved_BQ = (inputs.change_at(time).run(network).hidden != whole).any(-1)
        if bool((moved_BQ & ~sees_BQK[:, :, time]).any()):
            raise BrokenContract(f"a change of token {time} changes the output of a position that must not see it")
        if exact and bool((sees_BQK[:, :, time] & ~moved_BQ).any()):
            raise BrokenContract(f"a change of token {time} does not change the output of a position that sees it")
    worst = 0.0
    for cut in range(max(1, int(length_B.max())), length if body.is_language_model() else 0):
        started = inputs.cut(0, cut).run(network, cache=Cache())
        rest = inputs.cut(cut).run(network, cache=started.cache)
        worst = max(worst, distance(torch.cat((started.hidden, rest.hidden), dim=1), whole))
    return worst


def _sees(network: Network, inputs: Example) -> tuple[Tensor, bool]:
    """Which positions each position sees through the layers, B, Q, K, and whether it sees all of these for sure."""
    body, (batch, length), device = network.value.body, inputs.inputs.shape[:2], inputs.inputs.device
    side: dict[str, Any] = {
        name: inputs.per_token.get(name, inputs.whole.get(name)) for name in ("documents", "edges", "prefix")
    }
    context = Context.of(length, length, device, **side)
    sees_BQK = torch.eye(length, dtype=torch.bool, device=device).expand(batch, -1, -1)
    count = getattr(body, "num_layers", 0) or getattr(body, "steps", 1) * len(body.layers)
    for sublayer in (one for i in range(count) for one in body.layers[i % len(body.layers)].sublayers):
        step_BQK = torch.eye(length, dtype=torch.bool, device=device).expand(batch, -1, -1)
        if sublayer.mixes_positions() and not sublayer.patterns():
            step_BQK = torch.ones_like(step_BQK).tril()
        for pattern in sublayer.patterns():
            hashes = any(part.needs == "hashes" for part in pattern.walk())
            heads = sublayer.heads.heads  # type: ignore[attr-defined]
            allowed = context.mask(pattern.superset() if hashes else pattern, batch, heads)
            step_BQK = step_BQK | allowed.expand(batch, heads, length, length).any(1)
        sees_BQK = (step_BQK.double() @ sees_BQK.double()) > 0
    attentions = [one for one in body.sublayers() if one.mixes_positions()]
    score_mods = [type(mod) for one in attentions for mod in getattr(one, "score_mods", ())]
    exact = isinstance(body, Stack | Repeat) and not isinstance(body.residual, Reversible)
    exact = exact and all(one.patterns() for one in attentions) and not {Span, DynamicSpan} & set(score_mods)
    return sees_BQK, exact and not any(part.needs == "hashes" for part in body.patterns())


def rewind(network: Network, inputs: Example) -> float | None:
    if not _continues(network, inputs):
        return None
    half = inputs.length // 2
    if half == 0:
        return None  # a single position has nothing to roll back
    other = inputs.change_after(half)
    straight, worst = inputs.run(network).hidden[:, half:], 0.0
    order = torch.arange(len(inputs.inputs), device=inputs.inputs.device).flip(0)
    for segment_memory in (False, True):
        begin = Cache(max_length=2 * inputs.length, segment_memory=segment_memory)
        started = inputs.cut(0, half).run(network, cache=begin).cache
        assert started is not None
        astray = other.cut(half).run(network, cache=started).cache
        assert astray is not None
        again = inputs.cut(half).run(network, cache=astray.roll_back(inputs.length - half)).hidden
        turned = inputs.cut(half).rows(order).run(network, cache=started.reorder(order)).hidden
        worst = max(worst, distance(again, straight), distance(turned, straight[order]))
    return worst


def padding(network: Network, inputs: Example) -> float | None:
    if not inputs.is_sequence or network.class_token is not None:
        return None
    whole = inputs.run(network)
    worst = 0.0
    for left, right in ((3, 0), (0, 3), (2, 1)):
        padded = inputs.pad(left, right).run(network)
        worst = max(worst, distance(padded.hidden[:, left : left + inputs.length], whole.hidden))
        for one, two in zip(logits_of(padded), logits_of(whole), strict=True):
            cropped = one if one.dim() == 2 else one[:, left : left + inputs.length]
            worst = max(worst, distance(cropped, two))
    if _continues(network, inputs):
        for begin in SHORT:
            pieces = _pieces(inputs)
            plain, padded_pieces = _run(network, pieces, begin), _run(network, _padded(pieces), begin)
            worst = max(worst, distance(torch.cat(padded_pieces), torch.cat(plain)))
    return worst


def neighbours(network: Network, inputs: Example) -> float | None:
    if not inputs.is_sequence:
        return None

    def error(pieces: list[Example], begin: Cache | None) -> float:
        rows = torch.arange(len(inputs.inputs), device=inputs.inputs.device)[:, None]
        alone = [_run(network, [piece.rows(row) for piece in pieces], begin) for row in rows]
        return distance(
            torch.cat([torch.cat(one) for one in alone]), torch.cat(_run(network, pieces, begin, by_row=True))
        )

    worst = error([inputs], None)
    if _continues(network, inputs):
        worst = max(worst, *(error(_padded(_pieces(inputs)), begin) for begin in SHORT))
    return worst


# In a later call a cache that is shorter than what was before also shows what each sequence keeps of it.
SHORT = (Cache(max_length=2), Cache(max_length=2, segment_memory=True))


def _pieces(inputs: Example) -> list[Example]:
    """The sequence in three pieces, or fewer if it is short."""
    cuts = [inputs.length * i // min(3, inputs.length) for i in range(min(3, inputs.length) + 1)]
    return [inputs.cut(start, end) for start, end in pairwise(cuts)]


def _padded(pieces: list[Example]) -> list[Example]:
    """With padding that differs from sequence to sequence and from piece to piece."""
    return [piece.pad(number % 3, 2 - number % 3, uneven=True) for number, piece in enumerate(pieces)]


def _run(network: Network, pieces: list[Example], cache: Cache | None, by_row: bool = False) -> list[Tensor]:
    """The outputs of the pieces, one after the other: of the visible tokens only, N, D. `by_row`: sequence by sequence."""
    hidden: list[list[Tensor]] = []
    for piece in pieces:
        output = piece.run(network, cache=cache)
        cache = output.cache
        visible_BT = piece.per_token.get("visible", output.hidden.new_ones(output.hidden.shape[:2], dtype=torch.bool))
        hidden.append([x_TD[seen_T] for x_TD, seen_T in zip(output.hidden, visible_BT, strict=True)])
    rows = zip(*hidden, strict=True) if by_row else hidden
    return [torch.cat(list(row)) for row in rows]


def _continues(network: Network, inputs: Example) -> bool:
    """Whether the model can read a sequence piece by piece."""
    return network.value.body.is_causal() and inputs.is_sequence and network.class_token is None
