"""Executes parts of a plan on a GPU with Triton programs: scores are never stored, and hidden blocks are neither read nor computed.

Each part is one launch of a program of `programs.py`. It continues where the last part stopped: it starts from that part's outputs
and sums of exponentials, so nothing is merged, reordered or copied. Only the gradients of the distant keys, which several
programs share, are added up at the end. Adaptive spans are a band whose keys are weighted by the soft mask. A term of query and distance is
a table, linear in the length for windows; in it a pair that nothing else excludes can be hidden, so a window with such a term may
follow a segment memory, and may leave out the nearest keys.

Paper: Dao 2023 (FlashAttention-2); the programs differ from it in the pairs that they compute.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from everyformer.attention.algebra import And, Not
from everyformer.attention.has_data import has_data
from everyformer.attention.hashing import BUCKET
from everyformer.attention.kernels.parts import Kind, Part, plan
from everyformer.attention.kernels.request import HALF, Request, has_consecutive_keys
from everyformer.attention.pattern import Hashed, Pattern, Window
from everyformer.attention.score_mod import RelativeTerm
from everyformer.attention.span import SoftMask

T = TypeVar("T")

MAX_WIDTH = 128
MAX_TABLE = 2**31  # scores by query and distance
LIMIT = 0.25  # computed fraction up to which it is faster than dense attention


def _sizes(m: int, n: int, uneven: int, warps: int, stages: int) -> dict[str, int]:
    return {"M": m, "N": n, "UNEVEN": uneven, "num_warps": warps, "num_stages": stages}


USUAL = {  # block sizes of each program
    "forward": _sizes(64, 32, 32, warps=4, stages=3),
    "to_queries": _sizes(64, 64, 64, warps=4, stages=2),
    "to_keys": _sizes(64, 64, 64, warps=4, stages=3),
}
# Blocks of distant keys are mostly allowed as a whole. `maxnreg` limits their registers so that a multiprocessor holds one more block.
OF_DISTANT = {
    "forward": _sizes(64, 64, 32, warps=4, stages=3),
    "to_queries": _sizes(128, 64, 32, warps=8, stages=3),
}
SIZES = {  # by kind of part, the fastest of those measured on an H200
    Kind.BAND: USUAL | {"to_keys": _sizes(32, 64, 32, warps=4, stages=2)},
    Kind.RESIDUE: USUAL,
    Kind.DISTANT: OF_DISTANT | {"to_keys": _sizes(64, 64, 32, warps=4, stages=3) | {"maxnreg": 168}},
    Kind.BLOCK_AND_DISTANT: OF_DISTANT,
    Kind.BUCKET: USUAL,
}
SHARED = 8  # programs that share one block of distant keys, to which many queries attend
ADDED = 16  # distant keys in one program of `add_distant`


class Buckets(NamedTuple):
    """Hashed keys, each B, H, R, T or B, H, T: the position in each slot, the rank of each position, the queries without other keys."""

    order: Tensor
    rank: Tensor
    alone: Tensor


def unsupported_reason(request: Request) -> str | None:
    q = request.q_BHQE
    if reason := request.needs_weights_reason():
        return reason
    if reason := request.softmax_reason():
        return reason
    if q.device.type != "cuda" or q.dtype not in HALF:
        return f"it computes in bfloat16 or float16 on CUDA, not in {q.dtype} on {q.device.type}; use blocked"
    if torch.version.hip is not None:
        return "its programs are for NVIDIA's GPUs; use blocked"
    if importlib.util.find_spec("triton") is None:
        return "Triton, which comes with PyTorch for CUDA on Linux, is not installed; use blocked"
    kinds = [type(term) for term in request.terms]
    if request.dropout or len(set(kinds)) < len(kinds) or not set(kinds) <= {SoftMask, RelativeTerm}:
        return "its programs have no dropout and no score terms but one soft mask and one of the distance; use blocked"
    if reason := _relative_reason(request) if RelativeTerm in kinds else request.partial_pass_reason():
        return reason
    if (width := _width(request)) > MAX_WIDTH:
        return f"heads are wider than {MAX_WIDTH}; use blocked"
    if request.heads * request.context.positions.keys * width >= 2**31:
        return f"{request.heads} heads of {width} numbers at {request.context.positions.keys} positions are 2^31 or more; use blocked"
    if launched_parts(request) is None:
        return f"{request.pattern} is not a union of windows, blocks, strides and summaries, nor hashed; use blocked"
    return None


def _relative_reason(request: Request) -> str | None:
    """Returns why a request with a term of the distance cannot be computed, or None."""
    term, groups = _term(request, RelativeTerm), launched_parts(request) or ()
    farthest = max((part.back for parts in groups for part in parts), default=0)
    if request.context.max_distance is not None:
        farthest = min(farthest, request.context.max_distance)
    if any(part.kind is not Kind.BAND or part.size > 1 for parts in groups for part in parts):
        return f"{request.pattern} is more than a window, and score terms are for windows only; use blocked"
    if term.back < min(farthest, request.context.positions.keys - 1):
        return (
            f"keys are up to {farthest} positions away, but those from {term.back} on share a score term; use blocked"
        )
    if term.term_BHQR.numel() >= MAX_TABLE:
        return f"{tuple(term.term_BHQR.shape)} score terms are {MAX_TABLE:,} or more; use blocked"
    if not has_consecutive_keys(request.context):
        return "the visible keys of a sequence do not follow each other (padding between them, or another sequence); use sdpa"
    return None


def _term(request: Request, kind: type[T]) -> T:
    return next(term for term in request.terms if isinstance(term, kind))


def computed_fraction(request: Request) -> float:
    groups = launched_parts(request) or ()
    length = request.context.positions.keys
    return sum(part.fraction(length) for parts in groups for part in parts) / max(1, len(groups))


def auto_limit(request: Request) -> float:
    # A stored soft mask would be as large as the scores, so with one no other kernel is better, whatever the largest span.
    return (math.inf if request.terms else LIMIT) if request.is_long else -1


def launched_parts(request: Request) -> tuple[tuple[Part, ...], ...] | None:
    """Returns the parts of each group of heads as they are launched, or None if a part has no program."""
    if not request.terms:
        is_hashed = type(request.pattern) is Hashed
        return None if is_hashed and request.context.side.hashes is None else _parts(request.pattern, request.heads)
    pattern = request.pattern
    if any(isinstance(term, RelativeTerm) for term in request.terms):
        pattern, _ = _without_nearest(pattern)
    spans = [term.value.max_span for term in request.terms if isinstance(term, SoftMask)]
    # A soft mask ends at the largest span; the programs have soft masks for windows only, and other parts with a distance are ANY.
    return _parts(pattern, request.heads, *spans)


@lru_cache(maxsize=256)
def _without_nearest(pattern: Pattern) -> tuple[Pattern, int]:
    """Returns the pattern with the nearest keys that it leaves out, and how many these are."""
    operands = pattern.parts if isinstance(pattern, And) else (pattern,)
    sizes = [one.part.size for one in operands if isinstance(one, Not) and type(one.part) is Window]
    others = [one for one in operands if not (isinstance(one, Not) and type(one.part) is Window)]
    return (And(tuple(others)) if len(others) > 1 else others[0], max(sizes)) if sizes and others else (pattern, 0)


@lru_cache(maxsize=256)
def _parts(pattern: Pattern, heads: int, max_distance: int | None = None) -> tuple[tuple[Part, ...], ...] | None:
    planned = plan(pattern, heads, max_distance)
    if Kind.ANY in planned.kinds():
        return None
    return tuple(_together(parts) for parts in planned.groups)


def _together(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Returns a block and the columns of all earlier blocks of that size as one part, because one program computes both faster."""
    match parts:
        case (Part(kind=Kind.BAND, back=0) as block, Part(kind=Kind.DISTANT) as distant) if (
            block.columns == block.size == distant.size
        ):
            return (replace(distant, kind=Kind.BLOCK_AND_DISTANT),)
    return parts


