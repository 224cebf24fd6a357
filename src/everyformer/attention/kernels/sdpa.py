"""PyTorch's scaled_dot_product_attention: flash or memory-efficient where the device has it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Causal, Full


def objection(request: Request) -> str | None:
    return request.weights_are_wanted()


def run(request: Request) -> Tensor:
    bias, causal = _bias(request)
    return F.scaled_dot_product_attention(
        request.q_BHQE,
        request.k_BHKE,
        request.v_BHKE,
        attn_mask=bias,
        is_causal=causal,
        dropout_p=request.dropout,
        scale=request.scale,
    )


def _bias(request: Request) -> tuple[Tensor | None, bool]:
    """The mask or additive bias, and whether PyTorch's own causal path says the same without one."""
    scene = request.scene
    if not request.terms and scene.key_BK is None:
        if type(request.pattern) is Full:
            return None, False
        if type(request.pattern) is Causal and scene.in_place:
            if scene.queries == 1:
                return None, False
            if scene.queries == scene.keys:
                return None, True
    seen = None if type(request.pattern) is Full and scene.key_BK is None else _mask(request)
    if not request.terms:
        return seen, False
    index = scene.indices(request.batch, request.heads)
    bias = request.terms[0](*index)
    for term in request.terms[1:]:
        bias = bias + term(*index)
    bias = bias.to(request.q_BHQE.dtype)
    return (bias if seen is None else bias.masked_fill(~seen, -torch.inf)), False


def _mask(request: Request) -> Tensor:
    return request.scene.mask(request.pattern, request.batch, request.heads)
