"""The equation as written: every score and every weight. It supports everything, and the other kernels are tested against it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.kernels.request import Request


def unsupported_reason(request: Request) -> str | None:
    return None


def computed_fraction(request: Request) -> float:
    return 1.0


def auto_limit(request: Request) -> float:
    return 1.0


def run(request: Request) -> Tensor:
    context, request = request.context, request.ungrouped()
    b, h, i, j = context.positions.indices(request.batch, request.heads)
    score_BHQK = request.products(request.q_BHQE, request.k_BHKE)
    if context.call.probe is not None and context.call.probe.records_products:
        context.call.probe.products.append(score_BHQK.detach())
    for term in request.terms:
        score_BHQK = score_BHQK + term(b, h, i, j)
    allowed_BHQK = context.mask(request.pattern, request.batch, request.heads)
    score_BHQK = score_BHQK.masked_fill(~allowed_BHQK, -torch.inf)  # eq. W2, W19, K6f
    # The output of a query without keys is zero: its weights are 0 / 0, and count as 0.
    top_BHQ1 = score_BHQK.amax(-1, keepdim=True).detach()
    sink_H11 = None if request.sink_H is None else request.sink_H.to(top_BHQ1.dtype)[:, None, None]
    if sink_H11 is not None:
        top_BHQ1 = top_BHQ1.maximum(sink_H11.detach())
    empty_BHQ1 = top_BHQ1 == -torch.inf
    exp_BHQK = (score_BHQK - top_BHQ1.masked_fill(empty_BHQ1, 0)).exp()
    total_BHQ1 = exp_BHQK.sum(-1, keepdim=True)
    if sink_H11 is not None:
        total_BHQ1 = total_BHQ1 + (sink_H11 - top_BHQ1).exp()
    weights_BHQK = exp_BHQK / total_BHQ1.masked_fill(empty_BHQ1, 1)  # eq. T2, M3, B3, B6, K5
    if context.call.probe is not None:
        context.call.probe.weights.append(weights_BHQK.detach())
    weights_BHQK = F.dropout(weights_BHQK, request.dropout, training=request.dropout > 0)
    output_BHQE = weights_BHQK @ request.v_BHKE  # eq. M4, M5, B1, B7, W1, K1, K2
    for score_mod in request.output_mods:
        extra = score_mod.output(weights_BHQK, context)
        output_BHQE = output_BHQE if extra is None else output_BHQE + extra
    return output_BHQE