def _of_keys(part: Part) -> tuple[Part, ...]:
    """Returns the parts that the program of keys computes for a part."""
    if part.kind is Kind.BLOCK_AND_DISTANT:
        return replace(part, kind=Kind.BAND, columns=part.size, skip=0), replace(part, kind=Kind.DISTANT)
    return (part,)


def run(request: Request) -> Tensor:
    q, k, v = request.by_position(_width(request))
    groups, missing = launched_parts(request), k.shape[1] - q.shape[1]
    assert groups is not None
    ramp, z_BHT, relative_BHQR = 1, None, None
    for term in request.terms:
        if isinstance(term, SoftMask):
            ramp, z_BHQ = term.value.ramp, term.z_BHQ.float().expand(request.q_BHQE.shape[:3])
            z_BHT = torch.cat((z_BHQ[..., :1].expand(-1, -1, missing), z_BHQ), -1).contiguous()
        if isinstance(term, RelativeTerm):
            relative_BHQR = _table(request, term)
    if (
        missing
    ):  # queries before the first, for the memory; they attend to nothing, because the table has no rows for them
        q = torch.cat((q.new_zeros(q.shape[0], missing, *q.shape[2:]), q), 1)
    buckets = _buckets(request.pattern, request.context.side.hashes) if isinstance(request.pattern, Hashed) else None
    output_BTHE: Tensor = FusedAttention.apply(  # type: ignore[no-untyped-call]
        q, k, v, z_BHT, relative_BHQR, groups, buckets, request.scale, ramp
    )
    return output_BTHE[:, missing:].transpose(1, 2)[..., : request.v_BHKE.shape[-1]]


