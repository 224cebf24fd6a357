"""Recurrent depths: the LSTM, and what is left of it when its recurrence is taken out.

Paper: Hochreiter & Schmidhuber 1997; Gers et al. 1999 (the forget gate); Levy et al. 2018 (the ablation). Source T, eq. 13-21:
    c~_t = squash(W_ch h_{t-1} + W_cx x_t)       i_t, f_t, o_t = sigma(W_h h_{t-1} + W_x x_t), each with maps of its own
    c_t  = i_t c~_t + f_t c_{t-1}                h_t = o_t squash(c_t)
The ablated LSTM has no h_{t-1} in them and no o_t. In both of them, eq. 19,
    c_t = sum_{s <= t} w_{t,s} c~_s              w_{t,s} = i_s prod_{k = s+1 .. t} f_k,
so that w is to each number of the state what attention weights are to a head; a probe is given it.
Symbols: width d; `squash` is T's sigma or the usual tanh; `forget=False` is the LSTM of 1997, f_t = 1.
Departures: T's eq. 17 is garbled, it is the output gate. T says that w_{t,r} <= w_{t,s} for r < s; that holds of the product
of the f only, since i_s may be anything. T has no biases (`bias=False`); where there are some, that of f begins at 1 (Gers
et al.; Jozefowicz et al. 2015), so that a new net remembers. `both_ways` gives each direction half the width.

Three ways to compute them. kernel="reference": the equations, one position after the other. Otherwise, for tanh, torch's
fused LSTM: one call for all positions. It tells c_t of the last one only; where all are wanted, the gates are computed from
its h in one product, and c by `scan`. The ablated LSTM is a scan altogether.

A position that is padding changes nothing of the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from everyformer.attention.attend import UnsupportedKernel
from everyformer.attention.context import Context
from everyformer.network.cache import Entry, RecurrentState
from everyformer.network.depth import Depth, DepthLayer, Layer, Source, StackLayers
from everyformer.network.initial import initialized
from everyformer.network.residual import NoResidual, Residual
from everyformer.value import Size, Value

Activation = Literal["tanh", "sigmoid"]
SHUT = 100.0  # sigma of it is 1 in every precision


class Recurrent(Value, frozen=True):
    """What the recurrent depths have in common. It is not one of them itself: a class is abstract or final."""

    layers: Size
    residual: Residual = NoResidual()
    activation: Activation = "tanh"
    bias: bool = True
    bidirectional: bool = False
    each: ClassVar[tuple[Layer, ...]] = ()

    def is_causal(self) -> bool:
        return not self.bidirectional

    def stack(self, width: int, gates: str, recurrent: bool) -> nn.Module:
        ways = 2 if self.bidirectional else 1
        layers = []
        for _ in range(self.layers):
            cells = [Cell(width, width // ways, gates, self.activation, self.bias, recurrent) for _ in range(ways)]
            layers.append(RecurrentLayer(cells, self.residual.step(width)))
        return StackLayers(layers, self.residual.ends(width))


class Lstm(Recurrent, Depth, frozen=True):
    forget: bool = True

    def build(self, width: int) -> nn.Module:
        return self.stack(width, "ifco" if self.forget else "ico", recurrent=True)


class AblatedLstm(Recurrent, Depth, frozen=True):
    def build(self, width: int) -> nn.Module:
        return self.stack(width, "ifc", recurrent=False)


def scan(f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    """c_t = x_t + f_t c_{t-1} for all t, in a depth of O(log T) and O(T) work. Nothing is divided, so f may be 0.

    Two neighbours make one step, c_{t+1} = (x_{t+1} + f_{t+1} x_t) + f_{t+1} f_t c_{t-1}: half as many, and so on down; then each
    of the others follows from its neighbour. The gradient is a scan from the end: g_t = dL/dc_t + f_{t+1} g_{t+1}.
    """
    if torch.compiler.is_compiling():
        return _halve(f_BTD, x_BTD)  # a compiler finds the gradient by itself
    found: Tensor = _Scan.apply(f_BTD, x_BTD)  # type: ignore[no-untyped-call]
    return found


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        c_BTD = _halve(f_BTD, x_BTD)
        ctx.save_for_backward(f_BTD, c_BTD)
        return c_BTD

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor]:
        f_BTD, c_BTD = ctx.saved_tensors
        later_BTD = torch.cat((f_BTD[:, 1:], torch.zeros_like(f_BTD[:, :1])), dim=1)
        g_BTD = scan(later_BTD.flip(1), slopes[0].flip(1)).flip(1)
        before_BTD = torch.cat((torch.zeros_like(c_BTD[:, :1]), c_BTD[:, :-1]), dim=1)
        return g_BTD * before_BTD, g_BTD


def _halve(f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    length = x_BTD.shape[1]
    if length == 1:
        return x_BTD
    first_f, first_x, second_f, second_x = f_BTD[:, ::2], x_BTD[:, ::2], f_BTD[:, 1::2], x_BTD[:, 1::2]
    pairs = length // 2
    second = _halve(second_f * first_f[:, :pairs], torch.addcmul(second_x, second_f, first_x[:, :pairs]))
    between = torch.addcmul(first_x[:, 1:], first_f[:, 1:], second[:, : first_x.shape[1] - 1])
    c_BTD = torch.empty_like(x_BTD)
    c_BTD[:, :1], c_BTD[:, 2::2], c_BTD[:, 1::2] = first_x[:, :1], between, second
    return c_BTD


def begin(x_BTD: Tensor, before_BC: Tensor | None, size: int) -> Tensor:
    """The state before the first position: what the past left, or 0."""
    if before_BC is None:
        return x_BTD.new_zeros(x_BTD.shape[0], size)
    if before_BC.shape != (x_BTD.shape[0], size):
        raise ValueError(
            f"the past has states of the shape {tuple(before_BC.shape)} (batch, width), this layer ({x_BTD.shape[0]}, {size}): "
            "it is of another model; begin with Past()"
        )
    return before_BC


class Cell(nn.Module):
    """One direction of one layer. `gates` are its maps in their order: i, f, c (the candidate), o; an absent one is 1."""

    def __init__(self, width: int, own: int, gates: str, activation: str, bias: bool, recurrent: bool):
        super().__init__()
        self.gates, self.own, self.activation = gates, own, torch.tanh if activation == "tanh" else torch.sigmoid
        self.size = own * (2 if recurrent else 1)  # of the state
        self.fuses = recurrent and activation == "tanh"
        self.of_x = nn.Linear(width, len(gates) * own, bias=bias)
        self.of_h = nn.Linear(own, len(gates) * own, bias=False) if recurrent else None
        if bias and "f" in gates:
            with torch.no_grad():
                self.of_x.bias.view(len(gates), own)[gates.index("f")] = 1.0
            initialized(self.of_x.bias)

    def forward(
        self, x_BTD: Tensor, visible_BT: Tensor | None, before_BC: Tensor | None, context: Context, keep: bool
    ) -> tuple[Tensor, Tensor | None]:
        """h of every position, and where `keep` says so the states [h; c] (of the ablated c) of them, or of the last ones."""
        h_BD, c_BD = self._split(begin(x_BTD, before_BC, self.size))
        plain = context.call.kernel == "reference" or x_BTD.shape[1] == 1
        if plain or (self.of_h is not None and not self.fuses):
            h_BTD, c_BTD = self._steps(x_BTD, visible_BT, h_BD, c_BD)
        elif self.of_h is None:
            h_BTD, c_BTD = None, self._scanned(x_BTD, visible_BT, None, c_BD)
        else:
            h_BTD, last = self._fused(x_BTD, visible_BT, h_BD, c_BD)
            if not keep or (self.training and visible_BT is None):
                c_BTD = last[:, None]  # nobody asks for the others
            else:
                c_BTD = self._scanned(x_BTD, visible_BT, torch.cat((h_BD[:, None], h_BTD[:, :-1]), dim=1), c_BD)
        if h_BTD is None:
            h_BTD = self.activation(c_BTD).to(x_BTD.dtype)
        if context.call.probe is not None:
            context.call.probe.weights.append(self._weights(x_BTD, visible_BT, h_BD, h_BTD))
        if not keep:
            return h_BTD, None
        return h_BTD, c_BTD if self.of_h is None else torch.cat((h_BTD[:, -c_BTD.shape[1] :], c_BTD), dim=-1)

    def after(self, sum_BF: Tensor, state_BC: Tensor) -> Tensor:
        """The state [h; c] after one more step, given what the input adds to the gates."""
        h_BD, c_BD = self._step(sum_BF, *self._split(state_BC))
        return torch.cat((h_BD, c_BD), dim=-1)

    def _split(self, state_BC: Tensor) -> tuple[Tensor, Tensor]:
        return state_BC[:, : self.own], state_BC[:, -self.own :]

    def _parts(self, total: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """i, f, c~ and o. The state adds up over many positions, so it is kept in float32 at least."""
        found = dict(zip(self.gates, total.unflatten(-1, (len(self.gates), self.own)).unbind(-2), strict=True))
        one = torch.ones_like(found["c"])
        i, f, o = (torch.sigmoid(found[name]) if name in found else one for name in "ifo")
        exact = torch.promote_types(total.dtype, torch.float32)
        return i.to(exact), f.to(exact), self.activation(found["c"]).to(exact), o

    def _steps(self, x_BTD: Tensor, visible_BT: Tensor | None, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        """The equations, one position after the other."""
        hs, cs = [], []
        for time, sum_BF in enumerate(
            self.of_x(x_BTD).unbind(1)
        ):  # not by index: each would leave a gradient of the whole
            answer_BD, next_BD = self._step(sum_BF, h_BD, c_BD)
            if visible_BT is not None:
                seen_B1 = visible_BT[:, time, None]
                next_BD, answer_BD = torch.where(seen_B1, next_BD, c_BD), torch.where(seen_B1, answer_BD, h_BD)
            h_BD, c_BD = answer_BD, next_BD
            hs.append(h_BD)
            cs.append(c_BD)
        return torch.stack(hs, dim=1), torch.stack(cs, dim=1)

    def _step(self, sum_BF: Tensor, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        recurrent = sum_BF if self.of_h is None else sum_BF + self.of_h(h_BD.to(sum_BF.dtype))
        i_BD, f_BD, new_BD, o_BD = self._parts(recurrent)
        next_BD = i_BD * new_BD + f_BD * c_BD
        return (o_BD * self.activation(next_BD)).to(sum_BF.dtype), next_BD

    def _fused(self, x_BTD: Tensor, visible_BT: Tensor | None, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        """h of every position, and c after the last. Padding is put behind what is real, and h taken from there."""
        if visible_BT is None:
            return self._call(x_BTD, h_BD, c_BD)
        order_BT1 = (~visible_BT).to(torch.uint8).argsort(dim=1, stable=True)[..., None]
        packed_BTD, c_BD = self._call(x_BTD.gather(1, order_BT1.expand_as(x_BTD)), h_BD, c_BD)
        found = torch.cat(
            (h_BD[:, None].to(packed_BTD.dtype), packed_BTD), dim=1
        )  # after none of the real ones, one, ...
        return found.gather(1, visible_BT.cumsum(1)[..., None].expand_as(packed_BTD)), c_BD

    def _call(self, x_BTD: Tensor, h_BD: Tensor, c_BD: Tensor) -> tuple[Tensor, Tensor]:
        assert self.of_h is not None
        maps, biases = [self.of_x.weight, self.of_h.weight], []
        if self.of_x.bias is not None or "f" not in self.gates:
            bias = self.of_x.weight.new_zeros(len(self.gates) * self.own) if self.of_x.bias is None else self.of_x.bias
            biases = [bias, torch.zeros_like(bias)]
        if "f" not in self.gates:  # a forget gate that is 1
            maps = [torch.cat((one[: self.own], torch.zeros_like(one[: self.own]), one[self.own :])) for one in maps]
            biases = [
                torch.cat((one[: self.own], torch.full_like(one[: self.own], full), one[self.own :]))
                for one, full in zip(biases, (SHUT, 0.0), strict=True)
            ]
        # In one piece of memory, in this order: so cuDNN wants it.
        flat = torch.cat([one.flatten() for one in (*maps, *biases)])
        sizes = [one.numel() for one in (*maps, *biases)]
        weights = [part.view_as(one) for part, one in zip(flat.split(sizes), (*maps, *biases), strict=True)]
        state = (h_BD.to(x_BTD.dtype)[None].contiguous(), c_BD.to(x_BTD.dtype)[None].contiguous())
        slopes = torch.is_grad_enabled()  # what torch calls training: without it there is no way back
        h_BTD, _, c_1BD = torch.lstm(x_BTD, state, weights, len(biases) > 0, 1, 0.0, slopes, False, True)
        return h_BTD, c_1BD[0]

    def _open(
        self, x_BTD: Tensor, visible_BT: Tensor | None, before_BTD: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """i, f and c~ of every position, from what was answered before it. Padding lets nothing in and forgets nothing."""
        sum_BTF = self.of_x(x_BTD)
        if self.of_h is not None:
            assert before_BTD is not None
            sum_BTF = sum_BTF + self.of_h(before_BTD.to(x_BTD.dtype))
        i_BTD, f_BTD, new_BTD, _ = self._parts(sum_BTF)
        if visible_BT is not None:
            i_BTD, f_BTD = i_BTD * visible_BT[..., None], f_BTD.masked_fill(~visible_BT[..., None], 1.0)
        return i_BTD, f_BTD, new_BTD

    def _scanned(self, x_BTD: Tensor, visible_BT: Tensor | None, before_BTD: Tensor | None, c_BD: Tensor) -> Tensor:
        i_BTD, f_BTD, new_BTD = self._open(x_BTD, visible_BT, before_BTD)
        add_BTD = i_BTD * new_BTD
        begun_B1D = add_BTD[:, :1] + f_BTD[:, :1] * c_BD[:, None].to(add_BTD.dtype)
        return scan(f_BTD, torch.cat((begun_B1D, add_BTD[:, 1:]), dim=1))

    def _weights(self, x_BTD: Tensor, visible_BT: Tensor | None, h_BD: Tensor, h_BTD: Tensor) -> Tensor:
        """w_{t,s} of each number of the state as B, D, Q, K: a scan in which each position puts in its i, for itself."""
        before_BTD = torch.cat((h_BD[:, None].to(h_BTD.dtype), h_BTD[:, :-1]), dim=1)
        i_BTD, f_BTD, _ = self._open(x_BTD, visible_BT, before_BTD)
        each_BDQK = torch.diag_embed(i_BTD.transpose(1, 2))
        found_BQDK = scan(f_BTD[..., None].expand(*f_BTD.shape, f_BTD.shape[1]), each_BDQK.transpose(1, 2))
        return found_BQDK.transpose(1, 2)


class RecurrentLayer(DepthLayer):
    """One cell, or two that read in opposite directions; and its step of the wiring."""

    entries = 1

    def __init__(self, cells: Sequence[nn.Module], step: nn.Module):
        super().__init__()
        self.cells, self.step = nn.ModuleList(cells), step

    def max_distance(self) -> tuple[int | None, ...]:
        return (1,)  # the last state holds all that came before

    def forward(
        self, state: Any, context: Context, cache: list[Any] | None, source: Source | None
    ) -> tuple[Any, list[Entry]]:
        before = cache[0] if cache else None
        if before is not None and not isinstance(before, RecurrentState):
            raise ValueError("the past is not of a recurrent layer: it is of another model; begin with Past()")
        if cache is not None and len(self.cells) > 1:
            raise ValueError(
                "a layer that reads both ways needs its sequence at once, and its past has answered already; call it without past"
            )
        if before is not None and context.call.probe is not None and before.x_BMD.shape[1]:
            raise ValueError("what a past holds cannot be told apart by position; probe a call without past")
        if context.call.kernel not in ("auto", "reference"):
            raise UnsupportedKernel(
                f"kernel={context.call.kernel} computes attention, and a recurrent layer has none; use auto or reference"
            )
        visible_BT = context.positions.visible_BQ()
        state, found = self.step(
            state, lambda x: self._read(x, visible_BT, context, before, cache is not None), visible_BT
        )
        return state, [] if found is None else [found]

    def _read(
        self, x_BTD: Tensor, visible_BT: Tensor | None, context: Context, before: RecurrentState | None, keep: bool
    ) -> tuple[Tensor, RecurrentState | None]:
        if visible_BT is not None:
            visible_BT = visible_BT.expand(x_BTD.shape[:2])
        last_BC = before.x_BMD[:, -1] if before is not None and before.x_BMD.shape[1] else None
        h_BTD, state = self.cells[0](x_BTD, visible_BT, last_BC, context, keep)
        if len(self.cells) > 1:
            back = None if visible_BT is None else visible_BT.flip(1)
            other_BTD, _ = self.cells[1](x_BTD.flip(1), back, None, context, False)
            h_BTD = torch.cat((h_BTD, other_BTD.flip(1)), dim=-1)
            if context.call.probe is not None:
                there, back_BDQK = context.call.probe.weights[-2:]
                context.call.probe.weights[-2:] = [torch.cat((there, back_BDQK.flip(2, 3)), dim=1)]
        if state is None:
            return h_BTD, None
        found = state.detach() if context.call.segment_memory else state
        if before is not None and last_BC is not None and found.shape[1] == x_BTD.shape[1]:
            found = torch.cat((before.x_BMD.to(found.dtype), found), dim=1)
        return h_BTD, RecurrentState(found)
