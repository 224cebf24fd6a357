"""The waist: `attend`. Above it there is only mathematics, below it only speed.

    attend(q, k, v) = softmax_j(scale q_i . k_j + terms_ij, over the j that the pattern shows to i) v_j

A query that sees nothing answers zero. Every kernel computes this same thing; which one is the run's choice:

    reference   the equation, literally; serves everything
    sdpa        PyTorch's fused attention; everything but weights
    flex        FlexAttention; training on CUDA only, no dropout
    fused       Triton programs for windows, blocks, strides, summaries, hashes and spans; half precision on CUDA
    tiled       dense attention in other views of the memory: windows, blocks, strides, summaries; whole causal passes
    blocked     gathers what any sparse pattern leaves and calls SDPA; any device
    hashed      sorts the keys by their buckets and attends near; the pattern hashed alone; any device
    auto        reference where the weights are wanted; from 1,024 queries on fused, hashed, tiled or else blocked, where
                it computes at most a quarter of the scores (on a CPU more, see LIVE) or has a soft mask; else sdpa

A kernel asked for by name that cannot serve raises with the reason. It never falls back.

What no query can see is not computed: blocked gathers by the pattern and by the sight of the rules, and sdpa is given only the
keys from the first one that any query sees on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from everyformer.attention.context import Context
from everyformer.attention.kernels import blocked, flex, fused, hashed, reference, sdpa, tiled
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Causal, Full, Hashed, Pattern, max_distance
from everyformer.attention.score_mod import ScoreModModule, Term, narrow_pattern
from everyformer.value import nearest

LIVE = {"tiled": 1.0, "hashed": 0.5, "blocked": 0.35}  # the share of the scores up to which each is the faster on a CPU
LIVE_ELSEWHERE = 0.25
KERNELS: dict[str, ModuleType] = {
    "reference": reference,
    "sdpa": sdpa,
    "flex": flex,
    "fused": fused,
    "tiled": tiled,
    "blocked": blocked,
    "hashed": hashed,
}


def check_kernel(kernel: str) -> None:
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"no kernel is named {kernel!r}; {nearest(kernel, [*KERNELS, 'auto'])}")


class UnsupportedKernel(ValueError):
    """A kernel was asked for by name and cannot compute what is wanted; the message says why."""


def attend(
    q_BHQE: Tensor,
    k_BHKE: Tensor,
    v_BHKE: Tensor,
    pattern: Pattern | None = None,
    score_mods: Sequence[ScoreModModule] = (),
    *,
    context: Context | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    kernel: str | None = None,
) -> Tensor:
    """The answer B, H, Q, E' of every query. Without a pattern everybody sees everybody."""
    _check(q_BHQE, k_BHKE, v_BHKE)
    context = context or Context.of(q_BHQE.shape[2], k_BHKE.shape[2], q_BHQE.device)
    _check_context(context, q_BHQE.shape[0], q_BHQE.shape[2], k_BHKE.shape[2])
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}: it is a probability; give 0 or more and less than 1")
    scale = q_BHQE.shape[-1] ** -0.5 if scale is None else scale
    pattern = Full() if pattern is None else pattern
    if not isinstance(pattern, Pattern):
        raise ValueError(f"the pattern is {pattern!r}: give a pattern, as parse() makes one of a text")
    for score_mod in score_mods:
        if not isinstance(score_mod, ScoreModModule):
            raise ValueError(
                f"the rule {score_mod!r} is a value: give its module, rule.build(heads, key_width, value_width)"
            )
    kernel, seen, end = kernel or context.call.kernel, pattern, None
    asked = partial(_request, q_BHQE, k_BHKE, v_BHKE, score_mods, scale, dropout)
    chosen = None
    if (
        q_BHQE.is_cuda
        and context.call.probe is None
        and kernel in ("auto", "fused")
        and [score_mod.soft for score_mod in score_mods] == [True]
    ):
        request = asked(pattern, context)  # unread: reading weights waits for the GPU, and `fused` reads them there
        chosen = choose(request, kernel)
    if chosen is not fused:
        seen = narrow_pattern(pattern, score_mods, context)
        end = None if torch.compiler.is_compiling() else max_distance(seen)
        request = asked(seen, context if end is None else replace(context, max_distance=end))
        chosen = choose(request, kernel)
    for score_mod in score_mods:
        cost = score_mod.penalty(request.context)
        if cost is not None:
            context.call.losses.append(("penalty", cost))
    if chosen is not blocked and seen is not pattern:
        request = replace(request, pattern=pattern)  # the terms hide the rest, and one mask serves every layer
    if chosen is sdpa and end is not None:
        request = _in_sight(request, end)
    answer: Tensor = chosen.run(request)
    return answer


