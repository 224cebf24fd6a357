"""A Triton program for the cross-entropy of rows of logits: the loss, and its gradient in place of the logits.

    loss_n = -sum_v q_nv log softmax(l_n)_v,   dloss_n/dl_n = softmax(l_n) - q_n        see linear_cross_entropy.py

A row is read twice, the second time mostly from the cache of the GPU, and written once. `linear_cross_entropy._chunk` is the definition.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # logits of a row that are in registers at once


@triton.jit
def _program(
    logits, target, loss, vocabulary, width, smoothing, cap,
    SMOOTH: tl.constexpr, CAPPED: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row of `width` logits, of which the first `vocabulary` are those of tokens; the gradient of the others is 0."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * width
    token = tl.load(target + row)
    largest = float("-inf")
    total = 0.0
    mean = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _capped(tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32), cap, CAPPED)
        if SMOOTH:
            mean += tl.sum(tl.where(at < vocabulary, x, 0.0)) / vocabulary
        x = tl.where(at < vocabulary, x, float("-inf"))
        new = tl.maximum(largest, tl.max(x))
        total = total * tl.exp(largest - new) + tl.sum(tl.exp(x - new))
        largest = new
    log_sum = largest + tl.log(total)
    has_target = token >= 0
    own = _capped(tl.load(logits + tl.where(has_target, token, 0)).to(tl.float32), cap, CAPPED)
    value = (1 - smoothing) * (log_sum - own)
    if SMOOTH:
        value += smoothing * (log_sum - mean)
    tl.store(loss + row, tl.where(has_target, value, 0.0))
    if GRADIENT:
        for start in range(0, width, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = _capped(tl.load(logits + at, mask=at < vocabulary, other=0.0).to(tl.float32), cap, CAPPED)
            gradient = tl.exp(x - log_sum) - tl.where(at == token, 1 - smoothing, 0.0)
            if SMOOTH:
                gradient -= smoothing / vocabulary
            if CAPPED:
                gradient *= 1 - (x / cap) * (x / cap)
            gradient = tl.where((at < vocabulary) & has_target, gradient, 0.0)
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), mask=at < width)


@triton.jit
def _capped(x, cap, CAPPED: tl.constexpr):
    """Returns cap * tanh(x / cap) if the logits are capped."""
    if CAPPED:
        x = cap * (2 / (1 + tl.exp(-2 * x / cap)) - 1)
    return x


@torch.library.custom_op("everyformer::cross_entropy_", mutates_args={"logits"})
def cross_entropy_(
    logits: Tensor, target: Tensor, vocabulary: int, smoothing: float, soft_cap: float | None, needs_gradient: bool
) -> Tensor:
    """Returns the loss of each row in float32, and replaces the logits by its gradient if that is needed.

    Rows may be wider than the vocabulary. A negative target has no loss and no gradient.
    """
    rows, width = logits.shape
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    _program[(rows,)](
        logits, target, loss, vocabulary, width, smoothing, soft_cap or 1.0,
        SMOOTH=smoothing > 0, CAPPED=soft_cap is not None, GRADIENT=needs_gradient,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
    )  # fmt: skip
    return loss


@cross_entropy_.register_fake
def _(
    logits: Tensor, target: Tensor, vocabulary: int, smoothing: float, soft_cap: float | None, needs_gradient: bool
) -> Tensor:
    return logits.new_empty(len(logits), dtype=torch.float32)
