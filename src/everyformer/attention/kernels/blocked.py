"""Sparse attention from dense pieces: reorder the positions until the pattern is dense, gather, call SDPA, merge.

A pattern becomes one or more *parts* that see disjoint pairs. For each part the queries are put into an order in which
a block of them sees few keys (as they come, or by residue for a stride), those keys are gathered, and SDPA attends
within the block. The parts' answers are merged by their log-sum-exp, which is exact. The plan is computed from the
predicate, once per pattern and length; every step is plain PyTorch, so it runs and trains on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Context, SideInputs
from everyformer.attention.kernels.request import Request
from everyformer.attention.kernels.sdpa import dense, shown
from everyformer.attention.pattern import Pattern, Stride, alternatives, for_head

FINEST = 16  # queries in the smallest block; larger blocks are multiples of it
SIZES = (16, 32, 64, 128, 256)
PER_BLOCK = 4096  # what a block costs besides its scores, in scores: keeps blocks from being too small


@dataclass(frozen=True)
class Part:
    """One gather: block n of queries sees the keys j_NK, where the pattern shows them. Filler has the number Q or K."""

    pattern: Pattern
    i_NQ: Tensor
    j_NK: Tensor
    back_Q: Tensor  # where each query stands in the blocks

    @property
    def cost(self) -> int:
        return self.i_NQ.numel() * self.j_NK.shape[1]


def unsupported_reason(request: Request) -> str | None:
    if reason := request.needs_weights_reason():
        return reason
    if not _same_order(request.context):
        return "the keys do not stand at their numbers (left padding, a trimmed past, or another sequence); use sdpa"
    return None


def run(request: Request) -> Tensor:
    context = request.context
    answer_BHQE = request.q_BHQE.new_zeros(*request.q_BHQE.shape[:3], request.v_BHKE.shape[-1])
    for heads, pattern in _groups(request.pattern, request.heads):
        parts = plan(
            pattern, context.positions.queries, context.positions.keys, request.heads, context.positions.device
        )
        head_H = torch.tensor(heads, device=context.positions.device)
        pieces = [_attend(request, part, head_H, alone=len(parts) == 1) for part in parts]
        answer_BHQE = answer_BHQE.index_copy(1, head_H, _merge(pieces))
    return answer_BHQE


def computed_fraction(pattern: Pattern, queries: int, keys: int, heads: int) -> float:
    """The share of the Q x K scores that this kernel computes: 1 is what a dense kernel does."""
    cost = 0
    for members, one in _groups(pattern, heads):
        cost += len(members) * sum(part.cost for part in plan(one, queries, keys, heads, torch.device("cpu")))
    return cost / (heads * queries * keys)


def _groups(pattern: Pattern, heads: int) -> list[tuple[list[int], Pattern]]:
    """Heads that share a pattern go together."""
    groups: dict[Pattern, list[int]] = {}
    for head in range(heads):
        groups.setdefault(for_head(pattern, head), []).append(head)
    return [(members, one) for one, members in groups.items()]


def _same_order(context: Context) -> bool:
    """Does every visible key stand at the position of its number, in all sequences alike?"""
    if context.positions.in_order:
        return True
    if context.positions.query_BQ is not None or context.positions.key_BK is None:
        return False
    key_BK = context.positions.key_BK
    return bool(
        ((key_BK == torch.arange(context.positions.keys, device=context.positions.device)) | (key_BK < 0)).all()
    )


def _attend(request: Request, part: Part, head_H: Tensor, alone: bool) -> tuple[Tensor, Tensor | None]:
    """The part's answer B, H, Q, E and its log-sum-exp B, H, Q, 1 (not needed where the part is alone)."""
    context, queries = request.context, request.context.positions.queries
    i_NQ, j_NK = part.i_NQ.clamp(max=queries - 1), part.j_NK.clamp(max=context.positions.keys - 1)
    q = request.q_BHQE[:, head_H][:, :, i_NQ]  # a rule may have made them wider than the values
    k = request.k_BHKE[:, head_H][:, :, j_NK]
    v_BHNKE = request.v_BHKE[:, head_H][:, :, j_NK]

    b = torch.arange(request.batch, device=context.positions.device).view(-1, 1, 1, 1, 1)
    h, i, j = head_H.view(-1, 1, 1, 1), i_NQ[:, :, None], j_NK[:, None, :]
    k_at = context.positions.key_at(b, j)
    seen = part.pattern.bind(context.side)(b, h, context.positions.query_at(b, i), k_at)
    seen = seen & (part.i_NQ < queries)[:, :, None] & (part.j_NK < context.positions.keys)[:, None, :]
    seen = seen if context.positions.key_BK is None else seen & (k_at >= 0)
    bias = q.new_zeros(())
    for term in request.terms:
        bias = bias + term(b, h, i, j)
    some, alive = shown(seen)
    shape = (request.batch, len(head_H), *i_NQ.shape, j_NK.shape[1])
    bias_BHNQK = bias.masked_fill(~some, -torch.inf).expand(shape)

    q_, k_, v_, bias_ = (x.flatten(1, 2) for x in (q, k, v_BHNKE, bias_BHNQK))
    answer = dense(q_, k_, v_, bias_, request.scale, request.dropout)
    answer_BHNQE = answer.unflatten(1, q.shape[1:3]).masked_fill(~alive, 0)
    answer_BHTE = answer_BHNQE.flatten(2, 3)[:, :, part.back_Q]
    if alone:
        return answer_BHTE, None
    score = q @ k.transpose(-1, -2) * request.scale + bias
    total_BHNQ1 = _log_sum_exp(score.masked_fill(~seen, -torch.inf))
    return answer_BHTE, total_BHNQ1.flatten(2, 3)[:, :, part.back_Q]


