"""Wiring: what becomes of a sublayer's answer. It owns the norm and the residual path; the sublayer is a function.

    open(x) -> state, step(state, f) -> state, close(state) -> x

Equations:
    post-norm   x <- LN(x + f(x))                              T eq. 4-6, B
    pre-norm    x <- x + f(LN x), and a last LN after the stack    K; the last norm is what K leaves out
    chain       x <- f(x)                                      a recurrent net in layers: no residual, no norm
    reversible  y1 = x1 + F(LN x2), y2 = x2 + G(LN y1)         Gomez et al. 2017; Kitaev et al. 2020: F attention, G net
    gated       x <- g(x, ReLU(f(LN x)))                       Parisotto et al. 2019 (GTrXL), with one of their five gates
A step passes on whatever else the sublayer returns (its past).

A reversible stack is two streams, both x at first: s_0 = s_1 = x, and sublayer n makes s_(n+2) = s_n + f_n(LN s_(n+1)).
So s_n = s_(n+2) - f_n(LN s_(n+1)): the backward pass computes every sublayer again from the last two streams, which are all
that is kept of the stack, whatever its depth. Departures: the output is the mean of the last two, which the papers leave
open; layers of one or three sublayers swap the streams' roles from layer to layer.

The gates of GTrXL, s the sigmoid, every W and U a map without bias, b (b_g) learned, * by element:
    input         s(W x) * x + y
    output        x + s(W x - b) * y
    highway       s(W x + b) * x + (1 - s(W x + b)) * y
    sigmoid_tanh  x + s(W y - b) * tanh(U y)
    gru           r = s(W_r y + U_r x), z = s(W_z y + U_z x - b), h = tanh(W_h y + U_h (r * x)); (1 - z) * x + z * h
    none          x + y, which is TrXL-I: only the norm is moved
With b > 0 all but the first and the last begin near the identity. The norm is on what enters a sublayer alone (identity map
reordering), so nothing but gates is on the way from the input to the output; two linear maps would then follow each other,
hence the ReLU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from everyformer.network.norm import LayerNorm, Norm
from everyformer.value import Share, Value

Carried = TypeVar("Carried")
Sublayer = Callable[[Tensor], tuple[Tensor, Carried]]


class Residual:
    """A value that builds one `Step` for every sublayer and one pair of `Ends` for the stack."""

    __slots__ = ()
    norm: Norm | None

    def step(self, width: int) -> ResidualModule:
        raise NotImplementedError

    def ends(self, width: int) -> Stream:
        raise NotImplementedError


class ResidualModule(nn.Module):
    """How one sublayer changes the state, and what of the state it sees."""

    def stream(self, state: Any) -> Tensor:
        """What the sublayer reads of the state, before the norm: this is what a segment memory keeps."""
        assert isinstance(state, Tensor)
        return state

    def view(self, x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
        """What reaches the sublayer of a stream, or of one kept from before."""
        return x_BTD

    def forward(self, state: Any, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Any, Carried]:
        raise NotImplementedError


class Stream(nn.Module):
    """How the state begins, and how it becomes the stack's output."""

    recomputes: ClassVar[bool] = False  # does the wiring itself keep little for the backward pass?

    def open(self, x_BTD: Tensor, again: bool = False) -> Any:
        """`again`: may sublayers be computed a second time in the backward pass? Not where what they return is kept."""
        return x_BTD

    def close(self, state: Any, visible_BT: Tensor | None) -> Tensor:
        assert isinstance(state, Tensor)
        return state


class PostNorm(Residual, Value, frozen=True):
    norm: Norm = LayerNorm()
    dropout: Share = 0.0

    def step(self, width: int) -> ResidualModule:
        return PostNormModule(self.norm.build(width), self.dropout)

    def ends(self, width: int) -> Stream:
        return Stream()


class PreNorm(Residual, Value, frozen=True):
    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    last: bool = True  # a norm after the stack

    def step(self, width: int) -> ResidualModule:
        return PreNormModule(self.norm.build(width), self.dropout)

    def ends(self, width: int) -> Stream:
        return NormedStream(self.norm.build(width)) if self.last else Stream()


