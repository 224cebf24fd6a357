"""The LSTM and the ablated LSTM as sublayers.

Papers: Hochreiter & Schmidhuber 1997; Gers et al. 1999 (the forget gate); Levy et al. 2018 (the ablation).
Equations: Thickstun (source T), 13-21:
    c~_t = act(W_ch h_{t-1} + W_cx x_t)          i_t, f_t, o_t = sigma(W_h h_{t-1} + W_x x_t), each with its own maps
    c_t  = i_t c~_t + f_t c_{t-1}                h_t = o_t act(c_t)
The ablated LSTM has no h_{t-1} in these equations and no o_t. In both, eq. 19,
    c_t = sum_{s <= t} w_{t,s} c~_s              w_{t,s} = i_s prod_{k = s+1 .. t} f_k,
so w is to each feature of the state what attention weights are to a head. A probe records it.
Symbols: width d; `activation` is source T's sigma or the usual tanh; `forget=False` is the LSTM of 1997, f_t = 1.
Departures: eq. 17 of source T is garbled; it is the output gate. It states w_{t,r} <= w_{t,s} for r < s, which holds for the product
of the f only, since i_s is free. It has no biases (`bias=False`); with biases, that of f is initialized to 1 (Gers et al.;
Jozefowicz et al. 2015), so that a new net remembers. In a `bidirectional` layer each direction has half the width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from everyformer.attention.context import Context
from everyformer.network.cache import Entry, RecurrentState
from everyformer.network.lstm_cell import LstmCell
from everyformer.network.sublayer import Sublayer, SublayerModule
from everyformer.value import Value

Activation = Literal["tanh", "sigmoid"]


class _Recurrent(Sublayer, Value, frozen=True):
    """What the two LSTMs have in common. It is not a sublayer itself."""

    activation: Activation = "tanh"
    bias: bool = True
    bidirectional: bool = False
    carries: ClassVar[str | None] = "recurrent state"

    def mixes_positions(self) -> bool:
        return True

    def attends_to_future(self) -> bool:
        return self.bidirectional

    def illegal_reasons(self, width: int) -> Iterator[str]:
        if self.bidirectional and width % 2:
            yield f"each of two directions has half the width, but the width is {width}; make it even, or leave bidirectional out"

    def module(self, width: int, gates: str, recurrent: bool) -> RecurrentModule:
        directions = 2 if self.bidirectional else 1
        return RecurrentModule(
            LstmCell(width, width // directions, gates, self.activation, self.bias, recurrent)
            for _ in range(directions)
        )


class Lstm(_Recurrent, frozen=True):
    """A long short-term memory. Example: `Layer((Lstm(), FeedForward(256)))`.

    activation      of the candidate and of the state, tanh or sigmoid (as source T writes it)
    bias            whether the gates and the candidate have biases
    bidirectional   whether a second cell reads from the end, so that outputs depend on later positions
    forget          whether there is a forget gate (Gers et al. 1999)
    """

    forget: bool = True

    def build(self, width: int) -> RecurrentModule:
        return self.module(width, "ifco" if self.forget else "ico", recurrent=True)


class AblatedLstm(_Recurrent, frozen=True):
    """An LSTM whose gates and candidate do not read the previous output (Levy et al. 2018).

    `activation`, `bias` and `bidirectional` are those of `Lstm`. Example: `Layer((AblatedLstm(), FeedForward(256)))`.
    """

    def build(self, width: int) -> RecurrentModule:
        return self.module(width, "ifc", recurrent=False)


class RecurrentModule(SublayerModule):
    """One cell, or two that read in opposite directions."""

    def __init__(self, cells: Iterator[nn.Module] | Sequence[nn.Module]):
        super().__init__()
        self.cells = nn.ModuleList(cells)

    def new_entry(self, segment_memory: bool = False) -> Entry:
        return RecurrentState(detached=segment_memory)

    def max_distance(self) -> int | None:
        return 1  # the last state holds everything before it

    def forward(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> tuple[Tensor, Entry | None]:
        if entry is not None and not isinstance(entry, RecurrentState):
            raise ValueError(
                "the cache entry is not that of a recurrent net: it is the cache of another model; start with Cache()"
            )
        if entry is not None and len(self.cells) > 1:
            raise ValueError(
                "a bidirectional layer needs its whole sequence in one call; call the network without cache="
            )
        last_BC = None if entry is None else entry.last_BC
        probe = context.call.probe
        if last_BC is not None and probe is not None:
            raise ValueError("the weights of cached positions cannot be told apart; probe a call without cache=")
        visible_BT = context.positions.visible_BQ()
        if visible_BT is not None:
            visible_BT = visible_BT.expand(x_BTD.shape[:2])
        h_BTD, state_BTC = self.cells[0](x_BTD, visible_BT, last_BC, context, entry is not None)
        if len(self.cells) > 1:
            h_BTD = self._backward_direction(x_BTD, visible_BT, context, h_BTD)
        if entry is None or state_BTC is None:
            return h_BTD, None
        return h_BTD, entry.append(state_BTC, every_position=state_BTC.shape[1] == x_BTD.shape[1])

    def _backward_direction(self, x_BTD: Tensor, visible_BT: Tensor | None, context: Context, h_BTD: Tensor) -> Tensor:
        """The outputs of both directions side by side."""
        flipped_BT = None if visible_BT is None else visible_BT.flip(1)
        other_BTD, _ = self.cells[1](x_BTD.flip(1), flipped_BT, None, context, False)
        probe = context.call.probe
        if probe is not None:
            forward_BDQK, backward_BDQK = probe.state_weights[-2:]
            probe.state_weights[-2:] = [torch.cat((forward_BDQK, backward_BDQK.flip(2, 3)), dim=1)]
            ahead, back = probe.cell_gates[-2:]
            probe.cell_gates[-2:] = [{name: torch.cat((x, back[name].flip(1)), dim=2) for name, x in ahead.items()}]
        return torch.cat((h_BTD, other_BTD.flip(1)), dim=-1)
