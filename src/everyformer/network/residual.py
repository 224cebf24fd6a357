"""Residuals: how a sublayer joins the residual stream. A residual owns the norm and the addition; the sublayer is a function.

Equations, f the sublayer:
    post-norm     x <- LN(x + f(x))                                Thickstun (source T) eq. 4-6, Bloem 2019 (source B)
    pre-norm      x <- x + f(LN x), and a final LN after the stack    source K, which leaves out the final norm
    no residual   x <- f(x)                                        stacked recurrent nets: no addition, no norm
    sandwich      x <- x + LN'(f(LN x)), in network/sandwich_norm.py
    reversible    y1 = x1 + F(LN x2), y2 = x2 + G(LN y1)           Gomez et al. 2017; Kitaev et al. 2020: F attention, G net
    gated         x <- g(x, ReLU(f(LN x)))                         Parisotto et al. 2019 (GTrXL), with one of their five gates

A reversible stack has two streams, both x at first: s_0 = s_1 = x, and sublayer n makes s_(n+2) = s_n + f_n(LN s_(n+1)).
So s_n = s_(n+2) - f_n(LN s_(n+1)): the backward pass computes every sublayer again from the last two streams, which are all that
is kept of the stack, whatever its depth. The papers leave open what the output is: the mean of the last two streams, or both of them,
(s_(N), s_(N+1)), as in the published Reformer, which the output heads then read. Departures: in layers of one or three sublayers the
streams swap roles from layer to layer.

The gates of GTrXL, s the sigmoid, every W and U a map without bias, b (b_g) learned, * elementwise:
    input         s(W x) * x + y
    output        x + s(W x - b) * y
    highway       s(W x + b) * x + (1 - s(W x + b)) * y
    sigmoid_tanh  x + s(W y - b) * tanh(U y)
    gru           r = s(W_r y + U_r x), z = s(W_z y + U_z x - b), h = tanh(W_h y + U_h (r * x)); (1 - z) * x + z * h
    none          x + y, which is TrXL-I: only the norm is moved
With b > 0 all but the first and the last start near the identity. The norm is applied to the input of a sublayer only (identity map
reordering), so nothing but gates is on the path from input to output. Two linear maps would then follow each other, hence the ReLU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from everyformer.attention.context import Probe
from everyformer.attention.has_data import is_transformed
from everyformer.network.norm import LayerNorm, Norm
from everyformer.value import Share, Value

Kept = TypeVar("Kept")
Branch = Callable[[Tensor], tuple[Tensor, Kept]]  # a sublayer as a function; it also returns its cache entry


class Residual:
    """A value that builds one `ResidualModule` for every sublayer and one `StreamModule` for the stack.

    Example: `class Scaled(Residual, Value, frozen=True)`.
    """

    __slots__ = ()
    norm: Norm | None

    def build(self, width: int) -> ResidualModule:
        """Returns the module of one sublayer."""
        raise NotImplementedError

    def build_stream(self, width: int) -> StreamModule:
        """Returns the module that opens and closes the stream of a stack."""
        raise NotImplementedError

    def output_width(self, width: int) -> int:
        """Returns the width of a stack's output for a model of this width."""
        return width


