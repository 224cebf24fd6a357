"""A recurrent net that ponders: it takes as many steps on each input as it finds necessary.

Paper: Graves 2016, Adaptive Computation Time for Recurrent Neural Networks. Equations, with S the step of a recurrent cell, the
same weights in all of them:
    s_t^n = S(s_(t-1), [x_t; 1]) for n = 1, S(s_t^(n-1), [x_t; 0]) for n > 1        the flag says that the input is new
    h_t^n = sigma(W_h s_t^n + b_h),  N(t) = min(min{n: sum_(m<=n) h_t^m >= 1 - eps}, M),  R(t) = 1 - sum_(n<N(t)) h_t^n
    p_t^n = h_t^n for n < N(t), R(t) for n = N(t);   s_t = sum_n p_t^n s_t^n,  y_t = sum_n p_t^n y_t^n;   cost tau mean_t (N(t) + R(t))
Symbols: `steps` M, `rest` eps, `cost` tau, `bias` b_h at the start; `cell` is S: `rnn` s = tanh(W_s s + W_x x + b), or the `lstm` of
`everyformer.network.recurrent`, whose state is h and c. W_y is the head's: it is linear and the p sum to 1, so y_t is of s_t.
Departures: W writes x_t + delta, which is the flag put beside x_t, and the cost without brackets and tau. Of the lstm h_t^n alone
halts and answers, the mean is of h and c. In several layers each ponders by itself. The cost is a mean, not Graves' sum over t.

Steps that no sequence of the batch needs are not computed; a compiled or a recorded pass computes all of them.
A new net takes 1/sigma(b_h) steps. A position that is padding changes nothing of the state.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.network.depth import Depth, Layer, StackLayers
from everyformer.network.halting import ActState, Epsilon, HaltingUnit, mean, none, real, shares
from everyformer.network.recurrent import Cell, RecurrentLayer, begin
from everyformer.network.residual import NoResidual, Residual
from everyformer.value import NotNegative, Size, Value


class Ponder(Depth, Value, frozen=True):
    """Recurrent layers that take at most `steps` on each input, until they halt (ACT)."""

    layers: Size
    steps: Size
    residual: Residual = NoResidual()
    cell: Literal["rnn", "lstm"] = "lstm"
    epsilon: Epsilon = 0.01
    cost: NotNegative = 0.01
    bias: float = 1.0  # above 0: few steps at first
    each: ClassVar[tuple[Layer, ...]] = ()  # type: ignore[misc]

    def build(self, width: int) -> nn.Module:
        layers = [RecurrentLayer([PonderCell(width, self)], self.residual.step(width)) for _ in range(self.layers)]
        return StackLayers(layers, self.residual.ends(width))

    def is_causal(self) -> bool:
        return True


class Plain(nn.Module):
    """S of the plain recurrent net, h_t = tanh(W_h h_(t-1) + W_x x_t + b)."""

    def __init__(self, width: int, own: int):
        super().__init__()
        self.own = self.size = own
        self.of_x, self.of_h = nn.Linear(width, own), nn.Linear(own, own, bias=False)

    def after(self, sum_BF: Tensor, state_BC: Tensor) -> Tensor:
        return torch.tanh(sum_BF + self.of_h(state_BC.to(sum_BF.dtype)))


class PonderCell(nn.Module):
    def __init__(self, width: int, value: Ponder):
        super().__init__()
        self.value = value
        self.cell = (
            Plain(width + 1, width) if value.cell == "rnn" else Cell(width + 1, width, "ifco", "tanh", True, True)
        )
        self.unit = HaltingUnit(width, value.bias)
        self.max_steps = value.steps  # a plan lowers it to the initial number of steps
        self.initial_steps = min(value.steps, math.ceil(1 + math.exp(-max(value.bias, -700.0))))
        self.grows = f"{self.initial_steps} steps on an input, at most {value.steps}"

    def forward(
        self, x_BTD: Tensor, visible_BT: Tensor | None, before_BC: Tensor | None, context: Context, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """h of every position, and where `keep` says so the states of them."""
        state_BC = begin(x_BTD, before_BC, self.cell.size)
        runs_BT, own = real(x_BTD, visible_BT), self.cell.own
        later_BTF = self.cell.of_x(F.pad(x_BTD, (0, 1)))
        first_BTF = later_BTF + self.cell.of_x.weight[:, -1]  # what the flag adds
        states, ponders, halts = [], [], []
        for time, inputs in enumerate(zip(first_BTF.unbind(1), later_BTF.unbind(1), strict=True)):
            account, weights = ActState("graves", self.value.epsilon, runs_BT[:, time, None]), []
            now_BC, seen_B1 = state_BC, account.runs_BT
            for step in range(self.max_steps):
                if step and none(account.runs_BT):
                    break
                now_BC = self.cell.after(inputs[min(step, 1)], now_BC)
                now_B1C = now_BC[:, None]
                halt_B1 = self.unit(now_B1C[..., :own].to(x_BTD.dtype))
                weights.append(account.add(halt_B1, now_B1C, step + 1 == self.max_steps))
            mean_B1C, ponder_B1 = account.y_BTD, account.ponder_BT
            assert isinstance(mean_B1C, Tensor) and isinstance(ponder_B1, Tensor)
            state_BC = torch.where(seen_B1, mean_B1C[:, 0], state_BC)
            states.append(state_BC)
            ponders.append(ponder_B1)
            halts.append(weights)
        if self.value.cost:
            context.call.losses.append(("ponder", self.value.cost * mean(torch.cat(ponders, dim=1), visible_BT)))
        if context.call.probe is not None:
            context.call.probe.halts.append(torch.cat([shares(one, self.value.steps) for one in halts], dim=1))
        state_BTC = torch.stack(states, dim=1)
        return state_BTC[..., :own].to(x_BTD.dtype), state_BTC if keep else None
