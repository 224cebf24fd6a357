"""PyTorch's scaled_dot_product_attention: flash or memory-efficient where the device has it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from everyformer.attention.has_data import has_data
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Causal, Full

FLASH = 256  # the widest head of the flash kernels
# With a bias not cuDNN's, whose slopes are then not always numbers (pytorch/pytorch#196678).
BIASED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def unsupported_reason(request: Request) -> str | None:
    return request.needs_weights_reason()


def run(request: Request) -> Tensor:
    context, pattern = request.context, request.pattern
    bare = len(request.terms) == 0  # not `not terms`: torch.compile cannot ask a tuple of functions that
    plain = bare and context.positions.in_order and type(pattern) is Causal
    if plain and context.positions.queries == context.positions.keys:
        return _run(request, None, causal=True)
    if plain and context.positions.queries == 1:
        return _run(request, None)
    everything = type(pattern) is Full and context.positions.key_BK is None
    if everything and bare:
        return _run(request, None)
    if everything:
        return _run(request, _bias(request))
    mask = context.mask(pattern, request.batch, request.heads)
    seen, alive = context.memo(("shown", id(pattern), request.batch, request.heads), lambda: shown(mask))
    bias = _bias(request).masked_fill(~seen, -torch.inf) if not bare else seen
    return _run(request, bias).masked_fill(~alive, 0)


def shown(seen: Tensor) -> tuple[Tensor, Tensor]:
    """A mask in which every query sees something, and which queries really do (..., Q, 1).

    Backends disagree about a query that sees nothing, and some give NaN: it is shown everything and its answer dropped.
    """
    alive = seen.any(-1, keepdim=True)
    return seen | ~alive, alive


def _run(request: Request, bias: Tensor | None, causal: bool = False) -> Tensor:
    return dense(request.q_BHQE, request.k_BHKE, request.v_BHKE, bias, request.scale, request.dropout, causal)


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, dropout: float, causal: bool = False
) -> Tensor:
    """softmax(scale q k^T + bias) v."""
    kernels: AbstractContextManager[None] = nullcontext()
    spare = max(0, q.shape[-1] - v.shape[-1]) if q.shape[-1] <= FLASH else 0  # a rule may have made the keys wider
    if bias is not None and q.device.type == "cuda":
        kernels = sdpa_kernel(BIASED)
    elif spare and _cudnn_serves(q, k, v, dropout, causal):
        kernels, spare = sdpa_kernel(SDPBackend.CUDNN_ATTENTION), 0
    if spare:  # the flash kernels want values as wide as keys; zeros change nothing
        v = F.pad(v, (0, spare))
    with kernels:
        answer = F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias, dropout_p=dropout, is_causal=causal, scale=scale
        )
    return answer[..., : v.shape[-1] - spare]


def _cudnn_serves(q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool) -> bool:
    """Whether there is cuDNN's kernel for this: it alone takes values narrower than keys."""
    if q.device.type != "cuda" or torch.compiler.is_compiling() or not has_data(q):
        return False
    return bool(can_use_cudnn_attention(SDPAParams(q, k, v, None, dropout, causal, False)))


def _bias(request: Request) -> Tensor:
    """The terms of all rules, dense."""
    index = request.context.positions.indices(request.batch, request.heads)
    bias = request.terms[0](*index)
    for term in request.terms[1:]:
        bias = bias + term(*index)
    return bias.to(request.q_BHQE.dtype)
