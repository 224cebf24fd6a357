"""Executes parts of a plan without a gather: as dense attention in another view of the same memory.

Queries, keys and values lie in memory as B, T, H, E. Reshaped to more sequences or more heads, each with fewer positions, a part of a
plan becomes one or more dense *tiles*:

    tile                    shape of the view    attends to
    block(l)                B T/l, l, H, E       earlier positions of the same block of l
    block(l), shifted       the same             a block that is `shift` positions before
    residue(g)              B, T/g, g H, E       every g-th position
    residue(l/c), columns   the same             c keys of all earlier blocks of l, each key repeated l/c times
    few columns             B T/l, l, H, E       c keys of one block, computed as written

So dense kernels compute it and no data moves. The tiles have disjoint pairs; their outputs are merged by log-sum-exp. In the backward
pass every tile gets the merged output and log-sum-exp: the weights it then computes are those of the whole softmax, so its gradients
add up to the gradients of the whole (as between the devices in Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from everyformer.attention.kernels.merge import merge_
from everyformer.attention.kernels.parts import Kind, Part, plan
from everyformer.attention.kernels.request import HALF, Request
from everyformer.attention.pattern import Pattern

aten = torch.ops.aten
LIMIT_ON_CPU, LIMIT = 1.0, 0.25  # computed fractions up to which it is faster than a masked dense kernel


@dataclass(frozen=True)
class Tile:
    """One view: the queries from index `shift` on and the keys up to `shift` before the end, both reshaped."""

    view: Literal["block", "residue"]
    size: int
    allows: Literal["causal", "all", "later"]  # later: keys whose index in the tile is higher than the query's
    shift: int = 0
    columns: int = (
        0  # if not 0: the keys are the last so many of each block of `shift`, without the final `skip`, repeated
    )
    skip: int = 0

    def fraction(self, length: int) -> float:
        """Returns the fraction of the T x T scores that it computes."""
        return 1 / self.size if self.view == "residue" else self.size / length


@dataclass(frozen=True)
class FewColumns:
    """The last `columns` keys, without the final `skip`, of a block: of the query's, or of the one `shift` positions before."""

    size: int
    columns: int
    skip: int = 0
    shift: int = 0

    def fraction(self, length: int) -> float:
        return self.columns / length


AnyTile = Tile | FewColumns


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if reason := request.softmax_reason():
        return reason
    if request.context.positions.device.type != "cpu" and request.q_BHQE.dtype in HALF:
        return "on a GPU it computes scores in the precision of its inputs, and half precision is too low; use blocked"
    if request.terms or request.dropout:
        return "its dense kernel has no score terms and no dropout, and one of them is set; use blocked"
    if reason := request.partial_pass_reason():
        return reason
    if _tiles_of(request) is None:
        return f"{request.pattern} over {request.context.positions.keys} positions is not a union of whole tiles; use blocked"
    return None


def computed_fraction(request: Request) -> float:
    groups = _tiles_of(request) or ()
    return sum(tile.fraction(request.context.positions.keys) for tiles in groups for tile in tiles) / max(
        1, len(groups)
    )


def auto_limit(request: Request) -> float:
    if not request.is_sparse:
        return -1
    return LIMIT_ON_CPU if request.context.positions.device.type == "cpu" else LIMIT


def run(request: Request) -> Tensor:
    q, k, v = request.by_position(max(request.q_BHQE.shape[-1], request.v_BHKE.shape[-1]))
    groups = _tiles_of(request)
    assert groups is not None
    turns = len(groups)  # head h is in group h mod turns
    outputs = [
        TiledAttention.apply(*(x[:, :, turn::turns] for x in (q, k, v)), tiles, request.scale)  # type: ignore[no-untyped-call]
        for turn, tiles in enumerate(groups)
    ]
    output_BTHE = outputs[0] if turns == 1 else torch.stack(outputs, dim=3).flatten(2, 3)
    return output_BTHE.transpose(1, 2)[..., : request.v_BHKE.shape[-1]]


def _tiles_of(request: Request) -> tuple[tuple[AnyTile, ...], ...] | None:
    return _tiles(request.pattern, request.heads, request.context.positions.keys)


@lru_cache(maxsize=256)
def _tiles(pattern: Pattern, heads: int, length: int) -> tuple[tuple[AnyTile, ...], ...] | None:
    """Returns the tiles of each group of heads, or None if the parts are not whole tiles."""
    groups = []
    for parts in plan(pattern, heads).groups:
        of_parts = [tiles_of(part) for part in parts]
        tiles = [tile for tiles in of_parts for tile in tiles]
        if not all(of_parts) or not all(length % tile.size == 0 and length > tile.size for tile in tiles):
            return None
        groups.append(tuple(tile for tile in tiles if tile.shift < length))
    return tuple(groups)


