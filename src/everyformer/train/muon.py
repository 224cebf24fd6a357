"""Muon that orthogonalizes all matrices of one shape at once. Paper: Jordan et al. 2024.

    B <- mu B + (1 - mu) g,   O = NS((1 - mu) g + mu B),   w <- w (1 - lr decay) - lr max(1, rows / columns)^(1/2) O

NS is PyTorch's five steps X <- a X + (b X X^T + c (X X^T)^2) X, in bfloat16, from X scaled to norm 1. A small matrix product leaves a
device mostly idle, and the products of equal shapes are one batched product. Maps that are stacked in one matrix, such as those to
queries, keys and values, are orthogonalized each by itself, as in the published code.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class BatchedMuon(torch.optim.Muon):
    """`torch.optim.Muon` with one batch of products for each shape. Its state is the same.

    `stacked` has the numbers of rows of the maps of a weight, if they are several. Sharded weights are updated one by one, with all
    their maps together. As in PyTorch's fused AdamW, a step with the attribute `found_inf` at 1 changes nothing, and only a sharded
    one reads it.
    """

    found_inf: Tensor | None = None

    def __init__(self, params: Iterable[Tensor], stacked: Mapping[Tensor, Sequence[int]] | None = None, **options: Any):
        super().__init__(params, **options)
        self.stacked = stacked or {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if any(hasattr(weight, "full_tensor") for group in self.param_groups for weight in group["params"]):
            skips = self.found_inf is not None and bool(self.found_inf)
            return None if skips else super().step(closure)  # type: ignore[no-untyped-call]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            shapes: dict[tuple[Any, ...], list[tuple[Tensor, Tensor, Tensor]]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    for part in self._maps(weight):
                        shapes[*part[0].shape, weight.device, weight.dtype].append(part)
            for parts in shapes.values():
                self._update(parts, group)
        return loss

    def _maps(self, weight: Tensor) -> Iterable[tuple[Tensor, Tensor, Tensor]]:
        """The maps of a weight, each with its gradient and its momentum."""
        state, rows = self.state[weight], list(self.stacked.get(weight, (len(weight),)))
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        assert weight.grad is not None
        return zip(*(x.detach().split(rows) for x in (weight, weight.grad, state["momentum_buffer"])), strict=True)

    def _update(self, parts: list[tuple[Tensor, Tensor, Tensor]], group: dict[str, Any]) -> None:
        """Update the maps of one shape."""
        weights, gradients, buffers = (list(some) for some in zip(*parts, strict=True))
        buffer_NRC, gradient_NRC = torch.stack(buffers), torch.stack(gradients)
        lr = group["lr"]
        if self.found_inf is not None:  # then the gradient is the buffer, which keeps it, and the learning rate 0
            gradient_NRC = torch.where(self.found_inf > 0, buffer_NRC, gradient_NRC)
            lr = lr * (1 - self.found_inf.double())
        buffer_NRC.lerp_(gradient_NRC, 1 - group["momentum"])
        torch._foreach_copy_(buffers, list(buffer_NRC.unbind()))
        update_NRC = gradient_NRC.lerp_(buffer_NRC, group["momentum"])
        update_NRC = orthogonalized(update_NRC, group["ns_coefficients"], group["ns_steps"], group["eps"])
        rows, columns = weights[0].shape
        keep, factor = 1 - lr * group["weight_decay"], -lr * math.sqrt(max(1, rows / columns))
        torch._foreach_mul_(weights, keep.to(weights[0]) if isinstance(keep, Tensor) else keep)
        torch._foreach_add_(weights, list((update_NRC.to(weights[0].dtype) * factor).unbind()))


def orthogonalized(x_NRC: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Returns matrices with the singular vectors of the given ones and singular values near 1, in bfloat16."""
    a, b, c = coefficients
    is_tall = x_NRC.shape[1] > x_NRC.shape[2]
    x = (x_NRC.mT if is_tall else x_NRC).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
