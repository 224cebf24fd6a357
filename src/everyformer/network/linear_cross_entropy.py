"""The cross-entropy of a linear map of vectors, without the logits of all vectors in memory.

    l_n = W h_n + b                                       the logits of vector h_n; c tanh(l_n / c) with a soft cap c
    L = sum_n -sum_v q_nv log softmax(l_n)_v              q_nv = (1 - s) [v = t_n] + s / V
    dL/dl_n = softmax(l_n) - q_n                          times 1 - (l_n / c)^2 of the capped logits with a soft cap

with the target t_n (none if it is negative) and the label smoothing s. A language model of width 768 and a vocabulary of 50,257
stores 65 numbers of logits for each number of its last layer, and their gradients. Here the vectors are taken in chunks: the
gradients of a chunk follow from its logits at once, so the forward pass adds them up and drops the logits. The backward pass only
multiplies by the gradient of L. To keep the vectors and compute the logits again in the backward pass takes a third more time
(docs/results/training_step.md). On a GPU a large vocabulary is padded to a multiple of MULTIPLE, because matrix products of odd sizes take
slow kernels there, and a Triton program (cross_entropy_program.py) turns the logits into their gradients.

There are no second derivatives. Under `torch.compile` the chunks are part of the graph.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from everyformer.attention.has_data import can_read

CHUNK, CHUNK_ON_CPU = 2**26, 2**23  # logits that are in memory at once: 256 and 32 MiB in float32
CHUNK_OF_PROGRAM = 2**28  # with the program, which needs no second copy: 512 MiB in half precision
HAS_TRITON = find_spec("triton") is not None
LARGE, MULTIPLE = 4096, 64  # a vocabulary from which on the program is used, and of what it is made a multiple
NO_TARGET = -100  # a target of a vector without a loss, as any negative one
PARTS = 4  # vectors without a target are left out in whole quarters, so that steps cost the same


@dataclass(frozen=True)
class LogitMap:
    """Logits that are not computed yet: a linear map of vectors. Example: `network(x, probe=Probe(logits=False)).logits.logits()`."""

    hidden: Tensor  # ..., D
    weight_VD: Tensor
    bias_V: Tensor | None = None
    soft_cap: float | None = None

    def logits(self) -> Tensor:
        """Returns the logits ..., V."""
        return self.capped(F.linear(self.hidden, self.weight_VD, self.bias_V))  # eq. T9, K6g

    def capped(self, logits: Tensor) -> Tensor:
        """Returns the output of the linear map within the soft cap, if there is one."""
        return logits if self.soft_cap is None else self.soft_cap * (logits / self.soft_cap).tanh()

    def losses(self, target: Tensor) -> Tensor:
        """Returns -log p(target) of each vector, in float32 at least, without gradients. The logits are computed in chunks."""
        hidden_ND, target_N = self.hidden.flatten(0, -2), target.flatten()
        pieces = (x.split(chunk_rows(len(self.weight_VD), target.device)) for x in (hidden_ND, target_N))
        with torch.no_grad():
            losses = [_losses(replace(self, hidden=h).logits(), t) for h, t in zip(*pieces, strict=True)]
        return torch.cat(losses).view(target.shape)

    def cross_entropy(self, target: Tensor, smoothing: float = 0.0) -> Tensor:
        """Returns the sum of -log p(target) over the vectors whose target is not negative, in chunks."""
        hidden_ND, target_N = self.hidden.flatten(0, -2), target.flatten()
        if target_N.device.type == "cpu" and can_read(target_N):
            step = -(-len(target_N) // PARTS)
            rows = -(-int((target_N >= 0).sum()) // step) * step
            if rows < len(target_N):
                index_N = (target_N < 0).to(torch.int8).argsort(stable=True)[:rows]
                hidden_ND, target_N = hidden_ND[index_N], target_N[index_N]
        total: Tensor = LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden_ND, self.weight_VD, self.bias_V, target_N, smoothing, self.soft_cap
        )
        return total


def cross_entropy(logits: Tensor | LogitMap, target: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the sum of -log p(target) over the targets that are not negative: of logits ..., V, or in chunks of a `LogitMap`."""
    if isinstance(logits, LogitMap):
        return logits.cross_entropy(target, smoothing)
    logits_NV = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
    target_N = target.flatten()
    target_N = torch.where(target_N < 0, NO_TARGET, target_N)
    return F.cross_entropy(logits_NV, target_N, reduction="sum", ignore_index=NO_TARGET, label_smoothing=smoothing)


def _losses(logits_NV: Tensor, target_N: Tensor) -> Tensor:
    exact = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(exact), target_N, reduction="none")