class ResidualModule(nn.Module):
    """Adds the output of one sublayer to the stream. The stream is a tensor, except in a reversible stack."""

    def input(self, stream: Any) -> Tensor:
        """The part of the stream that the sublayer reads, before the norm. A segment memory keeps this."""
        assert isinstance(stream, Tensor)
        return stream

    def normalize(self, x_BTD: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        """The input as the sublayer reads it."""
        return x_BTD

    def forward(self, stream: Any, f: Branch[Kept], visible_BT: Tensor | None) -> tuple[Any, Kept]:
        raise NotImplementedError

    def probed(self, probe: Probe) -> Callable[..., Any]:
        """The same function, recording its gates. Default: it has none."""
        return self


class StreamModule(nn.Module):
    """Starts the stream of a stack from its input, and makes the stack's output of it."""

    recomputes: ClassVar[bool] = False  # whether the residual itself recomputes activations in the backward pass

    def start(self, x_BTD: Tensor, recompute: bool = False) -> Any:
        """`recompute`: whether sublayers may be computed again in the backward pass. Not if their cache entries are kept."""
        return x_BTD

    def finish(self, stream: Any, visible_BT: Tensor | None) -> Tensor:
        assert isinstance(stream, Tensor)
        return stream


class PostNorm(Residual, Value, frozen=True):
    """The norm after the addition: norm(x + f(x)) (Vaswani et al. 2017). `dropout` is on f(x).

    Example: `PostNorm(LayerNorm(), dropout=0.1)`, with the `norm` of every sublayer.
    """

    norm: Norm = LayerNorm()
    dropout: Share = 0.0

    def build(self, width: int) -> ResidualModule:
        return PostNormModule(self.norm.build(width), self.dropout)

    def build_stream(self, width: int) -> StreamModule:
        return StreamModule()


class PreNorm(Residual, Value, frozen=True):
    """The norm before the sublayer: x + f(norm(x)). With `final_norm` there is one more at the end of the stack.

    `norm` is that of every sublayer, and `dropout` is on f(norm(x)). Example: `PreNorm(RMSNorm(), dropout=0.1)`.
    """

    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    final_norm: bool = True

    def build(self, width: int) -> ResidualModule:
        return PreNormModule(self.norm.build(width), self.dropout)

    def build_stream(self, width: int) -> StreamModule:
        return NormedStreamModule(self.norm.build(width)) if self.final_norm else StreamModule()


class NoResidual(Residual, Value, frozen=True):
    """Sublayers one after the other, without addition or norm. `dropout` is on the output of each (Zaremba et al. 2014).

    Example: `Stack(2, (Layer((Lstm(),)),), NoResidual())`.
    """

    dropout: Share = 0.0
    norm: ClassVar[Norm | None] = None  # type: ignore[misc]

    def build(self, width: int) -> ResidualModule:
        return NoResidualModule(self.dropout)

    def build_stream(self, width: int) -> StreamModule:
        return StreamModule()


class NoResidualModule(ResidualModule):
    def __init__(self, dropout: float):
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, stream: Tensor, f: Branch[Kept], visible_BT: Tensor | None) -> tuple[Tensor, Kept]:
        y_BTD, kept = f(stream)
        return self.dropout(y_BTD), kept


class PostNormModule(ResidualModule):
    def __init__(self, norm: nn.Module, dropout: float):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, stream: Tensor, f: Branch[Kept], visible_BT: Tensor | None) -> tuple[Tensor, Kept]:
        y_BTD, kept = f(stream)
        return self.norm(stream + (self.dropout(y_BTD) if self.training else y_BTD), visible_BT), kept  # eq. T4, T6


