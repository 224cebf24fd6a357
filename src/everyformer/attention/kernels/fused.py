"""Sparse patterns and soft masks on a GPU, fused: no scores in memory, and what nobody sees is neither read nor computed.

A pattern is a union of disjoint parts (`programs.py` says which kinds there are). Each is computed by a launch of a Triton
program, which goes on where the last part stopped: with its answers and sums of exponentials as the beginning of its own. So
nothing is merged, folded or copied; only the slopes of the few far keys, which several programs share, are added up at the end.
Adaptive spans are a near part whose keys count as the soft mask says.

Papers: Dao 2023 (FlashAttention-2), whose programs these are but for who sees whom.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from everyformer.attention.has_data import has_data
from everyformer.attention.hashing import BUCKET
from everyformer.attention.kernels.request import HALF, Request
from everyformer.attention.pattern import (
    And,
    Block,
    ByHead,
    Causal,
    Hashed,
    Local,
    Pattern,
    Stride,
    Summary,
    Window,
    alternatives,
)
from everyformer.attention.span import SoftMask

WIDEST = 128
NEAR, RESIDUE, FAR, FIXED, IN_BUCKET = range(5)  # as programs.py numbers them


def _sizes(m: int, n: int, uneven: int, warps: int, stages: int) -> dict[str, int]:
    return {"M": m, "N": n, "UNEVEN": uneven, "num_warps": warps, "num_stages": stages}


USUAL = {  # sizes of the blocks of each program
    "forward": _sizes(64, 32, 32, warps=4, stages=3),
    "to_queries": _sizes(64, 64, 64, warps=4, stages=2),
    "to_keys": _sizes(64, 64, 64, warps=4, stages=3),
}
# Far blocks mostly see each other wholly. They have as few registers as it takes for a processor to have one more block at a time.
FAR_QUERIES = {
    "forward": _sizes(64, 64, 32, warps=4, stages=3),
    "to_queries": _sizes(128, 64, 32, warps=8, stages=3),
}
SIZES = {  # by the kind of a part, the fastest of some on an H200
    NEAR: USUAL | {"to_keys": _sizes(32, 64, 32, warps=4, stages=2)},
    RESIDUE: USUAL,
    FAR: FAR_QUERIES | {"to_keys": _sizes(64, 64, 32, warps=4, stages=3) | {"maxnreg": 168}},
    FIXED: FAR_QUERIES,
    IN_BUCKET: USUAL,
}
SHARED = 8  # programs for a block of far keys, which many queries see
ADDED = 16  # far keys for a program that adds up what these found


@dataclass(frozen=True)
class Part:
    """What the letters l, m, c and s of programs.py are."""

    kind: int
    size: int
    back: int = 0
    columns: int = 0
    skip: int = 0
    round: int = 0

    def share(self, length: int) -> float:
        """Of the T x T scores that are computed."""
        near, far = (self.size + self.back) / length, self.columns / self.size / 2  # nothing of what is to come
        return {NEAR: near, RESIDUE: 1 / self.size, FAR: far, FIXED: near + far, IN_BUCKET: self.back / length}[
            self.kind
        ]

    def of_keys(self) -> tuple[Part, ...]:
        """As programs of keys take it."""
        if self.kind == FIXED:
            return Part(NEAR, self.size, 0, self.size), replace(self, kind=FAR)
        return (self,)


class Places(NamedTuple):
    """Hashed keys, each B, H, R, T or B, H, T: the position of each slot, the place by position, and who is alone."""

    order: Tensor
    place: Tensor
    alone: Tensor


def unsupported_reason(request: Request) -> str | None:
    q = request.q_BHQE
    if reason := request.needs_weights_reason():
        return reason
    if q.device.type != "cuda" or q.dtype not in HALF:
        return f"it computes in bfloat16 or float16 on CUDA, not in {q.dtype} on {q.device.type}; use blocked"
    if torch.version.hip is not None:
        return "its programs are for NVIDIA's GPUs; use blocked"
    if importlib.util.find_spec("triton") is None:
        return "Triton, which comes with PyTorch for CUDA on Linux, is not installed; use blocked"
    if request.dropout or [term for term in request.terms if not isinstance(term, SoftMask)] or len(request.terms) > 1:
        return "a rule adds to the score something else than one soft mask, or weights are dropped; use blocked"
    if reason := request.partial_pass_reason():
        return reason
    if (width := _width(request)) > WIDEST:
        return f"heads are wider than {WIDEST}; use blocked"
    if request.heads * request.context.positions.keys * width >= 2**31:
        return f"{request.heads} heads of {width} numbers at {request.context.positions.keys} positions are 2^31 or more; use blocked"
    if parts_of(request) is None:
        return f"{request.pattern} is no union of windows, blocks, strides and summaries, nor hashed; use blocked"
    return None


def computed_fraction(request: Request) -> float:
    """The share of the T x T scores that this kernel computes."""
    groups = parts_of(request) or []
    return sum(part.share(request.context.positions.keys) for parts in groups for part in parts) / max(1, len(groups))


def parts_of(request: Request) -> list[tuple[Part, ...]] | None:
    """The parts of each group of heads: head h is of group h mod their number. None where the pattern has no such parts."""
    pattern = request.pattern
    if isinstance(pattern, Hashed):
        table = None if request.terms else request.context.side.hashes
        rounds = tuple(Part(IN_BUCKET, 1, pattern.window, round=number) for number in range(pattern.rounds))
        return None if table is None else [rounds]
    patterns = _by_head(pattern)
    found = [_parts(one, request.terms) for one in patterns]
    return None if request.heads % len(patterns) or any(one is None for one in found) else found  # type: ignore[return-value]


def _by_head(pattern: Pattern) -> tuple[Pattern, ...]:
    if isinstance(pattern, ByHead):
        return pattern.patterns
    if isinstance(pattern, And):
        for number, part in enumerate(pattern.parts):
            if isinstance(part, ByHead):
                rest = pattern.parts[:number] + pattern.parts[number + 1 :]
                return tuple(And((*rest, one)) for one in part.patterns)
    return (pattern,)


def _parts(pattern: Pattern, terms: Sequence[Any]) -> tuple[Part, ...] | None:
    options = [_bare(one) for one in alternatives(pattern)]
    if terms:
        longest = terms[0].value.longest
        match options:
            case [Causal()]:
                return (Part(NEAR, 1, longest, 1),)
            case [Window(w)]:
                return (Part(NEAR, 1, min(w - 1, longest), 1),)
        return None
    match options:
        case [Window(w)]:
            return (Part(NEAR, 1, w - 1, 1),)
        case [Block(l)]:
            return (Part(NEAR, l, 0, l),)
        case [Local(l, m)]:
            return (Part(NEAR, l, m, l),)
        case [Stride(l)]:
            return (Part(RESIDUE, l),)
        case [Summary(l, c, s)]:
            return Part(NEAR, l, 0, c, s), Part(FAR, l, 0, c, s)
        case [Window(w), Stride(l)]:  # of the strides those that the window does not show
            return Part(NEAR, 1, w - 1, 1), Part(RESIDUE, l, -(-w // l))
        case [Block(l), Summary(n, c, s)] if l == n:
            return (Part(FIXED, l, 0, c, s),)
    return None


def _bare(pattern: Pattern) -> Pattern | None:
    """What a causal pattern asks besides; the smallest of several windows."""
    parts = pattern.parts if isinstance(pattern, And) else (pattern,)
    rest = [part for part in parts if part != Causal()]
    if len(rest) == len(parts):
        return None
    if windows := [part for part in rest if isinstance(part, Window)]:
        rest = [part for part in rest if not isinstance(part, Window)] + [min(windows, key=lambda one: one.size)]
    return [*rest, Causal()][0] if len(rest) < 2 else None


def run(request: Request) -> Tensor:
    q, k, v = request.by_position(_width(request))
    groups = parts_of(request)
    assert groups is not None
    ramp, z_BHT = 1, None
    for term in request.terms:
        assert isinstance(term, SoftMask)
        ramp, z_BHT = term.value.ramp, term.z_BHQ.float().expand(request.q_BHQE.shape[:3]).contiguous()
    places = _places(request.pattern, request.context.side.hashes) if isinstance(request.pattern, Hashed) else None
    answer_BTHE: Tensor = Fused.apply(q, k, v, z_BHT, groups, places, request.scale, ramp)  # type: ignore[no-untyped-call]
    return answer_BTHE.transpose(1, 2)[..., : request.v_BHKE.shape[-1]]


def _width(request: Request) -> int:
    """Of a head in the programs: a power of 2."""
    widest = max(request.q_BHQE.shape[-1], request.v_BHKE.shape[-1])
    return max(16, 1 << (widest - 1).bit_length())


def _places(pattern: Hashed, table_BHRP: Tensor | None) -> Places:
    """Buckets stand behind one another, so far apart that no window reaches from one into the last."""
    assert table_BHRP is not None
    *sizes, length = table_BHRP[:, :, :-1, :-1].shape
    place, alone = table_BHRP[:, :, :-1, :-1].reshape(-1, length), table_BHRP[:, :, -1, :-1]
    row = torch.arange(len(place), device=place.device)[:, None]
    bucket, rank = place // BUCKET, place % BUCKET
    group = bucket + row * pattern.buckets
    count = torch.zeros(len(place) * pattern.buckets, dtype=torch.int64, device=place.device)
    count.scatter_add_(0, group.flatten(), torch.ones_like(group).flatten())
    slot = (count.cumsum(0) - count)[group] + rank  # over all rows, each of which has as many
    order = torch.empty_like(slot, dtype=torch.int32).flatten()
    at = torch.arange(length, device=place.device, dtype=torch.int32).expand_as(slot)
    order.scatter_(0, slot.flatten(), at.flatten())
    apart = (slot - row * length + bucket * (pattern.window + 1)).to(torch.int32)
    return Places(order.view(*sizes, length), apart.view(*sizes, length), alone.to(torch.int32).contiguous())


def _tables(places: Places | None, instead: Tensor) -> tuple[Tensor, ...]:
    """Programs that read no places are given something all the same: a Triton function returns no None."""
    return places or (instead,) * 3


def _launches(
    program: Any,
    q_BTHE: Tensor,
    z_BHT: Tensor | None,
    groups: Sequence[tuple[Part, ...]],
    places: Places | None,
    scale: float,
    ramp: int,
) -> Iterator[tuple[Part, slice, Callable[..., None]]]:
    """One for each part of each group of heads, with both: call it with the program's tensors."""
    batch, length, heads, width = q_BTHE.shape
    rounds = 1 if places is None else places.order.shape[2]
    of_keys = program.__name__ == "to_keys"
    for turn, parts in enumerate(groups):
        mine = [one for part in parts for one in part.of_keys()] if of_keys else parts
        for number, part in enumerate(mine):
            # Wider heads would take too much room.
            sizes = (SIZES[part.kind] if width <= 64 else USUAL)[program.__name__]
            slots, rows = length, batch * heads // len(groups)
            if part.kind == RESIDUE:
                slots, rows = -(-length // part.size), rows * part.size
            shared = part.kind == FAR and of_keys
            if shared:
                slots = length // part.size * part.columns
            blocks = -(-slots // sizes["N" if of_keys else "M"])
            if blocks == 0:
                continue
            numbers = (blocks, length, heads, turn, len(groups), rounds, scale, ramp, part.back, part.skip)
            fixed = {"KIND": part.kind, "SIZE": part.size, "COLUMNS": part.columns, "ROUND": part.round, "E": width}
            fixed |= {"SOFT": z_BHT is not None, "FIRST": number == 0}
            grid = blocks * rows, SHARED if shared else 1
            yield part, slice(turn, None, len(groups)), partial(_launch, program[grid], numbers, fixed | sizes)


def _launch(program: Any, numbers: tuple[float, ...], fixed: dict[str, int], *tensors: Tensor) -> None:
    if has_data(tensors[0]):
        program(*tensors, *numbers, **fixed)


class Fused(torch.autograd.Function):
    """softmax over the union of the parts, from B, T, H, E to the same. The first part has all queries and keys."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, *call: Any) -> Tensor:
        from everyformer.attention.kernels import programs

        answer = torch.empty_like(q)
        total = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        for _, _, launch in _launches(programs.forward, q, z, *call):
            launch(q, k, v, answer, total, z, *_tables(call[1], q))
        ctx.save_for_backward(q, k, v, z, answer, total)
        ctx.call = call
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        from everyformer.attention.kernels import programs

        q, k, v, z, answer, total = ctx.saved_tensors
        places, ramp, slope = _tables(ctx.call[1], q), ctx.call[3], slope.contiguous()
        delta, to_q, to_k, to_v = (torch.empty_like(x) for x in (total, q, k, v))
        to_z, reach = None, None
        if z is not None:
            to_z, reach = torch.empty_like(z), torch.stack((z.amax(-1) + ramp, z.amin(-1)), -1).ceil().to(torch.int32)
        for _, _, launch in _launches(programs.to_queries, q, z, *ctx.call):
            launch(q, k, v, slope, answer, total, delta, to_q, to_z, z, *places)
        for part, heads, launch in _launches(programs.to_keys, q, z, *ctx.call):
            if part.kind != FAR:
                launch(q, k, v, slope, total, delta, to_k, to_v, z, reach, *places)
                continue
            _far_slopes(part, heads, launch, (q, k, v, slope, total, delta), (to_k, to_v), (z, reach, *places))
        return to_q, to_k, to_v, to_z, *(None for _ in ctx.call)


def _far_slopes(
    part: Part,
    heads: slice,
    launch: Callable[..., None],
    given: tuple[Tensor, ...],
    found: tuple[Tensor, Tensor],
    rest: tuple[Tensor | None, ...],
) -> None:
    """What SHARED programs find for each block of far keys, added to what near queries have found."""
    from everyformer.attention.kernels import programs

    (batch, length, all_heads, width), keys = given[0].shape, given[0].shape[1] // part.size * part.columns
    rows, blocks = batch * all_heads // heads.step, -(-keys // ADDED)
    far_2RPSE = torch.empty(2, rows, SHARED, keys, width, dtype=torch.float32, device=given[0].device)
    launch(*given, *far_2RPSE, *rest)
    numbers = (blocks, length, all_heads, heads.start, heads.step, part.skip)
    fixed = {"SIZE": part.size, "COLUMNS": part.columns, "SHARED": SHARED, "N": ADDED, "E": width}
    _launch(programs.add_far[blocks * rows,], numbers, fixed, *far_2RPSE, *found)