def _table(request: Request, term: RelativeTerm) -> Tensor:
    """Returns the scores by query and distance, the distance 0 last; -inf hides the nearest keys and an empty memory."""
    table_BHQR, positions = term.term_BHQR[..., : term.back + 1], request.context.positions
    _, nearest = _without_nearest(request.pattern)
    distance_R = torch.arange(term.back, -1, -1, device=positions.device)
    hidden = distance_R < nearest
    if positions.key_BK is not None:
        empty_B = (positions.key_BK < 0).sum(1)
        i_Q1 = torch.arange(positions.keys - positions.queries, positions.keys, device=positions.device)[:, None]
        hidden = hidden | (i_Q1 - distance_R < empty_B[:, None, None, None])
    return table_BHQR.masked_fill(hidden, -torch.inf).contiguous()


def _width(request: Request) -> int:
    """Returns the width of a head in the programs: a power of 2."""
    width = max(request.q_BHQE.shape[-1], request.v_BHKE.shape[-1])
    return max(16, 1 << (width - 1).bit_length())


def _buckets(pattern: Hashed, table_BHRP: Tensor | None) -> Buckets:
    """Sorts the positions by bucket. The ranks of different buckets are more than a window apart."""
    assert table_BHRP is not None
    *sizes, length = table_BHRP[:, :, :-1, :-1].shape
    table, alone = table_BHRP[:, :, :-1, :-1].reshape(-1, length), table_BHRP[:, :, -1, :-1]
    row = torch.arange(len(table), device=table.device)[:, None]
    bucket, rank = table // BUCKET, table % BUCKET
    group = bucket + row * pattern.buckets
    count = torch.zeros(len(table) * pattern.buckets, dtype=torch.int64, device=table.device)
    count.scatter_add_(0, group.flatten(), torch.ones_like(group).flatten())
    slot = (count.cumsum(0) - count)[group] + rank  # over all rows, each of which has `length` slots
    order = torch.empty_like(slot, dtype=torch.int32).flatten()
    at = torch.arange(length, device=table.device, dtype=torch.int32).expand_as(slot)
    order.scatter_(0, slot.flatten(), at.flatten())
    apart = (slot - row * length + bucket * (pattern.window + 1)).to(torch.int32)
    return Buckets(order.view(*sizes, length), apart.view(*sizes, length), alone.to(torch.int32).contiguous())


def _tables(buckets: Buckets | None, unused: Tensor) -> tuple[Tensor, ...]:
    """Returns the tables of buckets, or tensors that the program does not read: a Triton function cannot return None for them."""
    return buckets or (unused,) * 3


