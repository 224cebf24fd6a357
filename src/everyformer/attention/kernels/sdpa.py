"""PyTorch's scaled_dot_product_attention: flash or memory-efficient where the device has it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Causal, Full

FLASH = 256  # the widest head of the flash kernels


def objection(request: Request) -> str | None:
    return request.weights_are_wanted()


def run(request: Request) -> Tensor:
    scene, pattern = request.scene, request.pattern
    bare = len(request.terms) == 0  # not `not terms`: torch.compile cannot ask a tuple of functions that
    plain = bare and scene.in_place and type(pattern) is Causal
    if plain and scene.queries == scene.keys:
        return _fused(request, None, causal=True)
    if plain and scene.queries == 1:
        return _fused(request, None)
    everything = type(pattern) is Full and scene.key_BK is None
    if everything and bare:
        return _fused(request, None)
    if everything:
        return _fused(request, _bias(request))
    mask = scene.mask(pattern, request.batch, request.heads)
    seen, alive = scene.once(("shown", id(mask)), lambda: shown(mask))
    bias = _bias(request).masked_fill(~seen, -torch.inf) if not bare else seen
    return _fused(request, bias).masked_fill(~alive, 0)


def shown(seen: Tensor) -> tuple[Tensor, Tensor]:
    """A mask in which every query sees something, and which queries really do (..., Q, 1).

    Backends disagree about a query that sees nothing, and some give NaN: it is shown everything and its answer dropped.
    """
    alive = seen.any(-1, keepdim=True)
    return seen | ~alive, alive


def _fused(request: Request, bias: Tensor | None, causal: bool = False) -> Tensor:
    width, values = request.q_BHQE.shape[-1], request.v_BHKE.shape[-1]
    # The flash kernels want values as wide as keys, which a rule may have widened, and at most 256; zeros change nothing.
    spare = width - values if values < width <= FLASH else 0
    answer = F.scaled_dot_product_attention(
        request.q_BHQE,
        request.k_BHKE,
        F.pad(request.v_BHKE, (0, spare)) if spare else request.v_BHKE,
        attn_mask=bias,
        is_causal=causal,
        dropout_p=request.dropout,
        scale=request.scale,
    )
    return answer[..., :values]


def _bias(request: Request) -> Tensor:
    """The terms of all rules, dense."""
    index = request.scene.indices(request.batch, request.heads)
    bias = request.terms[0](*index)
    for term in request.terms[1:]:
        bias = bias + term(*index)
    return bias.to(request.q_BHQE.dtype)
