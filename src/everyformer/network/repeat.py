"""Repeated depths: the same layers several times, a fixed number of steps or until each position halts.

Papers: Dehghani et al. 2019, Universal Transformers; Graves 2016, Adaptive Computation Time for Recurrent Neural Networks.
Equations, with f the layers, P^n the position vectors of step n, s^0 = x (halting: network/act.py):
    Repeat   s^n = f(s^(n-1) + P^n), n = 1..M; y = s^M.   In post-norm f is A = LN((H + P) + MHA(H + P)), LN(A + Net(A))
    Halt     y = sum_n p^n s^n, with the weights p of adaptive computation time for each position by itself
What happens to a position that has halted while others go on is the mode:
    graves   its state keeps changing, and the others attend to that; only its output is final
    freeze   its state is copied to the following steps (Dehghani et al.), where the others attend to it
    t2t      as tensor2tensor's code: h^n is that of s^(n-1) + P^n, and states keep changing
Symbols: `steps` M, `epsilon` eps, `cost` tau, `bias` the initial b_h. Weng 2020 (source W) writes P^t without its part in the
residual, and the cost without brackets and tau.
Departures: steps in P are counted from 0, as positions are, and as in the published code.

Steps that no position needs are not computed: the loop ends when every position has halted. This changes nothing, because later
steps have weight 0; a pass that cannot read its data (compiled, recorded) computes all of them. A later position may need more
steps, in which it attends to the halted ones, so a cache has entries for every step up to the limit. Frozen states need only their
keys for that. With `gather`, which a run sets, a step computes only the positions that still run. The outputs are then equal to
rounding only, because the shapes of the products depend on the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from everyformer.attention.context import Context
from everyformer.attention.has_data import can_read
from everyformer.network.act import (
    ActState,
    Epsilon,
    HaltingUnit,
    Mode,
    all_halted,
    mean_ponder,
    not_padding,
    step_weights,
)
from everyformer.network.cache import Entry, LayerInputs
from everyformer.network.depth import Depth, DepthModule, Entries
from everyformer.network.layer import Layer, LayerModule
from everyformer.network.position import Position
from everyformer.network.residual import Residual
from everyformer.value import Few, NotNegative, Value

GATHER_KERNELS = ("auto", "reference", "sdpa")  # the kernels that support a part of the queries
GATHER_SHARE = 0.6  # the share of running positions up to which gathering them is faster


class Repeat(Depth, Value, frozen=True):
    """The given `layers` `steps` times with the same weights, each sublayer in the `residual`. `position` is added before each step.

    Example: `Repeat(6, (Layer((Attention(Standard(4)), FeedForward(128))),), PostNorm())`.
    """

    steps: Few
    layers: tuple[Layer, ...]
    residual: Residual
    position: Position | None = None

    def build(self, width: int) -> DepthModule:
        return RepeatModule(width, self)


class Halt(Depth, Value, frozen=True):
    """The given `layers` at most `steps` times with the same weights, until each position halts (ACT: Graves 2016).

    residual   that of every sublayer; `position` is added before each step
    mode       of a position that has halted: graves (its state keeps changing), freeze (its state is copied), or t2t (as
               tensor2tensor's code)
    epsilon    a position halts when its halting probabilities sum to 1 - epsilon
    cost       of each step in the loss, in nats
    bias       the initial bias of the halting unit: 1 for few steps at first, -3 for many
    Example: `Halt(8, (Layer((Attention(Standard(4)), FeedForward(128))),), PostNorm())`.
    """

    steps: Few
    layers: tuple[Layer, ...]
    residual: Residual
    position: Position | None = None
    mode: Mode = "graves"
    epsilon: Epsilon = 0.01
    cost: NotNegative = 0.01
    bias: float = 1.0

    def build(self, width: int) -> DepthModule:
        return RepeatModule(width, self)


class RepeatModule(DepthModule):
    def __init__(self, width: int, value: Repeat | Halt):
        layers = [LayerModule(width, layer, value.residual) for layer in value.layers]
        super().__init__(layers, value.residual.build_stream(width))
        self.value, self.executions = value, value.steps
        self.position = value.position.build(width) if value.position else None
        self.unit = HaltingUnit(width, value.bias) if isinstance(value, Halt) else None
        first, *others = layers[0].sublayers
        # A frozen position needs only its entry if that is made from the layer's input, and nothing else mixes positions.
        self.freezes = (
            isinstance(value, Halt)
            and value.mode == "freeze"
            and len(layers) == 1
            and first.updates
            and all(sublayer.pointwise for sublayer in others)
        )
        normal = value.residual.norm is None or not value.residual.norm.mixes_positions
        self.can_gather = self.freezes and normal and first.gathers
        self.gather = False  # set by a run

    def forward(self, x_BTD: Tensor, context: Context, entries: Entries) -> tuple[Tensor, tuple[Entry, ...] | None]:
        value, visible_BT = self.value, context.positions.visible_BQ()
        stream = self.stream.start(x_BTD)
        act = ActState(value.mode, value.epsilon, not_padding(x_BTD, visible_BT)) if isinstance(value, Halt) else None
        weights: list[Tensor] = []
        new_entries: list[Entry | None] = []
        # Without a cache the encoder's keys are still computed once and passed from step to step.
        given: Sequence[Entry | None] = [None if entry.grows else entry for entry in self._entries_of_a_step()]
        for step in range(value.steps):
            if entries is not None:
                size = len(entries) // value.steps
                given = entries[step * size : (step + 1) * size]
            halted = act is not None and all_halted(act.running_BT)
            if halted and entries is None:
                break
            placed = stream
            if self.position is not None:
                placed = self.position(stream, context.positions.query_positions().clamp(min=0), step)  # eq. W32
            if halted and self.freezes:
                new_entries += self._frozen_entries(placed, context, given, new_entries)
                continue
            if step and self.gather and self.can_gather and act is not None:
                after, new = self._gathered_step(placed, context, given, act.running_BT)
            else:
                after, new = self._step(placed, context, given)
            new_entries += [] if entries is None else new
            given = [entry if entry is not None and not entry.grows else None for entry in new]
            if act is not None and isinstance(value, Halt):
                ran_BT1 = act.running_BT[..., None]
                h_BT = self.unit(placed if value.mode == "t2t" else after)  # type: ignore[misc]
                weights.append(act.add(h_BT, after, step + 1 == value.steps))
                after = torch.where(ran_BT1, after, stream) if value.mode == "freeze" else after
            stream = after
        if act is not None:
            stream = self._finish_halting(act, weights, context, x_BTD)
        output_BTD = self.stream.finish(stream, visible_BT)
        return output_BTD, None if entries is None else tuple(entry for entry in new_entries if entry is not None)

    def _finish_halting(self, act: ActState, weights: list[Tensor], context: Context, x_BTD: Tensor) -> Tensor:
        """The weighted mean of the states; adds the ponder cost, and the weights to a probe."""
        value = self.value
        assert isinstance(value, Halt) and isinstance(act.y_BTD, Tensor) and isinstance(act.ponder_BT, Tensor)
        if value.cost:
            cost = value.cost * mean_ponder(act.ponder_BT, context.positions.visible_BQ())
            context.call.losses.append(("ponder", cost))
        if context.call.probe is not None:
            context.call.probe.halts.append(step_weights(weights, value.steps, value.mode))
        return act.y_BTD.to(x_BTD.dtype)

    def _entries_of_a_step(self) -> list[Entry]:
        return [entry for layer in self.layer_modules() for entry in layer.new_entries()]

    def _step(self, stream: Any, context: Context, entries: Sequence[Entry | None]) -> tuple[Any, list[Entry | None]]:
        call = (stream, context, entries, 0, len(self.layers))
        # Each step is recomputed by itself, whatever the number of segments.
        output: tuple[Any, list[Entry | None]] = (
            checkpoint(self.run_layers, *call, use_reentrant=False) if self.recomputes else self.run_layers(*call)
        )
        return output

    def _gathered_step(
        self, x_BTD: Tensor, context: Context, entries: Sequence[Entry | None], running_BT: Tensor
    ) -> tuple[Tensor, list[Entry | None]]:
        """A step of the running positions alone. The others only contribute their keys."""
        positions, length = context.positions, running_BT.shape[1]
        whole = (
            context.call.probe is not None
            or context.call.kernel not in GATHER_KERNELS
            or isinstance(entries[0], LayerInputs)
            or not can_read(running_BT)
        )
        count = length if whole else int(running_BT.sum(1).max())
        if count > GATHER_SHARE * length:
            return self._step(x_BTD, context, entries)
        index_BQ = (~running_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
        position_BQ = positions.query_positions().expand_as(running_BT).gather(1, index_BQ)
        position_BQ = torch.where(running_BT.gather(1, index_BQ), position_BQ, -1)
        near = replace(positions, queries=count, query_BQ=position_BQ, key_BK=positions.key_positions())
        some = replace(context, positions=near)
        if context.encoder is not None:
            cross = replace(context.encoder.context.positions, queries=count, query_BQ=position_BQ)
            encoder = replace(context.encoder, context=replace(context.encoder.context, positions=cross))
            some = replace(some, encoder=encoder)
        index_BQD = index_BQ[..., None].expand(-1, -1, x_BTD.shape[-1])
        call = (x_BTD, x_BTD.gather(1, index_BQD), context, some, entries)
        recomputes = self.recomputes
        output_BQD, new = (
            checkpoint(self._run_gathered, *call, use_reentrant=False) if recomputes else self._run_gathered(*call)
        )
        return x_BTD.scatter(1, index_BQD, output_BQD.to(x_BTD.dtype)), new

    def _run_gathered(
        self, x_BTD: Tensor, x_BQD: Tensor, context: Context, some: Context, entries: Sequence[Entry | None]
    ) -> tuple[Tensor, list[Entry | None]]:
        """The layer at the positions x_BQD, whose first sublayer attends to all positions x_BTD."""
        layer: Any = self.layers[0]
        updated = self._updated(x_BTD, context, entries[0])
        stream, visible_BQ = layer.add_position(x_BQD, some), some.positions.visible_BQ()
        first, *others = layer.sublayers
        stream, _ = layer.residuals[0](stream, lambda x: (first.gather(x, some, updated), None), visible_BQ)
        rest = list(entries[1:])
        new: list[Entry | None] = [updated]
        for sublayer, residual in zip(others, list(layer.residuals)[1:], strict=True):
            keeps = sublayer.new_entry() is not None
            stream, entry = residual(stream, sublayer.execution(some, rest.pop(0) if keeps else None), visible_BQ)
            new += [entry] if keeps else []
        return stream, new

    def _updated(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> Entry:
        """The entry of the first sublayer after a step, without the outputs of the step."""
        layer: Any = self.layers[0]
        stream, residual = layer.add_position(x_BTD, context), layer.residuals[0]
        if isinstance(entry, LayerInputs):
            return entry.append(residual.input(stream))
        normalized_BTD = residual.normalize(residual.input(stream), context.positions.visible_BQ())
        updated: Entry = layer.sublayers[0].update(normalized_BTD, context, entry)
        return updated

    def _frozen_entries(
        self, x_BTD: Tensor, context: Context, entries: Sequence[Entry | None], computed: list[Entry | None]
    ) -> list[Entry | None]:
        """The entries of a step in which no position runs: the keys of the frozen states, and the encoder's keys."""
        size = len(entries)
        return [self._updated(x_BTD, context, entries[0]), *computed[1:size]]