def _log_sum_exp(score: Tensor) -> Tensor:
    """log sum exp over the last axis, kept; -inf with a gradient of 0 (not NaN) where nothing is seen."""
    top = score.amax(-1, keepdim=True).detach()
    empty = top == -torch.inf
    total = (score - top.masked_fill(empty, 0)).exp().sum(-1, keepdim=True)
    return torch.where(empty, -torch.inf, total.masked_fill(empty, 1).log() + top)


def _merge(pieces: list[tuple[Tensor, Tensor | None]]) -> Tensor:
    """sum_p softmax_p(log-sum-exp_p) answer_p: the answer over all parts together."""
    answers, totals = zip(*pieces, strict=True)
    if len(pieces) == 1:
        return pieces[0][0]
    total_PBHQ1 = torch.stack(totals)
    top = total_PBHQ1.amax(0).detach()
    share_PBHQ1 = (total_PBHQ1 - top.masked_fill(top == -torch.inf, 0)).exp()
    whole = share_PBHQ1.sum(0).clamp(min=torch.finfo(share_PBHQ1.dtype).tiny)
    return (torch.stack(answers) * share_PBHQ1 / whole).sum(0)


@lru_cache(maxsize=256)
def plan(pattern: Pattern, queries: int, keys: int, heads: int, device: torch.device) -> tuple[Part, ...]:
    """The cheaper of: the pattern as one part, or one part for each of its alternatives."""
    with torch.device("cpu"), torch.inference_mode(False):  # what is kept must serve training too
        whole = (_best(pattern, queries, keys, heads),)
        split = tuple(_best(part, queries, keys, heads) for part in _disjoint(pattern))
    parts = min((whole, split), key=lambda parts: sum(part.cost for part in parts) * (1 + 0.5 * (len(parts) > 1)))
    with torch.inference_mode(False):
        return tuple(Part(p.pattern, p.i_NQ.to(device), p.j_NK.to(device), p.back_Q.to(device)) for p in parts)


def _disjoint(pattern: Pattern) -> Iterator[Pattern]:
    """The alternatives of a pattern, each without what the earlier ones see."""
    earlier: list[Pattern] = []
    for one in alternatives(pattern):
        rest = one
        for other in earlier:
            rest = rest & ~other
        yield rest
        earlier.append(one)


def _best(pattern: Pattern, queries: int, keys: int, heads: int) -> Part:
    """The order of the queries and the size of the blocks that leave the fewest scores to compute."""
    at_Q = torch.arange(queries) + (keys - queries)
    orders = [torch.arange(queries)]
    orders += [(at_Q % part.step).argsort(stable=True) for part in pattern.walk() if isinstance(part, Stride)]
    found: list[tuple[int, Tensor, Tensor, int]] = []
    for order_Q in orders:
        fine_NK = _live(pattern.bound(), at_Q[order_Q], keys, heads)
        for size in SIZES:
            live_NK = _pad_rows(fine_NK, size // FINEST).unflatten(0, (-1, size // FINEST)).any(1)
            width = max(1, int(live_NK.sum(1).max()))
            cost = live_NK.shape[0] * (size * width + PER_BLOCK)
            found.append((cost, order_Q, live_NK, size))
    _, order_Q, live_NK, size = min(found, key=lambda option: option[0])
    width = max(1, int(live_NK.sum(1).max()))
    live, column_NK = live_NK.to(torch.uint8).sort(dim=1, descending=True, stable=True)
    filler = torch.full((-queries % size,), queries)
    few = column_NK.masked_fill(live == 0, keys)[:, :width]
    return Part(pattern, torch.cat((order_Q, filler)).view(-1, size), few, order_Q.argsort())


def _live(pattern: Pattern, at_Q: Tensor, keys: int, heads: int) -> Tensor:
    """Which keys any query of each finest block sees, in any head: N, K."""
    k_K, rows, step = torch.arange(keys), [], FINEST * max(1, 2**20 // keys)
    for start in range(0, len(at_Q), step):
        q_Q1 = at_Q[start : start + step, None]
        zero, h = torch.zeros((), dtype=torch.long), torch.arange(heads).view(-1, 1, 1)
        seen = pattern.bind(SideInputs())(zero, h, q_Q1, k_K)
        # Most patterns read no head and come back without that axis.
        seen_QK = (seen.any(0) if seen.dim() == 3 else seen).expand(len(q_Q1), keys)
        rows.append(_pad_rows(seen_QK, FINEST).unflatten(0, (-1, FINEST)).any(1))
    return torch.cat(rows)


def _pad_rows(x_NK: Tensor, multiple: int) -> Tensor:
    return F.pad(x_NK, (0, 0, 0, -x_NK.shape[0] % multiple))
