"""A recurrent net with adaptive computation time: it takes as many steps on each input as it needs.

Paper: Graves 2016, Adaptive Computation Time for Recurrent Neural Networks. Equations, with S the step of a recurrent cell, the
same weights in every step (halting: network/act.py):
    s_t^n = S(s_(t-1), [x_t; 1]) for n = 1, S(s_t^(n-1), [x_t; 0]) for n > 1        the flag marks a new input
    s_t = sum_n p_t^n s_t^n,  y_t = sum_n p_t^n y_t^n;   cost tau mean_t (N(t) + R(t))
Symbols: `steps` M, `epsilon` eps, `cost` tau, `bias` the initial b_h; `cell` is S: `rnn` s = tanh(W_s s + W_x x + b), or the `lstm` of
network/lstm.py, whose state is h and c. W_y is the output head: it is linear and the p sum to 1, so y_t is that of s_t.
Departures: Weng 2020 (source W) writes x_t + delta for the flag beside x_t, and the cost without brackets and tau. With `lstm`, h_t^n
alone decides about halting and is the output; the mean is taken of h and c. Each layer ponders by itself. The cost is a mean, not
Graves' sum over t.

Steps that no sequence of the batch needs are not computed; a compiled or recorded pass computes all of them. A new net takes
1/sigma(b_h) steps. Padding does not change the state.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.network.act import ActState, Epsilon, HaltingUnit, all_halted, mean_ponder, not_padding, step_weights
from everyformer.network.lstm import RecurrentModule
from everyformer.network.lstm_cell import LstmCell, initial_state
from everyformer.network.scan import Tensors, steps
from everyformer.network.sublayer import Sublayer, SublayerModule
from everyformer.value import NotNegative, Size, Value


class PonderRnn(Sublayer, Value, frozen=True):
    """A recurrent net that takes at most `steps` steps on each input, until it halts. Example: `Layer((PonderRnn(steps=8),))`.

    `cell` is a plain recurrent net or an LSTM; `epsilon`, `cost` and `bias` are those of `Halt`.
    """

    steps: Size
    cell: Literal["rnn", "lstm"] = "lstm"
    epsilon: Epsilon = 0.01
    cost: NotNegative = 0.01
    bias: float = 1.0
    carries: ClassVar[str | None] = "recurrent state"

    def build(self, width: int) -> SublayerModule:
        return RecurrentModule([PonderCell(width, self)])

    def mixes_positions(self) -> bool:
        return True


class RnnCell(nn.Module):
    """S of the plain recurrent net, h_t = tanh(W_h h_(t-1) + W_x x_t + b)."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.hidden = self.state_size = hidden
        self.of_x, self.of_h = nn.Linear(width, hidden), nn.Linear(hidden, hidden, bias=False)

    def step(self, sum_BF: Tensor, state_BC: Tensor) -> Tensor:
        return torch.tanh(sum_BF + self.of_h(state_BC.to(sum_BF.dtype)))  # eq. W5


class PonderCell(nn.Module):
    def __init__(self, width: int, value: PonderRnn):
        super().__init__()
        self.value = value
        self.cell = (
            RnnCell(width + 1, width) if value.cell == "rnn" else LstmCell(width + 1, width, "ifco", "tanh", True, True)
        )
        self.unit = HaltingUnit(width, value.bias)
        self.max_steps = value.steps  # a plan lowers it to the initial number of steps
        self.initial_steps = min(value.steps, math.ceil(1 + math.exp(-max(value.bias, -700.0))))
        self.grows = f"{self.initial_steps} steps on an input, at most {value.steps}"

    def forward(
        self, x_BTD: Tensor, visible_BT: Tensor | None, before_BC: Tensor | None, context: Context, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns h of every position and, with `keep`, their states."""
        state_BC = initial_state(x_BTD, before_BC, self.cell.state_size)
        running_BT, hidden = not_padding(x_BTD, visible_BT), self.cell.hidden
        later_BTF = self.cell.of_x(F.pad(x_BTD, (0, 1)))
        first_BTF = later_BTF + self.cell.of_x.weight[:, -1]  # the flag's part
        halts: list[Tensor] = []  # of each position, if they are probed

        def ponder(state: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
            act, weights = ActState("graves", self.value.epsilon, inputs[2][:, None]), []
            (state_BC,), visible_B1 = state, act.running_BT
            step_BC = state_BC
            for step in range(self.max_steps):
                if step and all_halted(act.running_BT):
                    break
                step_BC = self.cell.step(inputs[min(step, 1)], step_BC)  # eq. W6
                step_B1C = step_BC[:, None]
                halt_B1 = self.unit(step_B1C[..., :hidden].to(x_BTD.dtype))
                weights.append(act.add(halt_B1, step_B1C, step + 1 == self.max_steps))
            mean_B1C, ponder_B1 = act.y_BTD, act.ponder_BT
            assert isinstance(mean_B1C, Tensor) and isinstance(ponder_B1, Tensor)
            if context.call.probe is not None:
                halts.append(step_weights(weights, self.value.steps))
            state_BC = torch.where(visible_B1, mean_B1C[:, 0], state_BC)
            return (state_BC,), (state_BC, ponder_B1[:, 0])

        state_BTC, ponder_BT = steps(ponder, (state_BC,), (first_BTF, later_BTF, running_BT))
        if self.value.cost:
            context.call.losses.append(("ponder", self.value.cost * mean_ponder(ponder_BT, visible_BT)))
        if context.call.probe is not None:
            context.call.probe.halts.append(torch.cat(halts, dim=1))
        return state_BTC[..., :hidden].to(x_BTD.dtype), state_BTC if keep else None
