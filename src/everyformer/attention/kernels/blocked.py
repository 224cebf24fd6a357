"""Executes any part of a plan: sorts the queries into blocks that attend to few keys, gathers those keys, and calls SDPA.

The queries of a part are sorted by one of its orders (as they are, or by `Pattern.order`) and split into blocks. Each block gathers
the keys that any of its queries attends to, and SDPA attends within it. Parts are merged by their log-sum-exp, which is exact. The
gather indices are computed from the predicate, once for a pattern and its lengths. Every step is plain PyTorch, so it runs and
trains on any device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from everyformer.attention.algebra import And, ByHead, Causal, Full, Not, Or
from everyformer.attention.context import Context, SideInputs
from everyformer.attention.kernels.merge import log_sum_exp, merge
from everyformer.attention.kernels.parts import Kind, parts, plan
from everyformer.attention.kernels.request import Request, has_consecutive_keys
from everyformer.attention.kernels.sdpa import dense, without_empty_rows
from everyformer.attention.pattern import Pattern, Window

FINEST = 16  # queries in the smallest block; larger blocks are multiples of it
SIZES = (16, 32, 64, 128, 256)
PER_BLOCK = 4096  # the cost of a block besides its scores, in scores: it keeps blocks from being too small
PIECE = 2**24  # scores of the blocks that are computed at once, if there are terms
BY_DISTANCE = (
    Causal,
    Full,
    Window,
    And,
    Or,
    Not,
    ByHead,
)  # patterns, and combinations of patterns, that depend on q - k alone
LIMIT_ON_CPU, LIMIT = 0.35, 0.25  # computed fractions up to which it is faster than a masked dense kernel


@dataclass(frozen=True)
class Gather:
    """Block n has the queries i_NQ and the keys j_NK, and `pattern` decides among them. Filler has the index Q or K."""

    pattern: Pattern
    i_NQ: Tensor
    j_NK: Tensor
    slot_Q: Tensor  # the index of each query in the flattened blocks

    @property
    def scores(self) -> int:
        return self.i_NQ.numel() * self.j_NK.shape[1]


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if _indices_are_positions(request.context):
        return None
    if any(type(part) not in BY_DISTANCE for part in (request.narrowed or request.pattern).walk()):
        return "the index of a key is not its position (left padding, a cropped cache or another sequence); use sdpa"
    if not has_consecutive_keys(request.context):
        return "the visible keys of a sequence do not follow each other (padding between them, or another sequence); use sdpa"
    return None


def computed_fraction(request: Request) -> float:
    positions, scores = request.context.positions, 0
    for heads, pattern in _by_head(request):
        found = gathers(pattern, positions.queries, positions.keys, request.heads)
        scores += len(heads) * sum(gather.scores for gather in found)
    return scores / (request.heads * positions.queries * positions.keys)


def auto_limit(request: Request) -> float:
    if not request.is_sparse:
        return -1
    limit = LIMIT_ON_CPU if request.context.positions.device.type == "cpu" else LIMIT
    planned = plan(request.narrowed or request.pattern, request.heads)
    # Where the parts alone exceed the limit, the search for gather indices, quadratic in the length, is not worth its time.
    worthwhile = Kind.BUCKET not in planned.kinds() and planned.fraction(request.context.positions.keys) <= limit
    return limit if worthwhile else -1


def run(request: Request) -> Tensor:
    positions = request.context.positions
    output_BHQE = request.q_BHQE.new_zeros(*request.q_BHQE.shape[:3], request.v_BHKE.shape[-1])
    for heads, pattern in _by_head(request):
        head_H = torch.tensor(heads, device=positions.device)
        found = _gathers_on(positions.device, pattern, positions.queries, positions.keys, request.heads)
        sinks = [] if request.sink_H is None else [_sink(request, request.sink_H[head_H])]
        if len(found) == 1 and not sinks:
            merged, _ = _attend(request, found[0], head_H, with_total=False)
        else:
            parts = [_attend(request, one, head_H, with_total=True) for one in found]
            merged = merge(*zip(*parts, *sinks, strict=True))
        output_BHQE = output_BHQE.index_copy(1, head_H, merged)
    return output_BHQE


def _sink(request: Request, sink_H: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp of a part in which every query attends to the value 0."""
    shape = (request.batch, len(sink_H), request.q_BHQE.shape[2])
    output_BHTE = request.q_BHQE.new_zeros(*shape, request.v_BHKE.shape[-1])
    return output_BHTE, sink_H.to(output_BHTE.dtype)[:, None, None].expand(*shape, 1)


