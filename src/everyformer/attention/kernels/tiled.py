"""Sparse attention without a gather: parts of a pattern that are dense attention in another view of the same memory.

Queries, keys and values lie in memory as B, T, H, E. Read as more sequences or as more heads, of fewer positions each:

    own(l)        within blocks of l                   B T/l, l, H, E      causal & block(l)
    before(l)     to a block before                    the same, keys whole blocks back; with it a window, causal & local(l, m)
    residue(g)    to every g-th position               B, T/g, g H, E      causal & stride(g)
    far(l, c, s)  to c keys of all blocks              as residue(l/c), to those keys, each repeated l/c times
    few(l, c, s)  to c keys of one block               what far leaves out: few keys, computed literally

So dense kernels serve, and no number moves. The parts of a pattern see disjoint pairs; their answers are merged by
their log-sum-exp. Backward, each part is given the merged answer and log-sum-exp: the weights it then computes are
those of the whole softmax, so its gradients are parts of the whole's (as between the devices in Liu et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from everyformer.attention.kernels.request import HALF, Request
from everyformer.attention.pattern import (
    And,
    Block,
    ByHead,
    Causal,
    Local,
    Pattern,
    Stride,
    Summary,
    Window,
    alternatives,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Tile:
    """One view: queries from number `back` on, keys up to as many before the end, both folded."""

    fold: Literal["block", "residue"]
    size: int
    sees: Literal["causal", "all", "later"]  # later: keys whose number in the tile is higher than the query's
    back: int = 0
    columns: int = 0  # the keys are so many of each block of `back`, repeated: the last but for `skip`
    skip: int = 0

    def share(self, length: int) -> float:
        """Of the T x T scores that are computed."""
        return 1 / self.size if self.fold == "residue" else self.size / length


@dataclass(frozen=True)
class Few:
    """The last `columns` keys but for `skip` of a block, of the same one or of the one `back` positions before."""

    size: int
    columns: int
    skip: int = 0
    back: int = 0

    def share(self, length: int) -> float:
        return self.columns / length


Part = Tile | Few


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if request.context.positions.device.type != "cpu" and request.q_BHQE.dtype in HALF:
        return "away from a CPU it computes its scores as precisely as its numbers, and half is too little; use blocked"
    if request.terms or request.dropout:
        return "a rule adds to the score, or weights are dropped, inside a dense kernel that does neither; use blocked"
    if reason := request.partial_pass_reason():
        return reason
    if parts_of(request) is None:
        return (
            f"{request.pattern} over {request.context.positions.keys} positions is no union of whole tiles; use blocked"
        )
    return None


def computed_fraction(request: Request) -> float:
    """The share of the T x T scores that this kernel computes."""
    parts = parts_of(request) or []
    return sum(part.share(request.context.positions.keys) for one in parts for part in one) / max(1, len(parts))


def run(request: Request) -> Tensor:
    q, k, v = request.by_position(max(request.q_BHQE.shape[-1], request.v_BHKE.shape[-1]))
    groups = parts_of(request)
    assert groups is not None
    turns = len(groups)  # head h is of group h mod turns
    answers = [
        Merged.apply(*(x[:, :, turn::turns] for x in (q, k, v)), parts, request.scale)  # type: ignore[no-untyped-call]
        for turn, parts in enumerate(groups)
    ]
    answer_BTHE = answers[0] if turns == 1 else torch.stack(answers, dim=3).flatten(2, 3)
    return answer_BTHE.transpose(1, 2)[..., : request.v_BHKE.shape[-1]]


def parts_of(request: Request) -> list[tuple[Part, ...]] | None:
    """The parts of each group of heads, or None where the pattern is not made of tiles."""
    pattern, length = request.pattern, request.context.positions.keys
    patterns = pattern.patterns if isinstance(pattern, ByHead) else (pattern,)
    if request.heads % len(patterns):
        return None
    found = [tiles(one, length) for one in patterns]
    return None if any(one is None for one in found) else found  # type: ignore[return-value]


def tiles(pattern: Pattern, length: int) -> tuple[Part, ...] | None:
    """The disjoint parts of a causal pattern."""
    match [_without_causal(one) for one in alternatives(pattern)]:
        case [Window(w)]:
            found: tuple[Part, ...] = (Tile("block", w, "causal"), Tile("block", w, "later", back=w))
        case [Block(l)]:
            found = (Tile("block", l, "causal"),)
        case [Local(l, m)] if m % l == 0:
            found = (Tile("block", l, "causal"), *(Tile("block", l, "all", back=back) for back in range(l, m + 1, l)))
        case [Stride(g)]:
            found = (Tile("residue", g, "causal"),)
        case [Window(w), Stride(g)] if w == g:  # every g-th before, without the query's own, which the window has
            near = tiles(Causal() & Window(w), length)
            return near and (*near, Tile("residue", g, "causal", back=g))
        case [Block(l), Summary(m, c, s)] if l == m and l % c == 0:
            found = (Tile("block", l, "causal"), *_far(l, c, s))
        case [Summary(l, c, s)] if l % c == 0:
            found = (Few(l, c, s), *_far(l, c, s))
        case _:
            return None
    return found if length % found[0].size == 0 and length > found[0].size else None


def _far(size: int, columns: int, skip: int) -> tuple[Part, ...]:
    """To these keys of all earlier blocks. Number (n, s) of T/g rows sees keys up to number (n - 1, s): the tile has
    all of the blocks before n - 1, and of block n - 1 those up to s; the others of that block are few."""
    far = Tile("residue", size // columns, "causal", back=size, columns=columns, skip=skip)
    return far, Few(size, columns, skip, back=size)


def _without_causal(pattern: Pattern) -> Pattern | None:
    if isinstance(pattern, And) and len(pattern.parts) == 2 and Causal() in pattern.parts:
        return pattern.parts[0] if pattern.parts[1] == Causal() else pattern.parts[1]
    return None


class Merged(torch.autograd.Function):
    """softmax over the union of the parts, from B, T, H, E to the same. The first part has all queries."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], scale: float) -> Tensor:
        answer, total_BTH1 = _forward(parts[0], q, k, v, scale)
        for part in parts[1:]:
            more, more_total = _forward(part, q, k, v, scale)
            total = _queries(part, total_BTH1)
            both = torch.logaddexp(total, more_total)
            share = (more_total - both.masked_fill(both == -torch.inf, 0)).exp()  # 0 where nothing is seen
            _queries(part, answer).lerp_(more, share.to(answer.dtype))
            total.copy_(both)
        ctx.save_for_backward(q, k, v, answer, total_BTH1)
        ctx.parts, ctx.scale = parts, scale
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        kept: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = ctx.saved_tensors
        sums: tuple[Tensor, ...] = ()
        for part in ctx.parts:
            found = _backward(part, slope, *kept, ctx.scale)
            if not sums and isinstance(part, Tile):  # as the first it has all queries and keys
                sums = found
                continue
            sums = sums or tuple(torch.zeros_like(x) for x in kept[:3])
            for sum_, place, x in zip(sums, (_queries, _keys, _keys), found, strict=True):
                place(part, sum_).add_(x)
        return *sums, None, None


