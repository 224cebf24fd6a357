"""Executes the bucket parts of a plan, the pattern `hashed`, in memory that grows linearly with the length.

In each round every bucket starts a new chunk, and its keys fill chunks in the order of their ranks. All keys of a chunk of queries
are then in that chunk and the few chunks before it. A pair that several rounds allow counts in the first of them; the rounds are
merged by log-sum-exp, which is exact. The slot of a key in its chunk depends on earlier keys only, so that not even rounding
depends on later tokens. All sizes follow from the length, never from the data. Every step is plain PyTorch.

The chunks of all sequences and heads are one row of W chunks, with `back` empty chunks before the first of each head. So the S keys
that N chunks attend to are the same row, shifted, and nothing is copied. A slot is an index into that row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.hashing import BUCKET
from everyformer.attention.kernels.merge import merge_sums
from everyformer.attention.kernels.parts import Part, plan
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Hashed

HIDDEN = -1e30  # the score of a pair that is not allowed: its weight is 0 and so is its gradient, which -inf makes NaN
NO_RANK = -2 * BUCKET  # a rank that is in no window
SIZES = (32, 64, 128, 256)
LIMIT_ON_CPU, LIMIT = 0.5, 0.25  # computed fractions up to which it is faster than a masked dense kernel


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if type(request.pattern) is not Hashed or request.narrowed is not None:
        return f"the pattern {request.narrowed or request.pattern} is not hashed(...) alone; use sdpa"
    if request.context.side.hashes is None:
        return "the pattern hashed needs hashed keys; attend within a model, which hashes them"
    if request.context.positions.query_BQ is not None:
        return "the queries are not among the keys; use sdpa"
    return None


def computed_fraction(request: Request) -> float:
    positions, pattern = request.context.positions, request.pattern
    assert isinstance(pattern, Hashed)
    return pattern.rounds * Grid.of(pattern, positions.keys).scores / (positions.queries * positions.keys)


def auto_limit(request: Request) -> float:
    if not request.is_sparse:
        return -1
    return LIMIT_ON_CPU if request.context.positions.device.type == "cpu" else LIMIT


def run(request: Request) -> Tensor:
    pattern, positions = request.pattern, request.context.positions
    assert isinstance(pattern, Hashed)
    request = request.ungrouped()
    grid, before = Grid.of(pattern, positions.keys), positions.keys - positions.queries
    rank_BHRK = _by_index(request.context)
    q = F.pad(request.q_BHQE, (0, 0, before, 0)) if before else request.q_BHQE
    rows = [x.flatten(0, 2) for x in (q, request.k_BHKE, request.v_BHKE)]
    rounds = [_attend(request, grid, rank_BHRK, part, rows) for part in plan(pattern, request.heads).groups[0]]
    if request.sink_H is not None:  # a round in which every query attends to the value 0
        sink_BHK = request.sink_H[:, None].expand(request.batch, -1, positions.keys)
        rounds.append((F.pad(torch.zeros_like(rounds[0][0][:, :-1]), (0, 1), value=1.0), sink_BHK.reshape(-1, 1)))
    sums, tops = zip(*rounds, strict=True)
    output = merge_sums(sums, tops).unflatten(0, (request.batch, request.heads, positions.keys))
    is_token_BHQ1 = rank_BHRK[:, :, 0, before:, None] >= 0
    return output[:, :, before:].masked_fill(~is_token_BHQ1, 0).to(request.v_BHKE.dtype)


@dataclass(frozen=True)
class Grid:
    """The number of chunks that a head may need, their size in positions, and the number of chunks that a window goes back."""

    chunks: int
    size: int
    back: int

    @staticmethod
    def of(pattern: Hashed, keys: int) -> Grid:
        """Returns the grid with the fewest scores. Each bucket has at most one chunk that is not full."""
        options = (Grid(keys // size + min(pattern.buckets, keys), size, -(-pattern.window // size)) for size in SIZES)
        return min(options, key=lambda grid: grid.scores)

    @property
    def scores(self) -> int:
        return self.chunks * self.size * self.size * (1 + self.back)

    def neighbours(self, x: Tensor) -> list[Tensor]:
        """Returns the row of chunks, shifted: for each chunk the `back` chunks before it, in order, and itself."""
        return [x[start : len(x) - self.back + start] for start in range(self.back + 1)]


def _by_index(context: Context) -> Tensor:
    """Returns the table of hashes by the index of the key instead of its position."""
    table_BHRP = context.side.hashes
    assert table_BHRP is not None
    if context.positions.key_BK is None:
        return table_BHRP[..., :-1]
    at_BK = context.positions.key_BK % table_BHRP.shape[-1]
    return table_BHRP.gather(-1, at_BK[:, None, None].expand(*table_BHRP.shape[:3], -1))


def _attend(request: Request, grid: Grid, rank_BHRK: Tensor, part: Part, rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the sums of exp(score - top) times v and times 1 in one round, for the query of each key, and the largest score `top`:
    rows, E + 1 and rows, 1."""
    slot, key = _layout(rank_BHRK[:, :, part.round], grid, request.pattern)
    q_WQE, k_WQE, v_WQE = (move(x, key, slot).unflatten(0, (-1, grid.size)) for x in rows)
    rank_RP = rank_BHRK.movedim(2, 0).flatten(1)[:, key.clamp(max=len(slot) - 1)]
    rank_RP = rank_RP.masked_fill(key == len(slot), NO_RANK)
    allowed_NQS = _allowed(part, grid, rank_RP.unflatten(1, (-1, grid.size)))

    score_NQS = torch.cat([request.products(q_WQE[grid.back :], k) for k in grid.neighbours(k_WQE)], dim=2)
    score_NQS = score_NQS.to(torch.promote_types(score_NQS.dtype, torch.float32))
    if request.terms:
        index = _indices(request, grid, key.clamp(max=len(slot) - 1))
        for term in request.terms:
            score_NQS = score_NQS + term(*index)
    score_NQS = score_NQS.masked_fill(~allowed_NQS, HIDDEN)
    top_NQ1 = score_NQS.detach().amax(-1, keepdim=True)
    exp_NQS = (score_NQS - top_NQ1).exp()
    dropped_NQS = F.dropout(exp_NQS, request.dropout, training=request.dropout > 0).to(v_WQE.dtype)
    products = zip(dropped_NQS.split(grid.size, dim=2), grid.neighbours(v_WQE), strict=True)
    output_NQE = torch.stack([weights @ v for weights, v in products]).sum(0)
    sums = torch.cat((output_NQE, exp_NQS.sum(-1, keepdim=True)), dim=-1)

    empty = grid.back * grid.size  # slots of the empty chunks before the first, which have no queries
    back = (slot - empty, key[empty:])
    return move(sums.flatten(0, 1), *back), move(top_NQ1.flatten(0, 1), *back)