class NoResidual(Residual, Value, frozen=True):
    """One after the other, with nothing beside. Dropout of what each answers (Zaremba et al. 2014)."""

    dropout: Share = 0.0
    norm: ClassVar[Norm | None] = None  # type: ignore[misc]

    def step(self, width: int) -> ResidualModule:
        return NoResidualModule(self.dropout)

    def ends(self, width: int) -> Stream:
        return Stream()


class NoResidualModule(ResidualModule):
    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, state: Tensor, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Tensor, Carried]:
        y_BTD, carried = f(state)
        return self.dropout(y_BTD), carried


class PostNormModule(ResidualModule):
    def __init__(self, norm: nn.Module, dropout: float):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, state: Tensor, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Tensor, Carried]:
        y_BTD, carried = f(state)
        return self.norm(state + self.dropout(y_BTD), visible_BT), carried


class NormedResidualModule(ResidualModule):
    """A step whose sublayer reads the normed stream."""

    def __init__(self, norm: nn.Module, dropout: float):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def view(self, x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
        normed_BTD: Tensor = self.norm(x_BTD, visible_BT)
        return normed_BTD


class PreNormModule(NormedResidualModule):
    def forward(self, state: Tensor, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Tensor, Carried]:
        y_BTD, carried = f(self.view(state, visible_BT))
        return state + self.dropout(y_BTD), carried


class NormedStream(Stream):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def close(self, state: Any, visible_BT: Tensor | None) -> Tensor:
        x_BTD = self.norm(state, visible_BT)
        assert isinstance(x_BTD, Tensor)
        return x_BTD


GateName = Literal["input", "output", "highway", "sigmoid_tanh", "gru", "none"]
MAPS = {"none": "", "sigmoid_tanh": "w u", "gru": "w_r u_r w_z u_z w_h u_h"}  # of each gate; the others have one


class Gated(Residual, Value, frozen=True):
    """A gate where others add: GTrXL. `bias` is where b_g begins: the larger, the less of a sublayer comes through."""

    gate: GateName = "gru"
    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    bias: float | None = None  # None: 2 for gru, 1 for the others, as in the paper
    last: bool = False  # a norm after the stack

    def step(self, width: int) -> ResidualModule:
        bias = self.bias if self.bias is not None else 2.0 if self.gate == "gru" else 1.0
        return GatedModule(self.norm.build(width), self.dropout, Gate(width, self.gate, bias))

    def ends(self, width: int) -> Stream:
        return NormedStream(self.norm.build(width)) if self.last else Stream()


class Gate(nn.Module):
    """What becomes of the stream x and a sublayer's answer y."""

    def __init__(self, width: int, kind: GateName, bias: float):
        super().__init__()
        self.kind = kind
        self.maps = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in MAPS.get(kind, "w").split()})
        self.bias = None if kind in ("input", "none") else nn.Parameter(torch.full((width,), bias))

    def forward(self, x_BTD: Tensor, y_BTD: Tensor) -> Tensor:
        maps, bias = self.maps, self.bias
        if self.kind == "none":
            return x_BTD + y_BTD
        if self.kind == "input":
            return maps["w"](x_BTD).sigmoid() * x_BTD + y_BTD
        assert bias is not None
        if self.kind == "output":
            return x_BTD + (maps["w"](x_BTD) - bias).sigmoid() * y_BTD
        if self.kind == "highway":
            return _mix(y_BTD, x_BTD, (maps["w"](x_BTD) + bias).sigmoid())
        if self.kind == "sigmoid_tanh":
            return x_BTD + (maps["w"](y_BTD) - bias).sigmoid() * maps["u"](y_BTD).tanh()
        reset_BTD = (maps["w_r"](y_BTD) + maps["u_r"](x_BTD)).sigmoid()
        share_BTD = (maps["w_z"](y_BTD) + maps["u_z"](x_BTD) - bias).sigmoid()
        return _mix(x_BTD, (maps["w_h"](y_BTD) + maps["u_h"](reset_BTD * x_BTD)).tanh(), share_BTD)


def _mix(x_BTD: Tensor, y_BTD: Tensor, share_BTD: Tensor) -> Tensor:
    """(1 - share) x + share y. Under autocast the three may differ in precision, which lerp does not take."""
    exact = torch.promote_types(torch.promote_types(x_BTD.dtype, y_BTD.dtype), share_BTD.dtype)
    return torch.lerp(x_BTD.to(exact), y_BTD.to(exact), share_BTD.to(exact))


