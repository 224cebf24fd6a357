"""Adaptive computation time: how often a step is repeated, for each position by itself.

Paper: Graves 2016, Adaptive Computation Time for Recurrent Neural Networks. Equations, with s^n the state after step n:
    h^n = sigma(W_h s^n + b_h),  N = min(min{n: sum_(m<=n) h^m >= 1 - eps}, M),  R = 1 - sum_(n<N) h^n
    p^n = h^n for n < N, R for n = N;   y = sum_n p^n s^n;   cost tau mean_i (N_i + R_i)
The weights p sum to 1. N has no gradient: the cost is trained through R.
Mode `t2t` is what tensor2tensor's code does (act_type "basic"): y <- p^n s^n + (1 - p^n) y, whose weights do not sum to 1, and there
is no remainder at the limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import torch
from torch import Tensor, nn

from everyformer.attention.has_data import can_read

Mode = Literal["graves", "freeze", "t2t"]
Epsilon = Annotated[float, msgspec.Meta(gt=0, lt=1)]


class HaltingUnit(nn.Module):
    """h = sigma(W_h s + b_h), in float32 or better, because many of them are summed."""

    def __init__(self, width: int, bias: float):
        super().__init__()
        self.map = nn.Linear(width, 1, bias=False)
        self.bias = nn.Parameter(torch.tensor([bias]))  # one number, not a scalar: FSDP does not shard scalars

    def forward(self, x_BTD: Tensor) -> Tensor:
        a_BT: Tensor = (self.map(x_BTD) + self.bias).squeeze(-1)
        return a_BT.to(torch.promote_types(a_BT.dtype, torch.float32)).sigmoid()  # eq. W7


@dataclass
class ActState:
    """The state of halting after some steps. Padding never runs."""

    mode: Mode
    epsilon: float
    running_BT: Tensor  # True where a position has not halted
    halted_sum_BT: Tensor | float = 0.0  # the sum of h so far
    ponder_BT: Tensor | float = 0.0  # N + R so far
    y_BTD: Tensor | float = 0.0

    def add(self, h_BT: Tensor, s_BTD: Tensor, last: bool) -> Tensor:
        """Adds one step and returns its weights."""
        total_BT, t2t = self.halted_sum_BT + h_BT, self.mode == "t2t"
        enough_BT = total_BT > 1 - self.epsilon if t2t else total_BT >= 1 - self.epsilon
        halts_BT = self.running_BT & enough_BT if t2t or not last else self.running_BT
        remainder_BT = 1 - self.halted_sum_BT + torch.zeros_like(h_BT)
        weight_BT = torch.where(halts_BT, remainder_BT, h_BT).where(self.running_BT, 0.0)  # eq. W8
        self.ponder_BT = self.ponder_BT + self.running_BT + remainder_BT.where(halts_BT, 0.0)  # eq. W10
        self.running_BT = self.running_BT & ~halts_BT
        self.halted_sum_BT = self.halted_sum_BT + h_BT.where(self.running_BT, 0.0)
        kept_BTD = self.y_BTD * (1 - weight_BT[..., None]) if t2t else self.y_BTD
        self.y_BTD = kept_BTD + weight_BT[..., None] * s_BTD  # eq. W9
        return weight_BT


def not_padding(x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
    """Returns True for each position that is not padding."""
    every_BT = torch.ones(x_BTD.shape[:2], dtype=torch.bool, device=x_BTD.device)
    return every_BT if visible_BT is None else every_BT & visible_BT


def mean_ponder(ponder_BT: Tensor, visible_BT: Tensor | None) -> Tensor:
    """The mean over positions that are not padding, where the cost of padding is 0."""
    return ponder_BT.sum() / (ponder_BT.numel() if visible_BT is None else visible_BT.expand_as(ponder_BT).sum())


def all_halted(running_BT: Tensor) -> bool:
    """Whether every position has halted. False where the data cannot be read."""
    return can_read(running_BT) and not bool(running_BT.any())


def step_weights(weights: list[Tensor], steps: int, mode: Mode = "graves") -> Tensor:
    """The weight of each step in the output: B, T, steps."""
    rest_BT = torch.ones_like(weights[0])
    shares: list[Tensor] = []
    for weight_BT in reversed(weights):
        shares.append(weight_BT * rest_BT)
        rest_BT = rest_BT * (1 - weight_BT) if mode == "t2t" else rest_BT
    not_computed = [torch.zeros_like(rest_BT)] * (steps - len(shares))
    return torch.stack([*reversed(shares), *not_computed], dim=-1)