def _layout(rank_BHK: Tensor, grid: Grid, pattern: Any) -> tuple[Tensor, Tensor]:
    """Returns the slot of each key and the key of each slot, over all sequences and heads; one past the last means none."""
    is_padding_BHK = rank_BHK < 0
    bucket_BHK = torch.where(is_padding_BHK, pattern.buckets, rank_BHK // BUCKET)
    count_BHN = rank_BHK.new_zeros(*rank_BHK.shape[:2], pattern.buckets + 1)
    count_BHN = count_BHN.scatter_add(2, bucket_BHK, torch.ones_like(rank_BHK))
    chunks_BHN = (count_BHN + grid.size - 1) // grid.size
    heads = torch.arange(rank_BHK[..., 0].numel(), device=rank_BHK.device).view(*rank_BHK.shape[:2], 1)
    first_BHN = heads * (grid.chunks + grid.back) + grid.back + chunks_BHN.cumsum(2) - chunks_BHN
    slots = heads.numel() * (grid.chunks + grid.back) * grid.size
    slot = first_BHN.gather(2, bucket_BHK) * grid.size + rank_BHK % BUCKET
    slot = slot.masked_fill(is_padding_BHK, slots).flatten()
    key = slot.new_full((slots + 1,), len(slot)).scatter(0, slot, torch.arange(len(slot), device=slot.device))
    return slot, key[:-1]


def _allowed(part: Part, grid: Grid, rank_RWQ: Tensor) -> Tensor:
    """Returns the pairs of each chunk that this round allows and no earlier one."""

    def in_window(rank_WQ: Tensor) -> Tensor:
        distance = rank_WQ[grid.back :, :, None] - torch.cat(grid.neighbours(rank_WQ), dim=1)[:, None]
        return (distance > 0) & (distance <= part.back)

    allowed_NQS = in_window(rank_RWQ[part.round])
    for earlier in rank_RWQ[: part.round]:
        allowed_NQS &= ~in_window(earlier)
    if part.round == 0:  # a query without other keys attends to itself
        index = torch.arange(grid.size, device=rank_RWQ.device)
        allowed_NQS[:, index, index + grid.back * grid.size] |= rank_RWQ[-1, grid.back :] == 1
    return allowed_NQS


def _indices(request: Request, grid: Grid, key: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the indices b, h, i, j of the scores, for the terms."""
    keys, queries = request.context.positions.keys, request.context.positions.queries
    key_WQ = key.unflatten(0, (-1, grid.size))
    query_NQ1, key_N1S = key_WQ[grid.back :, :, None], torch.cat(grid.neighbours(key_WQ), dim=1)[:, None]
    b, h = query_NQ1 // (keys * request.heads), query_NQ1 // keys % request.heads
    return b, h, (query_NQ1 % keys - (keys - queries)).clamp(min=0), key_N1S % keys


class Move(torch.autograd.Function):
    """Row n of the output is row source[n] of x, or 0 if x has no such row. `back` is the inverse, for the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(source, back)
        return x.index_select(0, source.clamp(max=len(x) - 1)).masked_fill_((source >= len(x))[:, None], 0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        source, back = ctx.saved_tensors
        return move(gradients[0], back, source), None, None


def move(x: Tensor, source: Tensor, back: Tensor) -> Tensor:
    moved: Tensor = Move.apply(x, source, back)  # type: ignore[no-untyped-call]
    return moved