class GatedModule(NormedResidualModule):
    def __init__(self, norm: nn.Module, dropout: float, gate: Gate):
        super().__init__(norm, dropout)
        self.gate = gate

    def forward(self, state: Tensor, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Tensor, Carried]:
        y_BTD, carried = f(self.view(state, visible_BT))
        return self.gate(state, self.dropout(F.relu(y_BTD))), carried


class Reversible(Residual, Value, frozen=True):
    """Two streams that can be computed backwards: activations of one layer are kept, whatever the depth.

    A stream comes back to rounding, so keep the weights in float32; low precision by autocast is fine.
    """

    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    last: bool = True  # a norm after the stack

    def step(self, width: int) -> ResidualModule:
        return ReversibleModule(self.norm.build(width), self.dropout)

    def ends(self, width: int) -> Stream:
        return ReversibleStream(self.norm.build(width) if self.last else None)


class ReversibleTape:
    """The way back through a reversible stack: its last two streams, and in the backward pass the two at hand."""

    def __init__(self) -> None:
        self.streams: dict[int, Tensor] = {}
        self.steps = 0

    def end(self, steps: int, *last: Tensor) -> None:
        self.steps, self.streams = steps, {steps + number: s.detach() for number, s in enumerate(last)}

    def run(self, number: int, s_BTD: Tensor, f: Sublayer[Carried]) -> tuple[Tensor, Carried]:
        """f of stream number + 1, keeping nothing; the backward pass computes it again and finds stream `number` by it."""
        first, sloped = [s_BTD], s_BTD.requires_grad

        def compute(_: Tensor) -> tuple[Tensor, Carried]:
            if first:
                return f(first.pop())
            y_BTD, carried = f(self.streams[number + 1].detach().requires_grad_(sloped))
            self._back(number, y_BTD.detach())
            return y_BTD, carried

        # The empty tensor says on which device random numbers are drawn: dropout falls as it fell.
        again: tuple[Tensor, Carried] = checkpoint(compute, s_BTD.new_empty(0), use_reentrant=False, early_stop=False)
        return again

    def _back(self, number: int, y_BTD: Tensor) -> None:
        if number:
            self.streams[number] = self.streams[number + 2] - y_BTD
        for done in (number + 2, *(() if number else (1,))):
            if done < self.steps:  # the last two stay, for a second backward pass
                del self.streams[done]


class Pair(NamedTuple):
    """The state of a reversible stack after some steps; `trail` where the backward pass goes back along it."""

    x1_BTD: Tensor
    x2_BTD: Tensor
    steps: int
    tape: ReversibleTape | None


class ReversibleModule(NormedResidualModule):
    def stream(self, state: Pair) -> Tensor:
        return state.x2_BTD

    def forward(self, state: Pair, f: Sublayer[Carried], visible_BT: Tensor | None) -> tuple[Pair, Carried]:
        def branch(x_BTD: Tensor) -> tuple[Tensor, Carried]:
            y_BTD, carried = f(self.view(x_BTD, visible_BT))
            return self.dropout(y_BTD), carried

        x1_BTD, x2_BTD, steps, tape = state
        y_BTD, carried = branch(x2_BTD) if tape is None else tape.run(steps, x2_BTD, branch)
        return Pair(x2_BTD, x1_BTD + y_BTD, steps + 1, tape), carried


class ReversibleStream(Stream):
    recomputes = True

    def __init__(self, norm: nn.Module | None):
        super().__init__()
        self.norm = norm

    def open(self, x_BTD: Tensor, again: bool = False) -> Pair:
        back = again and torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return Pair(x_BTD, x_BTD, 0, ReversibleTape() if back else None)

    def close(self, state: Any, visible_BT: Tensor | None) -> Tensor:
        x1_BTD, x2_BTD, steps, tape = state
        if tape is not None:
            tape.end(steps, x1_BTD, x2_BTD)
        x_BTD: Tensor = (x1_BTD + x2_BTD) / 2
        return x_BTD if self.norm is None else self.norm(x_BTD, visible_BT)
