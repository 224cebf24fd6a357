"""The pattern `hashed` in memory that grows with the length: put the keys of a bucket together, attend near, merge the rounds.

In each round every bucket begins a new chunk, and its keys fill chunks in the order of their ranks. A chunk of queries then
finds all keys that it sees in itself and the few chunks before it. A pair that several rounds show counts in the first of
them; the rounds are merged as sums of exponentials over their largest score, which is exact. Where a key stands in its
chunk depends on earlier keys only, so that even rounding tells an earlier query nothing of a later one. Sizes follow from the
length, never from the data; every step is plain PyTorch.

The chunks of all sequences and heads lie in one row of W, `back` empty ones before the first of each: so the S keys that N chunks
look at, those without the first empty ones, are the same row, shifted, and nothing is copied. A slot is a place in that row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.hashing import BUCKET
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Hashed

NEVER = -1e30  # a score that no weight is left of, with gradients of 0 where -inf has none
NOWHERE = -2 * BUCKET  # a place that nobody sees
SIZES = (32, 64, 128, 256)


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if not isinstance(request.pattern, Hashed):
        return f"the pattern {request.pattern} is not hashed(...) alone; use sdpa"
    if request.context.side.hashes is None:
        return "the keys decide who sees whom in hashed: attend within a model, which hashes them"
    if request.context.positions.query_BQ is not None:
        return "the queries are not among the keys; use sdpa"
    return None


def run(request: Request) -> Tensor:
    pattern, context = request.pattern, request.context
    assert isinstance(pattern, Hashed)
    grid, before = Grid.of(pattern, context.positions.keys), context.positions.keys - context.positions.queries
    place_BHRK = _by_number(context)
    q = F.pad(request.q_BHQE, (0, 0, before, 0)) if before else request.q_BHQE
    rows = [x.flatten(0, 2) for x in (q, request.k_BHKE, request.v_BHKE)]
    rounds = [_round(request, grid, place_BHRK, number, rows) for number in range(pattern.rounds)]
    top = torch.stack([one for one, _ in rounds]).amax(0)
    total = torch.stack([sums * (one - top).exp() for one, sums in rounds]).sum(0)
    answer = (total[:, :-1] / total[:, -1:]).unflatten(0, (request.batch, request.heads, context.positions.keys))[
        :, :, before:
    ]
    real_BHQ1 = place_BHRK[:, :, 0, before:, None] >= 0
    return answer.masked_fill(~real_BHQ1, 0).to(request.v_BHKE.dtype)


def computed_fraction(pattern: Hashed, queries: int, keys: int) -> float:
    """The share of the Q x K scores that this kernel computes: 1 is what a dense kernel does."""
    return pattern.rounds * Grid.of(pattern, keys).scores / (queries * keys)


@dataclass(frozen=True)
class Grid:
    """How many chunks a head may need, how many positions they have, and how many chunks back the window reaches."""

    chunks: int
    size: int
    back: int

    @staticmethod
    def of(pattern: Hashed, keys: int) -> Grid:
        """Large chunks look at keys in vain, small ones are many. Each bucket has at most one that is not full."""
        options = (Grid(keys // size + min(pattern.buckets, keys), size, -(-pattern.window // size)) for size in SIZES)
        return min(options, key=lambda grid: grid.scores)

    @property
    def scores(self) -> int:
        return self.chunks * self.size * self.size * (1 + self.back)

    def near(self, x: Tensor) -> list[Tensor]:
        """The row of chunks as each chunk but the first sees it: so many chunks before it, the one before it, itself."""
        return [x[start : len(x) - self.back + start] for start in range(self.back + 1)]


def _by_number(context: Context) -> Tensor:
    """The scene's table of places by the number of the key instead of its position."""
    table_BHRP = context.side.hashes
    assert table_BHRP is not None
    if context.positions.key_BK is None:
        return table_BHRP[..., :-1]
    at_BK = context.positions.key_BK % table_BHRP.shape[-1]
    return table_BHRP.gather(-1, at_BK[:, None, None].expand(*table_BHRP.shape[:3], -1))