def tiles_of(part: Part) -> tuple[AnyTile, ...]:
    """Returns the tiles of a part, none if it has none. The first one of a plan has all queries."""
    size, back, columns, skip = part.size, part.back, part.columns, part.skip
    if part.kind is Kind.BAND and size == 1:  # a window
        window = back + 1
        return Tile("block", window, "causal"), Tile("block", window, "later", window)
    if part.kind is Kind.BAND and columns < size:
        return (FewColumns(size, columns, skip),)
    if part.kind is Kind.BAND and back % size == 0:
        previous = (Tile("block", size, "all", shift) for shift in range(size, back + 1, size))
        return Tile("block", size, "causal"), *previous
    if part.kind is Kind.RESIDUE:
        return (Tile("residue", size, "causal", back * size),)
    if part.kind is Kind.DISTANT and size % columns == 0:
        # Of the view's T/g rows, row (n, r) attends to the columns up to (n - 1, r): to all of the blocks before n - 1, and of
        # block n - 1 to those up to r. The few columns are the others of that block.
        return Tile("residue", size // columns, "causal", size, columns, skip), FewColumns(size, columns, skip, size)
    return ()


class TiledAttention(torch.autograd.Function):
    """softmax over the union of the tiles, from B, T, H, E to the same shape. The first tile has all queries."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Sequence[AnyTile], scale: float) -> Tensor:
        output, total_BTH1 = _forward(tiles[0], q, k, v, scale)
        for tile in tiles[1:]:
            merge_(_queries(tile, output), _queries(tile, total_BTH1), *_forward(tile, q, k, v, scale))
        ctx.save_for_backward(q, k, v, output, total_BTH1)
        ctx.tiles, ctx.scale = tiles, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = ctx.saved_tensors
        sums: tuple[Tensor, ...] = ()
        for tile in ctx.tiles:
            gradients = _backward(tile, gradient, *saved, ctx.scale)
            if not sums and isinstance(tile, Tile):  # the first tile has all queries and keys
                sums = gradients
                continue
            sums = sums or tuple(torch.zeros_like(x) for x in saved[:3])
            for sum_, rows_of, x in zip(sums, (_queries, _keys, _keys), gradients, strict=True):
                rows_of(tile, sum_).add_(x)
        return *sums, None, None


def _queries(tile: AnyTile, x_BTHE: Tensor) -> Tensor:
    """Returns the queries of a tile: B, T', H, E."""
    return x_BTHE[:, tile.shift :]


def _keys(tile: AnyTile, x_BTHE: Tensor) -> Tensor:
    """Returns the keys or values of a tile: B, T', H, E, or the columns of blocks, B, N, c, H, E."""
    if not tile.columns:
        return x_BTHE[:, : x_BTHE.shape[1] - tile.shift]
    size = tile.size if isinstance(tile, FewColumns) else tile.shift
    blocks, end = x_BTHE.unflatten(1, (-1, size)), size - tile.skip
    return blocks[:, : blocks.shape[1] - tile.shift // size, end - tile.columns : end]


def _forward(tile: AnyTile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns output and log-sum-exp of the queries of one tile: B, T', H, E and B, T', H, 1."""
    if isinstance(tile, FewColumns):
        score, _, _, value = _few_columns(tile, q, k, v, scale)
        total = score.logsumexp(-1, keepdim=True)
        output = (score - total.masked_fill(total == -torch.inf, 0)).exp().to(v.dtype) @ value
        return output.transpose(2, 3).flatten(1, 2), total.transpose(2, 3).flatten(1, 2)
    output, total = _dense(tile, *_folded(tile, q, k, v), scale)
    return _unfold(tile, output, q), _unfold(tile, total.transpose(1, 2)[..., None], q)


def _backward(
    tile: AnyTile, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns what one tile adds to the gradients of its queries, keys and values."""
    gradient, output, total = (_queries(tile, x) for x in (gradient, output, total))
    if isinstance(tile, FewColumns):
        score, query, key, value = _few_columns(tile, q, k, v, scale)
        gradient, output, total = (_blocks(tile, x) for x in (gradient, output, total))
        weight = (score - total.masked_fill(total == -torch.inf, 0)).exp()
        to_weight = gradient @ value.transpose(-1, -2) - (gradient.to(score.dtype) * output).sum(-1, keepdim=True)
        to_score = (weight * to_weight * scale).to(q.dtype)
        to_k, to_v = to_score.transpose(-1, -2) @ query, weight.to(v.dtype).transpose(-1, -2) @ gradient
        return (to_score @ key).transpose(2, 3).flatten(1, 2), to_k.transpose(2, 3), to_v.transpose(2, 3)
    total = _fold(tile, total)[..., 0].transpose(1, 2).contiguous()
    folded = _folded(tile, q, k, v)
    gradients = _dense_backward(tile, _fold(tile, gradient), *folded, _fold(tile, output), total, scale)
    to_q, to_k, to_v = (_unfold(tile, x, q) for x in gradients)
    if tile.columns:  # the keys were repeated
        to_k, to_v = (x.unflatten(1, (-1, tile.columns, tile.size)).sum(3) for x in (to_k, to_v))
    return to_q, to_k, to_v


def _folded(tile: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the queries, keys and values of a tile in its view."""
    keys = (_keys(tile, k), _keys(tile, v))
    if tile.columns:
        keys = tuple(x.flatten(1, 2).repeat_interleave(tile.size, dim=1) for x in keys)  # type: ignore[assignment]
    return _fold(tile, _queries(tile, q)), _fold(tile, keys[0]), _fold(tile, keys[1])


def _fold(tile: Tile, x_BTHE: Tensor) -> Tensor:
    """Returns the view N, T', H', E; it is a copy only for shifted blocks in a batch of several sequences."""
    batch, _, heads, width = x_BTHE.shape
    if tile.view == "block":
        return x_BTHE.reshape(-1, tile.size, heads, width)
    return x_BTHE.reshape(batch, -1, tile.size * heads, width)


def _unfold(tile: Tile, x: Tensor, like_BTHE: Tensor) -> Tensor:
    return x.reshape(like_BTHE.shape[0], -1, like_BTHE.shape[2], x.shape[-1])


def _blocks(tile: FewColumns, x_BTHE: Tensor) -> Tensor:
    """Returns B, N, H, l, E."""
    return x_BTHE.unflatten(1, (-1, tile.size)).transpose(2, 3)


def _few_columns(
    tile: FewColumns, q: Tensor, k: Tensor, v: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the scores B, N, H, l, c, and the queries, keys and values in the same blocks."""
    query, (key, value) = _blocks(tile, _queries(tile, q)), (_keys(tile, x).transpose(2, 3) for x in (k, v))
    score = (query @ key.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    r, s = torch.arange(tile.size, device=q.device)[:, None], torch.arange(tile.columns, device=q.device)
    allowed = s > r // (tile.size // tile.columns) if tile.shift else s + (tile.size - tile.skip - tile.columns) <= r
    return score.masked_fill(~allowed, -torch.inf), query, key, value


def _dense(tile: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Returns the output N, T, H, E and the log-sum-exp N, H, T of a dense tile."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    mask = _mask(tile, q)
    if _has_program(q):
        output, total = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, tile.allows == "causal", attn_mask=mask, scale=scale
        )
    else:
        score = _score(tile, heads[0], heads[1], scale)
        total = score.logsumexp(-1)
        output = (score - total.masked_fill(total == -torch.inf, 0)[..., None]).exp() @ heads[2]
    if mask is not None:  # the last query of a tile has no later keys
        output[:, :, -1], total[:, :, -1] = 0, -torch.inf
    return output.transpose(1, 2), total


def _dense_backward(
    tile: Tile, gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    gradient, q, k, v, output = (x.transpose(1, 2) for x in (gradient, q, k, v, output))
    if _has_program(q):
        gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, output, total, 0.0, tile.allows == "causal", attn_mask=_mask(tile, q), scale=scale
        )
    else:
        weight = (_score(tile, q, k, scale) - total[..., None]).exp()
        to_score = weight * (gradient @ v.transpose(-1, -2) - (gradient * output).sum(-1, keepdim=True)) * scale
        gradients = to_score @ k, to_score.transpose(-1, -2) @ q, weight.transpose(-1, -2) @ gradient
    return tuple(x.transpose(1, 2) for x in gradients)


def _has_program(q: Tensor) -> bool:
    """Whether torch has a dense kernel that returns the log-sum-exp; elsewhere the equations are computed as written."""
    return q.device.type == "cpu"


def _mask(tile: Tile, q: Tensor) -> Tensor | None:
    """Returns the mask to add to the scores, or None where the dense kernel needs none."""
    if tile.allows != "later":
        return None
    return q.new_full((tile.size, tile.size), -torch.inf).tril()


def _score(tile: Tile, q: Tensor, k: Tensor, scale: float) -> Tensor:
    score = q @ k.transpose(-1, -2) * scale
    hidden = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device)
    if tile.allows == "all":
        return score
    return score.masked_fill(hidden.triu(1) if tile.allows == "causal" else hidden.tril(), -torch.inf)