class NormedResidualModule(ResidualModule):
    """A residual whose sublayer reads the normalized stream."""

    def __init__(self, norm: nn.Module, dropout: float):
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def normalize(self, x_BTD: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        normed_BTD: Tensor = self.norm(x_BTD, visible_BT)
        return normed_BTD


class PreNormModule(NormedResidualModule):
    def forward(self, stream: Tensor, f: Branch[Kept], visible_BT: Tensor | None) -> tuple[Tensor, Kept]:
        y_BTD, kept = f(self.normalize(stream, visible_BT))
        return stream + (self.dropout(y_BTD) if self.training else y_BTD), kept  # eq. K6b, K6d


class NormedStreamModule(StreamModule):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = norm

    def finish(self, stream: Any, visible_BT: Tensor | None) -> Tensor:
        x_BTD = self.norm(stream, visible_BT)
        assert isinstance(x_BTD, Tensor)
        return x_BTD


GateName = Literal["input", "output", "highway", "sigmoid_tanh", "gru", "none"]
MAPS = {"none": "", "sigmoid_tanh": "w u", "gru": "w_r u_r w_z u_z w_h u_h"}  # the other gates have one map, w


class Gated(Residual, Value, frozen=True):
    """A gate in place of the addition (GTrXL); `gate` is one of the paper's five, or none. Example: `Gated("gru", bias=2.0)`.

    `bias` is the initial b_g: the larger, the less of a sublayer passes. Default: 2 for gru, 1 for the others, as in the paper.
    `norm`, `dropout` and `final_norm` are those of `PreNorm`.
    """

    gate: GateName = "gru"
    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    bias: float | None = None
    final_norm: bool = False

    def build(self, width: int) -> ResidualModule:
        bias = self.bias if self.bias is not None else 2.0 if self.gate == "gru" else 1.0
        return GatedModule(self.norm.build(width), self.dropout, Gate(width, self.gate, bias))

    def build_stream(self, width: int) -> StreamModule:
        return NormedStreamModule(self.norm.build(width)) if self.final_norm else StreamModule()


class Gate(nn.Module):
    """Combines the stream x and the output y of a sublayer."""

    def __init__(self, width: int, kind: GateName, bias: float):
        super().__init__()
        self.kind = kind
        self.maps = nn.ModuleDict({name: nn.Linear(width, width, bias=False) for name in MAPS.get(kind, "w").split()})
        self.bias = None if kind in ("input", "none") else nn.Parameter(torch.full((width,), bias))

    def gates(self, x_BTD: Tensor, y_BTD: Tensor) -> dict[str, Tensor]:
        """The sigmoids of the equation by name; `stream` is the share of x that passes, `sublayer` that of y."""
        maps, bias = self.maps, self.bias
        if bias is None:
            return {} if self.kind == "none" else {"stream": maps["w"](x_BTD).sigmoid()}
        if self.kind == "highway":
            return {"stream": (maps["w"](x_BTD) + bias).sigmoid()}
        if self.kind in ("output", "sigmoid_tanh"):
            return {"sublayer": (maps["w"](x_BTD if self.kind == "output" else y_BTD) - bias).sigmoid()}
        return {
            "reset": (maps["w_r"](y_BTD) + maps["u_r"](x_BTD)).sigmoid(),
            "update": (maps["w_z"](y_BTD) + maps["u_z"](x_BTD) - bias).sigmoid(),
        }

    def forward(self, x_BTD: Tensor, y_BTD: Tensor, probe: Probe | None = None) -> Tensor:
        maps, gates = self.maps, self.gates(x_BTD, y_BTD)
        if probe is not None:
            probe.gates.append({name: gate_BTD.detach() for name, gate_BTD in gates.items()})
        if self.kind == "none":
            return x_BTD + y_BTD
        if self.kind == "input":
            return gates["stream"] * x_BTD + y_BTD
        if self.kind == "output":
            return x_BTD + gates["sublayer"] * y_BTD
        if self.kind == "highway":
            return _mix(y_BTD, x_BTD, gates["stream"])
        if self.kind == "sigmoid_tanh":
            return x_BTD + gates["sublayer"] * maps["u"](y_BTD).tanh()
        # eq. W34
        return _mix(x_BTD, (maps["w_h"](y_BTD) + maps["u_h"](gates["reset"] * x_BTD)).tanh(), gates["update"])


def _mix(x_BTD: Tensor, y_BTD: Tensor, share_BTD: Tensor) -> Tensor:
    """(1 - share) x + share y. Under autocast the three may differ in dtype, which lerp does not support."""
    exact = torch.promote_types(torch.promote_types(x_BTD.dtype, y_BTD.dtype), share_BTD.dtype)
    return torch.lerp(x_BTD.to(exact), y_BTD.to(exact), share_BTD.to(exact))


class GatedModule(NormedResidualModule):
    def __init__(self, norm: nn.Module, dropout: float, gate: Gate):
        super().__init__(norm, dropout)
        self.gate = gate

    def forward(
        self, stream: Tensor, f: Branch[Kept], visible_BT: Tensor | None, probe: Probe | None = None
    ) -> tuple[Tensor, Kept]:
        y_BTD, kept = f(self.normalize(stream, visible_BT))
        return self.gate(stream, self.dropout(F.relu(y_BTD)), probe), kept

    def probed(self, probe: Probe) -> Callable[..., Any]:
        return partial(self, probe=probe)


class Reversible(Residual, Value, frozen=True):
    """Two streams that can be computed backwards, so that the activations of one layer are kept, whatever the depth.

    The streams are recovered to rounding error, so keep the weights in float32; autocast to a lower precision is fine. The output is
    the mean of the streams, or with `merge="concatenate"` both, which makes it twice as wide as the model. `merge`, `norm`,
    `dropout` and `final_norm` stand for what they do in `PreNorm`. Example: `Reversible(LayerNorm())`.
    """

    norm: Norm = LayerNorm()
    dropout: Share = 0.0
    final_norm: bool = True
    merge: Literal["mean", "concatenate"] = "mean"

    def build(self, width: int) -> ResidualModule:
        return ReversibleModule(self.norm.build(width), self.dropout)

    def build_stream(self, width: int) -> StreamModule:
        norm = self.norm.build(self.output_width(width)) if self.final_norm else None
        return ReversibleStreamModule(norm, self.merge == "concatenate")

    def output_width(self, width: int) -> int:
        return 2 * width if self.merge == "concatenate" else width


class ReversibleTape:
    """Recovers the streams of a reversible stack in the backward pass. Holds the last two, then the two being computed."""

    def __init__(self) -> None:
        self.streams: dict[int, Tensor] = {}
        self.steps = 0

    def finish(self, steps: int, *last: Tensor) -> None:
        self.steps, self.streams = steps, {steps + i: s.detach() for i, s in enumerate(last)}

    def run(self, number: int, s_BTD: Tensor, f: Branch[Kept]) -> tuple[Tensor, Kept]:
        """Returns f of stream number + 1 without keeping activations. The backward pass computes it again to recover stream `number`."""
        first, requires_grad = [s_BTD], s_BTD.requires_grad

        def compute(_: Tensor) -> tuple[Tensor, Kept]:
            if first:
                return f(first.pop())
            y_BTD, kept = f(self.streams[number + 1].detach().requires_grad_(requires_grad))
            self._recover(number, y_BTD.detach())
            return y_BTD, kept

        # The empty tensor names the device whose random state is restored, so that dropout is the same.
        output: tuple[Tensor, Kept] = checkpoint(compute, s_BTD.new_empty(0), use_reentrant=False, early_stop=False)
        return output

    def _recover(self, number: int, y_BTD: Tensor) -> None:
        if number:
            self.streams[number] = self.streams[number + 2] - y_BTD  # eq. W29
        for done in (number + 2, *(() if number else (1,))):
            if done < self.steps:  # the last two are kept for a second backward pass
                del self.streams[done]


class TwoStreams(NamedTuple):
    """The streams of a reversible stack after some sublayers, with the tape that recovers them, if any."""

    x1_BTD: Tensor
    x2_BTD: Tensor
    steps: int
    tape: ReversibleTape | None


class ReversibleModule(NormedResidualModule):
    def input(self, stream: Any) -> Tensor:
        x2_BTD: Tensor = stream.x2_BTD
        return x2_BTD

    def forward(self, stream: TwoStreams, f: Branch[Kept], visible_BT: Tensor | None) -> tuple[TwoStreams, Kept]:
        def branch(x_BTD: Tensor) -> tuple[Tensor, Kept]:
            y_BTD, kept = f(self.normalize(x_BTD, visible_BT))
            return self.dropout(y_BTD), kept

        x1_BTD, x2_BTD, steps, tape = stream
        y_BTD, kept = branch(x2_BTD) if tape is None else tape.run(steps, x2_BTD, branch)
        return TwoStreams(x2_BTD, x1_BTD + y_BTD, steps + 1, tape), kept  # eq. W28, W30


class ReversibleStreamModule(StreamModule):
    recomputes = True

    def __init__(self, norm: nn.Module | None, concatenate: bool):
        super().__init__()
        self.norm, self.concatenate = norm, concatenate

    def start(self, x_BTD: Tensor, recompute: bool = False) -> TwoStreams:
        recompute = recompute and torch.is_grad_enabled()
        recompute = recompute and not (torch.compiler.is_compiling() or is_transformed())
        return TwoStreams(x_BTD, x_BTD, 0, ReversibleTape() if recompute else None)

    def finish(self, stream: Any, visible_BT: Tensor | None) -> Tensor:
        x1_BTD, x2_BTD, steps, tape = stream
        if tape is not None:
            tape.finish(steps, x1_BTD, x2_BTD)
        x_BTD: Tensor = torch.cat((x1_BTD, x2_BTD), dim=-1) if self.concatenate else (x1_BTD + x2_BTD) / 2
        return x_BTD if self.norm is None else self.norm(x_BTD, visible_BT)