def _round(request: Request, grid: Grid, place_BHRK: Tensor, number: int, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """For the query of each key: the largest score of a round, and the sums of exp(score - largest) times v and times 1."""
    slot, key = _layout(place_BHRK[:, :, number], grid, request.pattern)
    q_WQE, k_WQE, v_WQE = (move(x, key, slot).unflatten(0, (-1, grid.size)) for x in rows)
    place_RP = (
        place_BHRK.movedim(2, 0).flatten(1)[:, key.clamp(max=len(slot) - 1)].masked_fill(key == len(slot), NOWHERE)
    )
    seen_NQS = _seen(request.pattern, grid, place_RP.unflatten(1, (-1, grid.size)), number)

    score_NQS = torch.cat([q_WQE[grid.back :] @ k.mT for k in grid.near(k_WQE)], dim=2) * request.scale
    score_NQS = score_NQS.to(torch.promote_types(score_NQS.dtype, torch.float32))
    if request.terms:
        index = _indices(request, grid, key.clamp(max=len(slot) - 1))
        for term in request.terms:
            score_NQS = score_NQS + term(*index)
    score_NQS = score_NQS.masked_fill(~seen_NQS, NEVER)
    top_NQ1 = score_NQS.detach().amax(-1, keepdim=True)
    share_NQS = (score_NQS - top_NQ1).exp()
    kept_NQS = F.dropout(share_NQS, request.dropout, training=request.dropout > 0).to(v_WQE.dtype)
    parts = zip(kept_NQS.split(grid.size, dim=2), grid.near(v_WQE), strict=True)
    answer = torch.stack([part @ v for part, v in parts]).sum(0)
    sums = torch.cat((answer, share_NQS.sum(-1, keepdim=True)), dim=-1)

    lead = grid.back * grid.size  # the first chunks are empty and were left out
    there = (slot - lead, key[lead:])
    return move(top_NQ1.flatten(0, 1), *there), move(sums.flatten(0, 1), *there)


def _layout(place_BHK: Tensor, grid: Grid, pattern: Any) -> tuple[Tensor, Tensor]:
    """The slot of each key and the key of each slot, over all sequences and heads; for none, the number past the last."""
    lost_BHK = place_BHK < 0
    bucket_BHK = torch.where(lost_BHK, pattern.buckets, place_BHK // BUCKET)
    count_BHN = place_BHK.new_zeros(*place_BHK.shape[:2], pattern.buckets + 1)
    count_BHN = count_BHN.scatter_add(2, bucket_BHK, torch.ones_like(place_BHK))
    chunks_BHN = (count_BHN + grid.size - 1) // grid.size
    heads = torch.arange(place_BHK[..., 0].numel(), device=place_BHK.device).view(*place_BHK.shape[:2], 1)
    first_BHN = heads * (grid.chunks + grid.back) + grid.back + chunks_BHN.cumsum(2) - chunks_BHN
    slots = heads.numel() * (grid.chunks + grid.back) * grid.size
    slot = first_BHN.gather(2, bucket_BHK) * grid.size + place_BHK % BUCKET
    slot = slot.masked_fill(lost_BHK, slots).flatten()
    key = slot.new_full((slots + 1,), len(slot)).scatter(0, slot, torch.arange(len(slot), device=slot.device))
    return slot, key[:-1]


def _seen(pattern: Any, grid: Grid, place_RWQ: Tensor, number: int) -> Tensor:
    """Whom the queries of each chunk see in this round and in none before."""

    def shown(place_WQ: Tensor) -> Tensor:
        distance = place_WQ[grid.back :, :, None] - torch.cat(grid.near(place_WQ), dim=1)[:, None]
        return (distance > 0) & (distance <= pattern.window)

    seen_NQS = shown(place_RWQ[number])
    for earlier in place_RWQ[:number]:
        seen_NQS &= ~shown(earlier)
    if number == 0:  # who is alone sees himself
        own = torch.arange(grid.size, device=place_RWQ.device)
        seen_NQS[:, own, own + grid.back * grid.size] |= place_RWQ[-1, grid.back :] == 1
    return seen_NQS


def _indices(request: Request, grid: Grid, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, i, j of the scores, for the terms of rules."""
    keys, queries = request.context.positions.keys, request.context.positions.queries
    key_WQ = key.unflatten(0, (-1, grid.size))
    own_NQ1, near_N1S = key_WQ[grid.back :, :, None], torch.cat(grid.near(key_WQ), dim=1)[:, None]
    b, h = own_NQ1 // (keys * request.heads), own_NQ1 // keys % request.heads
    return b, h, (own_NQ1 % keys - (keys - queries)).clamp(min=0), near_N1S % keys


class Move(torch.autograd.Function):
    """Row n of the answer is row there[n] of x, or 0 where x has no such row. `back` is the way back, also for slopes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(there, back)
        return x.index_select(0, there.clamp(max=len(x) - 1)).masked_fill_((there >= len(x))[:, None], 0)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        there, back = ctx.saved_tensors
        return move(slopes[0], back, there), None, None


def move(x: Tensor, there: Tensor, back: Tensor) -> Tensor:
    moved: Tensor = Move.apply(x, there, back)  # type: ignore[no-untyped-call]
    return moved
