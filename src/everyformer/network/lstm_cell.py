"""The LSTM cell and the cell of the ablated LSTM: one direction, all positions.

Equations and papers are in network/lstm.py. There are three ways to compute a cell. With kernel="reference", and in a graph of
torch.export, the equations position by position. Otherwise, with tanh, torch's fused LSTM: one call for all positions. It returns
c_t of the last position only; where all are needed, the gates are computed from its h in one product and c by `scan`. The ablated
LSTM is a scan altogether.
Padding does not change the state.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everyformer.attention.context import Context
from everyformer.attention.has_data import is_exporting, is_transformed
from everyformer.network.initial import keep_initialized
from everyformer.network.scan import Tensors, scan, steps

SATURATED = 100.0  # its sigmoid is 1 in every precision


def initial_state(x_BTD: Tensor, before_BC: Tensor | None, size: int) -> Tensor:
    """Returns the state before the first position: that of the cache, or 0."""
    if before_BC is None:
        return x_BTD.new_zeros(x_BTD.shape[0], size)
    if before_BC.shape != (x_BTD.shape[0], size):
        raise ValueError(
            f"the cache has states of the shape {tuple(before_BC.shape)} (batch, width), this layer ({x_BTD.shape[0]}, {size}): it is the "
            "cache of another model; start with Cache()"
        )
    return before_BC


class LstmCell(nn.Module):
    """One direction of one LSTM. `gates` names its maps in order: i, f, c (the candidate), o. A gate without a map is 1."""

    def __init__(self, width: int, hidden: int, gates: str, activation: str, bias: bool, recurrent: bool):
        super().__init__()
        self.gates, self.hidden, self.activation = gates, hidden, torch.tanh if activation == "tanh" else torch.sigmoid
        self.state_size = hidden * (2 if recurrent else 1)
        self.fuses = recurrent and activation == "tanh"
        self.of_x = nn.Linear(width, len(gates) * hidden, bias=bias)
        self.of_h = nn.Linear(hidden, len(gates) * hidden, bias=False) if recurrent else None
        if bias and "f" in gates:
            with torch.no_grad():
                self.of_x.bias.view(len(gates), hidden)[gates.index("f")] = 1.0
            keep_initialized(self.of_x.bias)

    def forward(
        self, x_BTD: Tensor, visible_BT: Tensor | None, before_BC: Tensor | None, context: Context, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns h of every position and, with `keep`, their states [h; c] (c alone if ablated), or the last state alone."""
        h_BD, c_BD = self._split(initial_state(x_BTD, before_BC, self.state_size))
        step_by_step = context.call.kernel == "reference" or is_exporting()
        step_by_step = step_by_step or x_BTD.shape[1] == 1 or (self.fuses and is_transformed())
        if step_by_step or (self.of_h is not None and not self.fuses):
            h_BTD, c_BTD = self._steps(x_BTD, visible_BT, h_BD, c_BD)
        elif self.of_h is None:
            h_BTD, c_BTD = None, self._scanned(x_BTD, visible_BT, None, c_BD)
        else:
            h_BTD, last = self._fused(x_BTD, visible_BT, h_BD, c_BD)
            if not keep or (self.training and visible_BT is None):
                c_BTD = last[:, None]  # the other states are not needed
            else:
                c_BTD = self._scanned(x_BTD, visible_BT, torch.cat((h_BD[:, None], h_BTD[:, :-1]), dim=1), c_BD)
        if h_BTD is None:
            h_BTD = self.activation(c_BTD).to(x_BTD.dtype)
        if context.call.probe is not None:
            before_BTD = torch.cat((h_BD[:, None].to(h_BTD.dtype), h_BTD[:, :-1]), dim=1)
            context.call.probe.state_weights.append(self._weights(x_BTD, visible_BT, before_BTD))
            context.call.probe.cell_gates.append(self._named_gates(x_BTD, before_BTD))
        if not keep:
            return h_BTD, None
        return h_BTD, c_BTD if self.of_h is None else torch.cat((h_BTD[:, -c_BTD.shape[1] :], c_BTD), dim=-1)

    def step(self, sum_BF: Tensor, state_BC: Tensor) -> Tensor:
        """Returns the state [h; c] after one more step, given the input's part of the gates."""
        h_BD, c_BD = self._step(sum_BF, *self._split(state_BC))
        return torch.cat((h_BD, c_BD), dim=-1)

    def _split(self, state_BC: Tensor) -> tuple[Tensor, Tensor]:
        return state_BC[:, : self.hidden], state_BC[:, -self.hidden :]

    def _gates(self, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns i, f, c~ and o. The state accumulates over many positions, so it is kept in float32 or better."""
        maps = dict(zip(self.gates, total.unflatten(-1, (len(self.gates), self.hidden)).unbind(-2), strict=True))
        one = torch.ones_like(maps["c"])
        i, f, o = (torch.sigmoid(maps[name]) if name in maps else one for name in "ifo")  # eq. T14, T15, T17, T20
        exact = torch.promote_types(total.dtype, torch.float32)
        return i.to(exact), f.to(exact), self.activation(maps["c"]).to(exact), o  # eq. T13, T20

    def _steps(self, x_BTD: Tensor, visible_BT: Tensor | None, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        """The equations, position by position."""

        def step(state: Tensors, inputs: Tensors) -> tuple[Tensors, Tensors]:
            h_BD, c_BD = state
            next_state: Tensors = self._step(inputs[0], h_BD, c_BD)
            if visible_BT is not None:
                pairs = zip(next_state, state, strict=True)
                next_state = tuple(torch.where(inputs[1][:, None], new, old) for new, old in pairs)
            return next_state, next_state

        sum_BTF = self.of_x(x_BTD)
        h_BTD, c_BTD = steps(step, (h_BD, c_BD), (sum_BTF,) if visible_BT is None else (sum_BTF, visible_BT))
        return h_BTD, c_BTD

    def _step(self, sum_BF: Tensor, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        recurrent = sum_BF if self.of_h is None else sum_BF + self.of_h(h_BD.to(sum_BF.dtype))
        i_BD, f_BD, new_BD, o_BD = self._gates(recurrent)
        next_BD = i_BD * new_BD + f_BD * c_BD  # eq. T16, T21
        return (o_BD * self.activation(next_BD)).to(sum_BF.dtype), next_BD  # eq. T18, T21

    def _fused(self, x_BTD: Tensor, visible_BT: Tensor | None, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns h of every position, and c after the last. Padding is moved to the end, and h is gathered from there."""
        if visible_BT is None:
            return self._call(x_BTD, h_BD, c_BD)
        order_BT1 = (~visible_BT).to(torch.uint8).argsort(dim=1, stable=True)[..., None]
        packed_BTD, c_BD = self._call(x_BTD.gather(1, order_BT1.expand_as(x_BTD)), h_BD, c_BD)
        # h after 0, 1, 2, ... visible tokens
        h_after_BSD = torch.cat((h_BD[:, None].to(packed_BTD.dtype), packed_BTD), dim=1)
        return h_after_BSD.gather(1, visible_BT.cumsum(1)[..., None].expand_as(packed_BTD)), c_BD

    def _call(self, x_BTD: Tensor, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        assert self.of_h is not None
        maps, biases = [self.of_x.weight, self.of_h.weight], []
        if self.of_x.bias is not None or "f" not in self.gates:
            bias = (
                self.of_x.weight.new_zeros(len(self.gates) * self.hidden) if self.of_x.bias is None else self.of_x.bias
            )
            biases = [bias, torch.zeros_like(bias)]
        if "f" not in self.gates:  # a forget gate of 1
            maps = [
                torch.cat((one[: self.hidden], torch.zeros_like(one[: self.hidden]), one[self.hidden :]))
                for one in maps
            ]
            biases = [
                torch.cat((one[: self.hidden], torch.full_like(one[: self.hidden], full), one[self.hidden :]))
                for one, full in zip(biases, (SATURATED, 0.0), strict=True)
            ]
        # cuDNN requires the weights in one block of memory, in this order.
        flat = torch.cat([one.flatten() for one in (*maps, *biases)])
        sizes = [one.numel() for one in (*maps, *biases)]
        weights = [part.view_as(one) for part, one in zip(flat.split(sizes), (*maps, *biases), strict=True)]
        state = (h_BD.to(x_BTD.dtype)[None].contiguous(), c_BD.to(x_BTD.dtype)[None].contiguous())
        training = torch.is_grad_enabled()  # torch keeps what the backward pass needs only in training mode
        h_BTD, _, c_1BD = torch.lstm(x_BTD, state, weights, len(biases) > 0, 1, 0.0, training, False, True)
        return h_BTD, c_1BD[0]

    def _input_gates(
        self, x_BTD: Tensor, visible_BT: Tensor | None, before_BTD: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns i, f and c~ of every position from the h before it. At padding i is 0 and f is 1: the state stays."""
        sum_BTF = self.of_x(x_BTD)
        if self.of_h is not None:
            assert before_BTD is not None
            sum_BTF = sum_BTF + self.of_h(before_BTD.to(x_BTD.dtype))
        i_BTD, f_BTD, new_BTD, _ = self._gates(sum_BTF)
        if visible_BT is not None:
            i_BTD, f_BTD = i_BTD * visible_BT[..., None], f_BTD.masked_fill(~visible_BT[..., None], 1.0)
        return i_BTD, f_BTD, new_BTD

    def _scanned(self, x_BTD: Tensor, visible_BT: Tensor | None, before_BTD: Tensor | None, c_BD: Tensor) -> Tensor:
        i_BTD, f_BTD, new_BTD = self._input_gates(x_BTD, visible_BT, before_BTD)
        add_BTD = i_BTD * new_BTD
        first_B1D = add_BTD[:, :1] + f_BTD[:, :1] * c_BD[:, None].to(add_BTD.dtype)
        return scan(f_BTD, torch.cat((first_B1D, add_BTD[:, 1:]), dim=1))  # eq. T19

    def _named_gates(self, x_BTD: Tensor, before_BTD: Tensor) -> dict[str, Tensor]:
        """Returns the gates that have a map, from the h before each position."""
        sum_BTF = self.of_x(x_BTD) if self.of_h is None else self.of_x(x_BTD) + self.of_h(before_BTD.to(x_BTD.dtype))
        i_BTD, f_BTD, _, o_BTD = self._gates(sum_BTF.detach())
        named = {"input": i_BTD, "forget": f_BTD, "output": o_BTD}
        return {name: gate_BTD for name, gate_BTD in named.items() if name[0] in self.gates}

    def _weights(self, x_BTD: Tensor, visible_BT: Tensor | None, before_BTD: Tensor) -> Tensor:
        """Returns w_{t,s} of each feature of the state as B, D, Q, K: a scan over one-hot positions scaled by i."""
        i_BTD, f_BTD, _ = self._input_gates(x_BTD, visible_BT, before_BTD)
        own_BDQK = torch.diag_embed(i_BTD.transpose(1, 2))  # eq. T18a
        weights_BQDK = scan(f_BTD[..., None].expand(*f_BTD.shape, f_BTD.shape[1]), own_BDQK.transpose(1, 2))
        return weights_BQDK.transpose(1, 2)
