"""Attention as one function, `attend`. The network calls it, and kernels compute it.

    attend(q, k, v) = sum_j softmax_j(scale q_i . k_j + terms_ij, over the keys j that the pattern allows for i) v_j

A score modification may also bound the products scale q_i . k_j, or add a logit to the denominator (attention/softmax.py).

Keys and values may have fewer heads than the queries: of H query heads and G key heads, query head h has key head h // (H / G)
(grouped-query attention, Ainslie et al. 2023). The output of a query without keys is zero. Every kernel computes the same function;
`kernel` names one:

    fused       Triton programs for windows, blocks, strides, summaries, hashes and spans; half precision on CUDA
    hashed      sorts the keys by bucket; the pattern `hashed` by itself, on any device
    tiled       dense attention in other views of the memory: windows, blocks, strides, summaries; whole causal passes
    flex        FlexAttention; training on CUDA only, no dropout
    blocked     gathers the keys of any sparse pattern and calls SDPA, on any device
    sdpa        PyTorch's fused attention; everything that does not need the weights, no soft cap
    reference   the equation as written; everything
    auto        the first of these that supports the request and computes few enough of the scores: each kernel states up to
                which fraction it is the fastest. Sparse kernels are considered from 1,024 queries on.

If a kernel that is requested by name does not support the request, UnsupportedKernel is raised with the reason. It never falls back.

Keys that no query can attend to are not computed: `blocked` gathers by the pattern and by the `visible_keys` of the score
modifications, and `sdpa` leaves out the first keys that are farther away than `max_distance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from everyformer.attention.context import Context
from everyformer.attention.has_data import is_exporting
from everyformer.attention.kernel_use import record
from everyformer.attention.kernels import blocked, flex, fused, hashed, reference, sdpa, tiled
from everyformer.attention.kernels.request import LONG, Kernel, Request
from everyformer.attention.pattern import Causal, Full, Pattern
from everyformer.attention.score_mod import ScoreModModule, narrow_pattern
from everyformer.value import nearest

KERNELS: dict[str, Kernel] = {  # in the order in which `auto` asks them
    "fused": fused,
    "hashed": hashed,
    "tiled": tiled,
    "flex": flex,
    "blocked": blocked,
    "sdpa": sdpa,
    "reference": reference,
}
TRACED = ("sdpa", "reference")  # kernels that torch.compile compiles
READ_SOFT_MASKS = ("fused",)  # kernels that read the spans of a soft mask on the device


class UnsupportedKernel(ValueError):
    """The kernel that is requested by name does not support the request; the message has the reason."""


def check_kernel(kernel: str) -> None:
    """Raises ValueError if no kernel has this name."""
    if kernel not in ("auto", *KERNELS):
        raise ValueError(f"no kernel is named {kernel!r}; {nearest(kernel, [*KERNELS, 'auto'])}")


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
    transformed: bool = False,
) -> Tensor:
    """Returns the output B, H, Q, E' of every query `q_BHQE`, the mean of the values `v_BHKE` weighted by how well keys `k_BHKE` fit it.

    pattern      which query attends to which key. Default: every query to every key
    score_mods   modules of score modifications
    context      positions, side inputs and options of the call. Default: the queries are the last of the keys
    scale        factor of q k^T. Default: 1 / sqrt(E)
    dropout      probability that a weight is dropped
    kernel       a name of `KERNELS`: fused, hashed, tiled, flex, blocked, sdpa or reference; or auto. Default: the context's
    transformed  whether q and k are as the score modifications transform them already

    Raises ValueError if the inputs do not fit together, and UnsupportedKernel if the named kernel does not support the request.
    Under `torch.compile` a kernel that plans in Python runs outside the graph; `torch.export` has no outside, and `auto` takes none.
    Example: `attend(q, k, v, Causal() & Window(64))`.
    """
    context = context or Context.of(q_BHQE.shape[2], k_BHKE.shape[2], q_BHQE.device)
    name, attention = kernel or context.call.kernel, _attend
    traces = torch.compiler.is_compiling() and not is_exporting()
    if traces and _plans(pattern, q_BHQE.shape[2], name):
        attention = _attend_outside
    return attention(q_BHQE, k_BHKE, v_BHKE, pattern, score_mods, context, scale, dropout, name, transformed)


def _attend(
    q_BHQE: Tensor,
    k_BHKE: Tensor,
    v_BHKE: Tensor,
    pattern: Pattern | None,
    score_mods: Sequence[ScoreModModule],
    context: Context,
    scale: float | None,
    dropout: float,
    name: str,
    transformed: bool,
) -> Tensor:
    if pattern is not None and not score_mods and not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        scale = q_BHQE.shape[-1] ** -0.5 if scale is None else scale
        return _as_the_first(Request(q_BHQE, k_BHKE, v_BHKE, pattern, (), (), context, scale, dropout), name)
    _check(q_BHQE, k_BHKE, v_BHKE)
    _check_context(context, q_BHQE.shape[0], q_BHQE.shape[2], k_BHKE.shape[2])
    pattern = Full() if pattern is None else pattern
    _check_options(pattern, score_mods, dropout)
    scale = q_BHQE.shape[-1] ** -0.5 if scale is None else scale
    request = Request(q_BHQE, k_BHKE, v_BHKE, pattern, (), (), context, scale, dropout)
    chosen, request = _choose_and_apply(request, score_mods, name, transformed)
    for score_mod in score_mods:
        cost = score_mod.penalty(request.context)
        if cost is not None:
            context.call.losses.append(("penalty", cost))
    record(next(one for one, kernel in KERNELS.items() if kernel is chosen), request)
    return chosen.run(request)


def _as_the_first(request: Request, name: str) -> Tensor:
    """Returns the output of an attention without score modifications, without gradients.

    Nothing but its shapes decides then, and the layers of a call are alike: the first one is checked, for all.
    """
    q, k, v, pattern, context = request.q_BHQE, request.k_BHKE, request.v_BHKE, request.pattern, request.context

    def first() -> tuple[Kernel, Request, Pattern]:
        _check(q, k, v)
        _check_context(context, q.shape[0], q.shape[2], k.shape[2])
        _check_options(pattern, (), request.dropout)
        return *_choose_and_apply(
            request, (), name, transformed=False
        ), pattern  # kept, so that no other one gets its id

    key = ("attend", id(pattern), name, request.dropout, q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype)
    chosen, like, _ = context.memo(key, first)
    options = (like.context, request.scale, request.dropout, like.narrowed)
    return chosen.run(Request(q, k, v, pattern, (), (), *options))


# A break in the compiled graph: the kernel is chosen and runs as it does without torch.compile.
_attend_outside = torch.compiler.disable(_attend)


def _plans(pattern: Pattern | None, queries: int, name: str) -> bool:
    """Returns whether a kernel other than sdpa and reference is named or, for `auto`, considered."""
    if name != "auto":
        return name not in TRACED
    return queries >= LONG and type(pattern) not in (Full, Causal, type(None))


def choose(request: Request, name: str) -> Kernel:
    """Returns the kernel of that name, or for `auto` the first that supports the request and computes few enough scores.

    Raises UnsupportedKernel if the named kernel does not support the request.
    """
    if name == "auto":
        for one, kernel in KERNELS.items():
            if one not in TRACED and not request.is_long:
                continue
            limit = kernel.auto_limit(request)
            if limit >= 0 and kernel.unsupported_reason(request) is None and kernel.computed_fraction(request) <= limit:
                return kernel
    check_kernel(name)
    if reason := KERNELS[name].unsupported_reason(request):
        raise UnsupportedKernel(f"the kernel {name} does not support this: {reason}")
    return KERNELS[name]


def _choose_and_apply(
    request: Request, score_mods: Sequence[ScoreModModule], name: str, transformed: bool
) -> tuple[Kernel, Request]:
    """Returns the kernel, and the request with the score modifications applied."""
    pattern, context = request.pattern, request.context
    is_soft = [score_mod.soft for score_mod in score_mods] == [True]
    if is_soft and request.q_BHQE.is_cuda and context.call.probe is None and name in ("auto", *READ_SOFT_MASKS):
        # To narrow the pattern the host reads the spans, which waits for the GPU: first ask for a kernel that does not need it.
        applied = _apply(request, score_mods, transformed)
        chosen = choose(applied, name)
        if any(chosen is KERNELS[one] for one in READ_SOFT_MASKS):
            return chosen, applied
    narrowed = narrow_pattern(pattern, score_mods, context)
    end = None if torch.compiler.is_compiling() else narrowed.max_distance()
    if end is not None:
        request = replace(request, context=replace(context, max_distance=end))
    if narrowed is not pattern:
        request = replace(request, narrowed=narrowed)
    request = _apply(request, score_mods, transformed)
    return choose(request, name), request


def _apply(request: Request, score_mods: Sequence[ScoreModModule], transformed: bool) -> Request:
    """Returns the request with transformed queries and keys and the terms of the scores."""
    if not score_mods:
        return request
    if not all(score_mod.grouped_keys for score_mod in score_mods):
        request = request.ungrouped()
    q, k, context = request.q_BHQE, request.k_BHKE, request.context
    for score_mod in () if transformed else score_mods:  # which may make them wider
        q, k = score_mod.transform(q, k, context)
    caps = [score_mod.soft_cap for score_mod in score_mods if score_mod.soft_cap is not None]
    sinks = [sink_H for sink_H in [score_mod.sink() for score_mod in score_mods] if sink_H is not None]
    if len(caps) > 1 or len(sinks) > 1:
        raise ValueError("an attention has one soft cap and one list of sinks at most; leave the others out")
    terms = (score_mod.bias(q, k, request.scale, context) for score_mod in score_mods)
    return replace(
        request,
        q_BHQE=q,
        k_BHKE=k,
        terms=tuple(term for term in terms if term is not None),
        output_mods=tuple(score_mod for score_mod in score_mods if score_mod.needs_weights),
        soft_cap=caps[0] if caps else None,
        sink_H=sinks[0] if sinks else None,
    )


def _check(q_BHQE: Tensor, k_BHKE: Tensor, v_BHKE: Tensor) -> None:
    shapes = [tuple(x.shape) for x in (q_BHQE, k_BHKE, v_BHKE)]
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"q, k and v have the shapes {shapes}: each must be batch, heads, positions, head width")
    (batch, heads, queries, width), (k_batch, k_heads, keys, k_width), (v_batch, v_heads, values, _) = shapes
    if not (batch == k_batch == v_batch and k_heads == v_heads and width == k_width and keys == values):
        raise ValueError(
            f"q, k and v have the shapes {shapes}: batch and heads must agree, q and k must be equally wide, "
            "k and v equally long; nothing is broadcast"
        )
    if k_heads == 0 or heads % k_heads:
        raise ValueError(
            f"q, k and v have the shapes {shapes}: {heads} query heads cannot share {k_heads} key heads equally; give a number of key "
            "heads that divides the number of query heads"
        )
    if queries == 0 or keys == 0:
        raise ValueError(f"attention over {queries} queries and {keys} keys: give at least one of each")
    if len({x.dtype for x in (q_BHQE, k_BHKE, v_BHKE)}) > 1:
        raise ValueError(f"q, k and v have the dtypes {q_BHQE.dtype}, {k_BHKE.dtype}, {v_BHKE.dtype}: make them one")
    if not q_BHQE.is_floating_point():
        raise ValueError(f"q, k and v are {q_BHQE.dtype}: attention returns weighted means; give floating point")


def _check_context(context: Context, batch: int, queries: int, keys: int) -> None:
    positions = context.positions
    for name, x in (("query_BQ", positions.query_BQ), ("key_BK", positions.key_BK)):
        if x is not None and x.shape[0] not in (1, batch):
            raise ValueError(
                f"{name} of the context has {x.shape[0]} rows, but q has a batch of {batch}; give one row for each"
            )
    if (positions.queries, positions.keys) != (queries, keys):
        raise ValueError(
            f"the context has {positions.queries} queries and {positions.keys} keys, but q and k have {queries} and {keys}; "
            "make a context of their lengths"
        )
    if queries > keys and positions.query_BQ is None and positions.key_BK is not None:
        raise ValueError(f"{queries} queries cannot be the last of {keys} keys; give their positions with query_BQ=")


def _check_options(pattern: Pattern, score_mods: Sequence[ScoreModModule], dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}: it is a probability; give 0 or more and less than 1")
    if not isinstance(pattern, Pattern):
        raise ValueError(f"the pattern is {pattern!r}: give a pattern, such as parse() returns for a text")
    for score_mod in score_mods:
        if not isinstance(score_mod, ScoreModModule):
            raise ValueError(
                f"the score modification {score_mod!r} is a value: give its module, score_mod.build(heads, key_width, value_width)"
            )