def _request(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mods: Sequence[ScoreModModule],
    scale: float,
    dropout: float,
    pattern: Pattern,
    context: Context,
) -> Request:
    for score_mod in score_mods:  # which may make them wider
        q, k = score_mod.transform(q, k, context)
    terms = tuple(term for score_mod in score_mods if (term := score_mod.bias(q, k, scale, context)) is not None)
    answers = tuple(score_mod for score_mod in score_mods if score_mod.needs_weights)
    return Request(q, k, v, pattern, terms, answers, context, scale, dropout)


def _in_sight(request: Request, end: int) -> Request:
    """The request without the first keys, where they are too far away for every query."""
    context = request.context.crop(end)
    count = request.context.positions.keys - context.positions.keys
    if count == 0:
        return request

    def later(term: Term) -> Term:
        return lambda b, h, i, j: term(b, h, i, j + count)

    return replace(
        request,
        k_BHKE=request.k_BHKE[:, :, count:],
        v_BHKE=request.v_BHKE[:, :, count:],
        terms=tuple(map(later, request.terms)),
        context=context,
    )


def choose(request: Request, kernel: str) -> ModuleType:
    """The kernel that serves a request, by the rule above."""
    if kernel == "auto":
        if request.needs_weights_reason():
            return reference
        return _sparse(request) or sdpa
    check_kernel(kernel)
    if reason := KERNELS[kernel].unsupported_reason(request):
        raise UnsupportedKernel(f"the kernel {kernel} cannot serve: {reason}")
    return KERNELS[kernel]


def _sparse(request: Request) -> ModuleType | None:
    """The kernel that leaves most of the scores out, where that is worth its while."""
    pattern, context = request.pattern, request.context
    if context.positions.queries < 1024 or torch.compiler.is_compiling():
        return None
    if fused.unsupported_reason(request) is None:  # a soft mask in memory would be as large as the scores
        return fused if request.terms or fused.computed_fraction(request) <= LIVE_ELSEWHERE else None
    if type(pattern) is Full or type(pattern) is Causal:
        return None
    most = LIVE if context.positions.device.type == "cpu" else dict.fromkeys(LIVE, LIVE_ELSEWHERE)
    if isinstance(pattern, Hashed) and hashed.unsupported_reason(request) is None:
        return (
            hashed
            if hashed.computed_fraction(pattern, context.positions.queries, context.positions.keys) <= most["hashed"]
            else None
        )
    if tiled.unsupported_reason(request) is None and tiled.computed_fraction(request) <= most["tiled"]:
        return tiled
    if blocked.unsupported_reason(request) is not None:
        return None
    share = blocked.computed_fraction(pattern, context.positions.queries, context.positions.keys, request.heads)
    return blocked if share <= most["blocked"] else None


def _check(q_BHQE: Tensor, k_BHKE: Tensor, v_BHKE: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q_BHQE, k_BHKE, v_BHKE)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"q, k and v have the shapes {shapes}: each must be batch, heads, positions, head width")
    (batch, heads, queries, width), (k_batch, k_heads, keys, k_width), (v_batch, v_heads, values, _) = shapes
    if not (batch == k_batch == v_batch and heads == k_heads == v_heads and width == k_width and keys == values):
        raise ValueError(
            f"q, k and v have the shapes {shapes}: batch and heads must agree, q and k must be equally wide, "
            "k and v equally long; nothing is broadcast"
        )
    if queries == 0 or keys == 0:
        raise ValueError(f"attention over {queries} queries and {keys} keys: give at least one of each")
    if len({x.dtype for x in (q_BHQE, k_BHKE, v_BHKE)}) > 1:
        raise ValueError(f"q, k and v have the dtypes {q_BHQE.dtype}, {k_BHKE.dtype}, {v_BHKE.dtype}: make them one")
    if not q_BHQE.is_floating_point():
        raise ValueError(
            f"q, k and v are {q_BHQE.dtype}: weighted means of whole numbers are none; give floating point"
        )


def _check_context(context: Context, batch: int, queries: int, keys: int) -> None:
    for name, x in (("query_BQ", context.positions.query_BQ), ("key_BK", context.positions.key_BK)):
        if x is not None and x.shape[0] not in (1, batch):
            raise ValueError(f"{name} of the scene is for {x.shape[0]} sequences, q for {batch}; give one row for each")
    if (context.positions.queries, context.positions.keys) != (queries, keys):
        raise ValueError(
            f"the scene is of {context.positions.queries} queries and {context.positions.keys} keys, q and k of {queries} and {keys}; "
            "make a scene of their lengths"
        )
    if queries > keys and context.positions.query_BQ is None and context.positions.key_BK is not None:
        raise ValueError(f"{queries} queries cannot be the last of {keys} keys; say where they stand with query_BQ=")