def _queries(part: Part, x_BTHE: Tensor) -> Tensor:
    """The queries of a part: B, T', H, E."""
    return x_BTHE[:, part.back :]


def _keys(part: Part, x_BTHE: Tensor) -> Tensor:
    """Its keys or values: B, T', H, E, or some of blocks, B, N, c, H, E."""
    if not part.columns:
        return x_BTHE[:, : x_BTHE.shape[1] - part.back]
    size = part.size if isinstance(part, Few) else part.back
    blocks, end = x_BTHE.unflatten(1, (-1, size)), size - part.skip
    return blocks[:, : blocks.shape[1] - part.back // size, end - part.columns : end]


def _forward(part: Part, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The answer and the log-sum-exp of one part, of its queries: B, T', H, E and B, T', H, 1."""
    if isinstance(part, Few):
        score, _, _, value = _few(part, q, k, v, scale)
        total = score.logsumexp(-1, keepdim=True)
        answer = (score - total.masked_fill(total == -torch.inf, 0)).exp().to(v.dtype) @ value
        return answer.transpose(2, 3).flatten(1, 2), total.transpose(2, 3).flatten(1, 2)
    answer, total = _dense(part, *_folded(part, q, k, v), scale)
    return _unfold(part, answer, q), _unfold(part, total.transpose(1, 2)[..., None], q)


def _backward(
    part: Part, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, answer: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What one part adds to the gradients of its queries, keys and values."""
    slope, answer, total = (_queries(part, x) for x in (slope, answer, total))
    if isinstance(part, Few):
        score, query, key, value = _few(part, q, k, v, scale)
        slope, answer, total = (_blocks(part, x) for x in (slope, answer, total))
        weight = (score - total.masked_fill(total == -torch.inf, 0)).exp()
        to_weight = slope @ value.transpose(-1, -2) - (slope.to(score.dtype) * answer).sum(-1, keepdim=True)
        to_score = (weight * to_weight * scale).to(q.dtype)
        to_k, to_v = to_score.transpose(-1, -2) @ query, weight.to(v.dtype).transpose(-1, -2) @ slope
        return (to_score @ key).transpose(2, 3).flatten(1, 2), to_k.transpose(2, 3), to_v.transpose(2, 3)
    total = _fold(part, total)[..., 0].transpose(1, 2).contiguous()
    given = _folded(part, q, k, v)
    found = _dense_backward(part, _fold(part, slope), *given, _fold(part, answer), total, scale)
    to_q, to_k, to_v = (_unfold(part, x, q) for x in found)
    if part.columns:  # of the keys that were repeated
        to_k, to_v = (x.unflatten(1, (-1, part.columns, part.size)).sum(3) for x in (to_k, to_v))
    return to_q, to_k, to_v


def _folded(part: Tile, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys = (_keys(part, k), _keys(part, v))
    if part.columns:
        keys = tuple(x.flatten(1, 2).repeat_interleave(part.size, dim=1) for x in keys)  # type: ignore[assignment]
    return _fold(part, _queries(part, q)), _fold(part, keys[0]), _fold(part, keys[1])


def _fold(part: Tile, x_BTHE: Tensor) -> Tensor:
    """N, T', H', E; a view, but for whole blocks of a part of each of several sequences."""
    batch, _, heads, width = x_BTHE.shape
    if part.fold == "block":
        return x_BTHE.reshape(-1, part.size, heads, width)
    return x_BTHE.reshape(batch, -1, part.size * heads, width)


def _unfold(part: Tile, x: Tensor, like_BTHE: Tensor) -> Tensor:
    return x.reshape(like_BTHE.shape[0], -1, like_BTHE.shape[2], x.shape[-1])


def _blocks(part: Few, x_BTHE: Tensor) -> Tensor:
    """B, N, H, l, E."""
    return x_BTHE.unflatten(1, (-1, part.size)).transpose(2, 3)


def _few(part: Few, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores B, N, H, l, c, and the queries, keys and values they are of, alike."""
    query, (key, value) = _blocks(part, _queries(part, q)), (_keys(part, x).transpose(2, 3) for x in (k, v))
    score = (query @ key.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    r, s = torch.arange(part.size, device=q.device)[:, None], torch.arange(part.columns, device=q.device)
    seen = s > r // (part.size // part.columns) if part.back else s + (part.size - part.skip - part.columns) <= r
    return score.masked_fill(~seen, -torch.inf), query, key, value


def _dense(part: Tile, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The answer N, T, H, E and the log-sum-exp N, H, T of a dense tile."""
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    mask = _mask(part, q)
    if q.device.type == "cpu":
        answer, total = aten._scaled_dot_product_flash_attention_for_cpu(
            *heads, 0.0, part.sees == "causal", attn_mask=mask, scale=scale
        )
    else:
        score = _score(part, heads[0], heads[1], scale)
        total = score.logsumexp(-1)
        answer = (score - total.masked_fill(total == -torch.inf, 0)[..., None]).exp() @ heads[2]
    if mask is not None:  # the last query of a tile sees nothing
        answer[:, :, -1], total[:, :, -1] = 0, -torch.inf
    return answer.transpose(1, 2), total


def _dense_backward(
    part: Tile, slope: Tensor, q: Tensor, k: Tensor, v: Tensor, answer: Tensor, total: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    slope, q, k, v, answer = (x.transpose(1, 2) for x in (slope, q, k, v, answer))
    if q.device.type == "cpu":
        found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            slope, q, k, v, answer, total, 0.0, part.sees == "causal", attn_mask=_mask(part, q), scale=scale
        )
    else:
        weight = (_score(part, q, k, scale) - total[..., None]).exp()
        to_score = weight * (slope @ v.transpose(-1, -2) - (slope * answer).sum(-1, keepdim=True)) * scale
        found = to_score @ k, to_score.transpose(-1, -2) @ q, weight.transpose(-1, -2) @ slope
    return tuple(x.transpose(1, 2) for x in found)


def _mask(part: Tile, q: Tensor) -> Tensor | None:
    """What a tile adds to the scores, where its kernel does not know it."""
    if part.sees != "later":
        return None
    return q.new_full((part.size, part.size), -torch.inf).tril()


def _score(part: Tile, q: Tensor, k: Tensor, scale: float) -> Tensor:
    score = q @ k.transpose(-1, -2) * scale
    hidden = torch.ones(score.shape[-2:], dtype=torch.bool, device=q.device)
    return (
        score
        if part.sees == "all"
        else score.masked_fill(hidden.triu(1) if part.sees == "causal" else hidden.tril(), -torch.inf)
    )