def _launches(
    program: Any,
    q_BTHE: Tensor,
    z_BHT: Tensor | None,
    relative_BHQR: Tensor | None,
    groups: Sequence[tuple[Part, ...]],
    buckets: Buckets | None,
    scale: float,
    ramp: int,
) -> Iterator[tuple[Part, slice, Callable[..., None]]]:
    """Yields, for each part of each group of heads, the part, its heads and a launch to be called with the program's tensors."""
    batch, length, heads, width = q_BTHE.shape
    rounds = 1 if buckets is None else buckets.order.shape[2]
    of_keys = program.__name__ == "to_keys"
    offset, distances = (0, 1) if relative_BHQR is None else (length - relative_BHQR.shape[2], relative_BHQR.shape[3])
    for turn, parts in enumerate(groups):
        of_program = [one for part in parts for one in _of_keys(part)] if of_keys else parts
        for number, part in enumerate(of_program):
            # The other sizes would need too much shared memory for wider heads.
            sizes = (SIZES[part.kind] if width <= 64 else USUAL)[program.__name__]
            slots, rows = length, batch * heads // len(groups)
            if part.kind is Kind.RESIDUE:
                slots, rows = -(-length // part.size), rows * part.size
            shared = part.kind is Kind.DISTANT and of_keys
            if shared:
                slots = length // part.size * part.columns
            blocks = -(-slots // sizes["N" if of_keys else "M"])
            if blocks == 0:
                continue
            of_part = (scale, ramp, part.back, part.skip)
            numbers = (blocks, length, heads, turn, len(groups), rounds, *of_part, offset, distances)
            fixed = {
                "KIND": int(part.kind),
                "SIZE": part.size,
                "COLUMNS": part.columns,
                "ROUND": part.round,
                "E": width,
            }
            fixed |= {"SOFT": z_BHT is not None, "RELATIVE": relative_BHQR is not None, "FIRST": number == 0}
            grid = blocks * rows, SHARED if shared else 1
            yield part, slice(turn, None, len(groups)), partial(_launch, program[grid], numbers, fixed | sizes)


def _launch(program: Any, numbers: tuple[float, ...], fixed: dict[str, int], *tensors: Tensor) -> None:
    if has_data(tensors[0]):
        program(*tensors, *numbers, **fixed)


class FusedAttention(torch.autograd.Function):
    """softmax over the union of the parts, from B, T, H, E to the same shape. The first part has all queries and keys."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, z: Tensor | None, relative: Tensor | None, *call: Any
    ) -> Tensor:
        from everyformer.attention.kernels import programs

        output = torch.empty_like(q)
        total = torch.empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
        for _, _, launch in _launches(programs.forward, q, z, relative, *call):
            launch(q, k, v, output, total, z, relative, *_tables(call[1], q))
        ctx.save_for_backward(q, k, v, z, relative, output, total)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from everyformer.attention.kernels import programs

        q, k, v, z, relative, output, total = ctx.saved_tensors
        tables, ramp, gradient = _tables(ctx.call[1], q), ctx.call[3], gradient.contiguous()
        delta, to_q, to_k, to_v = (torch.empty_like(x) for x in (total, q, k, v))
        to_relative = None if relative is None else torch.zeros_like(relative)
        to_z, spans = None, None
        if z is not None:
            to_z, spans = torch.empty_like(z), torch.stack((z.amax(-1) + ramp, z.amin(-1)), -1).ceil().to(torch.int32)
        for _, _, launch in _launches(programs.to_queries, q, z, relative, *ctx.call):
            launch(q, k, v, gradient, output, total, delta, to_q, to_z, to_relative, z, relative, *tables)
        for part, heads, launch in _launches(programs.to_keys, q, z, relative, *ctx.call):
            if part.kind is not Kind.DISTANT:
                launch(q, k, v, gradient, total, delta, to_k, to_v, z, spans, relative, *tables)
                continue
            inputs = (q, k, v, gradient, total, delta)
            _distant_gradients(part, heads, launch, inputs, (to_k, to_v), (z, spans, relative, *tables))
        return to_q, to_k, to_v, to_z, to_relative, *(None for _ in ctx.call)


def _distant_gradients(
    part: Part,
    heads: slice,
    launch: Callable[..., None],
    inputs: tuple[Tensor, ...],
    gradients: tuple[Tensor, Tensor],
    others: tuple[Tensor | None, ...],
) -> None:
    """Adds the gradients that SHARED programs compute for each block of distant keys to those from near queries."""
    from everyformer.attention.kernels import programs

    q_BTHE, *_ = inputs
    batch, length, all_heads, width = q_BTHE.shape
    keys = length // part.size * part.columns
    rows, blocks = batch * all_heads // heads.step, -(-keys // ADDED)
    shared_2RPSE = torch.empty(2, rows, SHARED, keys, width, dtype=torch.float32, device=q_BTHE.device)
    launch(*inputs, *shared_2RPSE, *others)
    numbers = (blocks, length, all_heads, heads.start, heads.step, part.skip)
    fixed = {"SIZE": part.size, "COLUMNS": part.columns, "SHARED": SHARED, "N": ADDED, "E": width}
    _launch(programs.add_distant[blocks * rows,], numbers, fixed, *shared_2RPSE, *gradients)