def _by_head(request: Request) -> list[tuple[list[int], Pattern]]:
    """Returns the heads that share a pattern, and the pattern."""
    patterns = plan(request.narrowed or request.pattern, request.heads).patterns
    groups: dict[Pattern, list[int]] = {}
    for head in range(request.heads):
        groups.setdefault(patterns[head % len(patterns)], []).append(head)
    return [(heads, pattern) for pattern, heads in groups.items()]


def _indices_are_positions(context: Context) -> bool:
    """Whether the position of every visible key is its index, in all sequences."""
    positions = context.positions
    if positions.in_order:
        return True
    if positions.query_BQ is not None or positions.key_BK is None:
        return False
    index_K = torch.arange(positions.keys, device=positions.device)
    return bool(((positions.key_BK == index_K) | (positions.key_BK < 0)).all())


def _attend(request: Request, gather: Gather, head_H: Tensor, with_total: bool) -> tuple[Tensor, Tensor]:
    """Returns the output B, H, T, E of one gather for all T queries and its log-sum-exp B, H, T, 1, which is empty unless `with_total`.

    With terms, whose sums are as large as the scores, the blocks are computed in pieces, and again in the backward pass.
    """
    scores = request.batch * len(head_H) * gather.scores
    if not request.terms or scores <= PIECE:
        pieces = [_attend_blocks(request, gather, gather.i_NQ, gather.j_NK, head_H, with_total)]
    else:
        count = max(1, len(gather.i_NQ) * PIECE // scores)
        pieces = [
            checkpoint(_attend_blocks, request, gather, i_NQ, j_NK, head_H, with_total, use_reentrant=False)
            for i_NQ, j_NK in zip(gather.i_NQ.split(count), gather.j_NK.split(count), strict=True)
        ]
    output_BHNQE, total = (torch.cat(one, 2) if len(one) > 1 else one[0] for one in zip(*pieces, strict=True))
    output_BHTE = output_BHNQE.flatten(2, 3)[:, :, gather.slot_Q]
    return output_BHTE, total.flatten(2, 3)[:, :, gather.slot_Q] if with_total else output_BHTE[..., :0]


def _attend_blocks(
    request: Request, gather: Gather, block_NQ: Tensor, block_NK: Tensor, head_H: Tensor, with_total: bool
) -> tuple[Tensor, Tensor]:
    """Returns the output B, H, N, Q, E of some blocks of a gather, and its log-sum-exp B, H, N, Q, 1."""
    positions = request.context.positions
    i_NQ, j_NK = block_NQ.clamp(max=positions.queries - 1), block_NK.clamp(max=positions.keys - 1)
    q = request.q_BHQE[:, head_H][:, :, i_NQ]  # score modifications may have made q and k wider than v
    key_head_H = head_H // (request.heads // request.key_heads)
    k = request.k_BHKE[:, key_head_H][:, :, j_NK]
    v_BHNKE = request.v_BHKE[:, key_head_H][:, :, j_NK]

    b = torch.arange(request.batch, device=positions.device).view(-1, 1, 1, 1, 1)
    h, i, j = head_H.view(-1, 1, 1, 1), i_NQ[:, :, None], j_NK[:, None, :]
    k_at = positions.key_at(b, j)
    allowed = gather.pattern.bind(request.context.side)(b, h, positions.query_at(b, i), k_at)
    allowed = allowed & (block_NQ < positions.queries)[:, :, None] & (block_NK < positions.keys)[:, None, :]
    allowed = allowed if positions.key_BK is None else allowed & (k_at >= 0)
    bias = q.new_zeros(())
    for term in request.terms:
        bias = bias + term(b, h, i, j)
    mask, has_keys = without_empty_rows(allowed)
    shape = (request.batch, len(head_H), *i_NQ.shape, j_NK.shape[1])
    bias_BHNQK = bias.masked_fill(~mask, -torch.inf).expand(shape)

    if request.soft_cap is None:
        q_, k_, v_, bias_ = (x.flatten(1, 2) for x in (q, k, v_BHNKE, bias_BHNQK))
        output_BHNQE = dense(q_, k_, v_, bias_, request.scale, request.dropout).unflatten(1, q.shape[1:3])
    else:
        weights_BHNQK = (request.products(q, k) + bias_BHNQK).softmax(-1)
        output_BHNQE = F.dropout(weights_BHNQK, request.dropout, training=request.dropout > 0) @ v_BHNKE
    output_BHNQE = output_BHNQE.masked_fill(~has_keys, 0)
    if not with_total:
        return output_BHNQE, output_BHNQE[..., :0]
    score = request.products(q, k) + bias
    return output_BHNQE, log_sum_exp(score.masked_fill(~allowed, -torch.inf))


@lru_cache(maxsize=256)
def gathers(pattern: Pattern, queries: int, keys: int, heads: int) -> tuple[Gather, ...]:
    """Returns the cheaper of: the pattern of some heads as one gather, or one gather for each of its parts."""
    with torch.device("cpu"), torch.inference_mode(False):  # what is cached must serve training too
        whole: tuple[Gather, ...] = (_best(pattern, queries, keys, heads),)
        split, planned = whole, parts(pattern)
        if len(planned) > 1 and planned[0].kind is not Kind.BUCKET:
            split = tuple(_best(part.pattern, queries, keys, heads) for part in planned)
    return min((whole, split), key=lambda found: sum(one.scores for one in found) * (1.5 if len(found) > 1 else 1))


@lru_cache(maxsize=256)
def _gathers_on(device: torch.device, pattern: Pattern, queries: int, keys: int, heads: int) -> tuple[Gather, ...]:
    with torch.inference_mode(False):
        return tuple(
            Gather(one.pattern, one.i_NQ.to(device), one.j_NK.to(device), one.slot_Q.to(device))
            for one in gathers(pattern, queries, keys, heads)
        )


def _best(pattern: Pattern, queries: int, keys: int, heads: int) -> Gather:
    """Returns the gather with the order of the queries and the size of the blocks that leave the fewest scores to compute."""
    at_Q = torch.arange(queries) + (keys - queries)
    orders = [torch.arange(queries)]
    orders += [key.argsort(stable=True) for part in pattern.walk() if (key := part.order(at_Q)) is not None]
    options: list[tuple[int, Tensor, Tensor, int]] = []
    for order_Q in orders:
        fine_NK = _any_allowed(pattern.superset(), at_Q[order_Q], keys, heads)
        for size in SIZES:
            any_NK = _pad_rows(fine_NK, size // FINEST).unflatten(0, (-1, size // FINEST)).any(1)
            width = max(1, int(any_NK.sum(1).max()))
            options.append((any_NK.shape[0] * (size * width + PER_BLOCK), order_Q, any_NK, size))
    _, order_Q, any_NK, size = min(options, key=lambda option: option[0])
    width = max(1, int(any_NK.sum(1).max()))
    is_key_NK, column_NK = any_NK.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    filler = torch.full((-queries % size,), queries)
    gathered = column_NK.masked_fill(is_key_NK == 0, keys)[:, :width]
    return Gather(pattern, torch.cat((order_Q, filler)).view(-1, size), gathered, order_Q.argsort())


def _any_allowed(pattern: Pattern, at_Q: Tensor, keys: int, heads: int) -> Tensor:
    """Returns N, K: the keys that any query of each finest block attends to, in any head."""
    k_K, blocks, step, end = torch.arange(keys), list[Tensor](), FINEST * max(1, 2**20 // keys), pattern.max_distance()
    for start in range(0, len(at_Q), step):
        q_Q1 = at_Q[start : start + step, None]
        zero, h = torch.zeros((), dtype=torch.long), torch.arange(heads).view(-1, 1, 1)
        first, last = (
            (0, keys) if end is None else (max(0, int(q_Q1.min()) - end), min(keys, int(q_Q1.max()) + end + 1))
        )
        allowed = pattern.bind(SideInputs())(zero, h, q_Q1, k_K[first:last])
        # Most patterns do not read the head, and then the result has no axis for it.
        allowed_QK = (allowed.any(0) if allowed.dim() == 3 else allowed).expand(len(q_Q1), last - first)
        any_NK = _pad_rows(allowed_QK, FINEST).unflatten(0, (-1, FINEST)).any(1)
        blocks.append(F.pad(any_NK, (first, keys - last)))
    return torch.cat(blocks)


def _pad_rows(x_NK: Tensor, multiple: int) -> Tensor:
    return F.pad(x_NK, (0, 0, 0, -x_NK.shape[0] % multiple))
