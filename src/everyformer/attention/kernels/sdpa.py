"""PyTorch's scaled_dot_product_attention: flash or memory-efficient attention where the device has it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from everyformer.attention.has_data import has_data, is_transformed
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Causal, Full
from everyformer.attention.score_mod import Term

FLASH_WIDTH = 256  # the widest head of the flash kernels
# Not cuDNN's with a bias: its gradients are then sometimes NaN (pytorch/pytorch#196678).
BACKENDS_WITH_BIAS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def unsupported_reason(request: Request) -> str | None:
    if request.soft_cap is not None:
        return "a soft cap changes the scores, which it does not store; use reference, or blocked for a sparse pattern"
    return request.needs_weights_reason()


def computed_fraction(request: Request) -> float:
    return 1.0


def auto_limit(request: Request) -> float:
    return 1.0


def run(request: Request) -> Tensor:
    request = _crop(request)
    context, pattern = request.context, request.pattern
    has_no_terms = (
        len(request.terms) == 0
    )  # not `not terms`: torch.compile does not trace that for a tuple of functions
    if request.sink_H is not None:
        return _run_with_sinks(request, request.sink_H)
    plain = has_no_terms and context.positions.in_order and type(pattern) is Causal
    if plain and context.positions.queries == context.positions.keys:
        return _run(request, None, causal=True)
    if plain and context.positions.queries == 1:
        return _run(request, None)
    is_full = type(pattern) is Full and context.positions.key_BK is None
    if is_full and has_no_terms:
        return _run(request, None)
    if is_full:
        return _run(request, _bias(request))
    allowed = context.mask(pattern, request.batch, request.heads)
    key = ("without_empty_rows", id(pattern), request.batch, request.heads)
    mask, has_keys = context.memo(key, lambda: without_empty_rows(allowed))
    bias = mask if has_no_terms else _bias(request).masked_fill(~mask, -torch.inf)
    return _run(request, bias).masked_fill(~has_keys, 0)


def _run_with_sinks(request: Request, sink_H: Tensor) -> Tensor:
    """A sink is one more key, whose score is its logit and whose value is 0."""
    q, batch, heads = request.q_BHQE, request.batch, request.heads
    bias = _bias(request) if len(request.terms) else q.new_zeros(())
    bias = bias.masked_fill(~request.context.mask(request.pattern, batch, heads), -torch.inf)
    sink_BHQ1 = sink_H.to(q.dtype)[:, None, None].expand(batch, heads, q.shape[2], 1)
    bias_BHQK = torch.cat((bias.expand(batch, heads, q.shape[2], request.k_BHKE.shape[2]), sink_BHQ1), dim=-1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (request.k_BHKE, request.v_BHKE))
    return dense(q, k, v, bias_BHQK, request.scale, request.dropout)


def stores_mask(request: Request) -> bool:
    """Returns whether a mask or the terms of all pairs are stored: unless the pattern is causal or full, without terms and padding."""
    positions, pattern = request.context.positions, request.pattern
    if len(request.terms) or positions.key_BK is not None:
        return True
    whole = positions.queries == positions.keys or positions.queries == 1
    return not (type(pattern) is Full or (type(pattern) is Causal and positions.in_order and whole))


def without_empty_rows(allowed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a mask in which every query has a key, and which queries have one in `allowed` (..., Q, 1).

    Backends disagree about a query without keys, and some return NaN: it attends to all keys and its output is then set to 0.
    """
    has_keys = allowed.any(-1, keepdim=True)
    return allowed | ~has_keys, has_keys


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:
    """Returns softmax(scale q k^T + bias) v; k and v may have fewer heads than q."""
    backends: AbstractContextManager[None] = nullcontext()
    # Score modifications may have made q and k wider than v.
    missing = max(0, q.shape[-1] - v.shape[-1]) if q.shape[-1] <= FLASH_WIDTH else 0
    if bias is not None and is_transformed():  # the fused kernels do not notice there that a bias needs a gradient
        backends, missing = sdpa_kernel(SDPBackend.MATH), 0
    elif bias is not None and q.device.type == "cuda":
        backends = sdpa_kernel(BACKENDS_WITH_BIAS)
    elif missing and _cudnn_supports(q, k, v, dropout, causal):
        backends, missing = sdpa_kernel(SDPBackend.CUDNN_ATTENTION), 0
    if missing:  # the flash kernels need values as wide as keys; zeros change nothing
        v = F.pad(v, (0, missing))
    with backends:
        output = F.scaled_dot_product_attention(
            q, k, v, bias, dropout, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    return output[..., : v.shape[-1] - missing]


def _run(request: Request, bias: Tensor | None, causal: bool = False) -> Tensor:
    return dense(request.q_BHQE, request.k_BHKE, request.v_BHKE, bias, request.scale, request.dropout, causal)


def _cudnn_supports(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> bool:
    """Whether cuDNN has a kernel for these; only cuDNN's takes values narrower than keys."""
    if q.device.type != "cuda" or torch.compiler.is_compiling() or not has_data(q):
        return False
    return bool(can_use_cudnn_attention(SDPAParams(q, k, v, None, dropout, causal, q.shape[1] != k.shape[1])))


def _bias(request: Request) -> Tensor:
    """Returns the sum of all terms as a dense tensor."""
    index = request.context.positions.indices(request.batch, request.heads)
    bias = request.terms[0](*index)
    for term in request.terms[1:]:
        bias = bias + term(*index)
    return bias.to(request.q_BHQE.dtype)


def _crop(request: Request) -> Request:
    """Returns the request without the first keys, if they are too far away for every query."""
    end = request.context.max_distance
    if end is None:
        return request
    context = request.context.crop(end)
    count = request.context.positions.keys - context.positions.keys
    if count == 0:
        return request

    def shifted(term: Term) -> Term:
        return lambda b, h, i, j: term(b, h, i, j + count)

    return replace(
        request,
        k_BHKE=request.k_BHKE[:, :, count:],
        v_BHKE=request.v_BHKE[:, :, count:],
        terms=tuple(map(shifted, request.terms)),
        context=context,
    )