def chunk_rows(vocabulary: int, device: torch.device, has_program: bool = False) -> int:
    """Returns the number of vectors whose logits are in memory at once."""
    chunk = CHUNK_OF_PROGRAM if has_program else CHUNK_ON_CPU if device.type == "cpu" else CHUNK
    return max(1, chunk // vocabulary)


def uses_program(vocabulary: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the Triton program computes the loss: of a large vocabulary in half precision on a GPU."""
    is_half = dtype in (torch.bfloat16, torch.float16)
    return device.type == "cuda" and is_half and vocabulary >= LARGE and HAS_TRITON


class LinearCrossEntropy(torch.autograd.Function):
    """The loss L of hidden N, D; weight V, D; bias V or None; target N."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        target: Tensor,
        smoothing: float,
        soft_cap: float | None,
    ) -> Tensor:
        ctx.needs = ctx.needs_input_grad[:3]
        device, exact = hidden.device, torch.promote_types(weight.dtype, torch.float32)
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device.type):
            dtype = torch.get_autocast_dtype(device.type)
        w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
        vocabulary, has_program = len(weight), uses_program(len(weight), dtype, device)
        if has_program and vocabulary % MULTIPLE:
            missing = -vocabulary % MULTIPLE
            w, b = F.pad(w, (0, 0, 0, missing)), None if b is None else F.pad(b, (0, missing))
        losses: list[Tensor] = []
        hidden_gradients: list[Tensor] = []
        weight_gradient = bias_gradient = None
        rows = chunk_rows(vocabulary, device, has_program)
        for h, t in zip(*(x.split(rows) for x in (hidden, target)), strict=True):
            h = h.to(dtype)
            loss, gradient = _chunk(F.linear(h, w, b), t, vocabulary, exact, smoothing, soft_cap, any(ctx.needs))
            losses.append(loss)
            if ctx.needs[0]:
                hidden_gradients.append((gradient.to(dtype) @ w).to(hidden.dtype))
            if ctx.needs[1]:
                weight_gradient = _add(weight_gradient, gradient.to(dtype).T, h, weight.dtype)
            if ctx.needs[2]:
                of_chunk = gradient.sum(0, dtype=exact)
                bias_gradient = of_chunk if bias_gradient is None else bias_gradient + of_chunk
        weight_gradient = None if weight_gradient is None else weight_gradient[:vocabulary]
        bias_gradient = None if bias_gradient is None else bias_gradient[:vocabulary]
        hidden_gradient = torch.cat(hidden_gradients) if len(hidden_gradients) > 1 else (*hidden_gradients, None)[0]
        if bias_gradient is not None and bias is not None:
            bias_gradient = bias_gradient.to(bias.dtype)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scaled = (None if x is None else x * gradient.to(x.dtype) for x in ctx.saved_tensors)
        return *scaled, None, None, None


def _chunk(
    logits: Tensor,
    target: Tensor,
    vocabulary: int,
    exact: torch.dtype,
    smoothing: float,
    soft_cap: float | None,
    needs_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Returns the loss of a chunk and the gradient of its logits, which overwrites the logits where that saves memory."""
    if uses_program(vocabulary, logits.dtype, logits.device):
        from everyformer.network.cross_entropy_program import cross_entropy_

        loss_N = cross_entropy_(logits, target, vocabulary, smoothing, soft_cap, needs_gradient)
        return loss_N.sum(), logits
    to_capped = None
    if soft_cap is not None:
        squashed = (logits / soft_cap).tanh()
        logits, to_capped = soft_cap * squashed, 1 - squashed.square()
    log_p, has_target = torch.log_softmax(logits.to(exact), -1), (target >= 0)[:, None]
    index = target.clamp(min=0)[:, None]
    loss = -(1 - smoothing) * log_p.gather(1, index)
    if smoothing:
        loss = loss - smoothing * log_p.mean(1, keepdim=True)
    loss = loss.masked_fill(~has_target, 0).sum()
    if not needs_gradient:
        return loss, loss
    gradient = log_p.exp_()
    gradient.scatter_add_(1, index, gradient.new_full((1, 1), smoothing - 1).expand_as(index))
    if smoothing:
        gradient -= smoothing / logits.shape[1]
    gradient.masked_fill_(~has_target, 0)
    return loss, gradient if to_capped is None else gradient.mul_(to_capped)


def _add(total: Tensor | None, gradient_VN: Tensor, h_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the sum of the weights' gradients, in the dtype of the weights: bfloat16 would lose small chunks."""
    if total is None:
        return (gradient_VN @ h_ND).to(dtype)
    return total.addmm_(gradient_VN, h_ND) if h_ND.dtype == dtype else total.add_(gradient_VN @ h_ND)
