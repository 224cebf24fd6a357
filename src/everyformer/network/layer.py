"""A layer: a sequence of sublayers, each wrapped in the residual."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from everyformer.attention.context import Context
from everyformer.network.cache import Entry, LayerInputs
from everyformer.network.position import Position
from everyformer.network.residual import Residual, ResidualModule
from everyformer.network.sublayer import Sublayer, SublayerModule
from everyformer.value import Value


class Layer(Value, frozen=True):
    """A sequence of `sublayers`: `Layer((Attention(Standard(4)), FeedForward(256)))`.

    A `position` is added to the input of the layer, from a table of its own (Al-Rfou et al. 2018). With `shortcut` the layer reads
    a x + b x_0, with the input x_0 of the stack and learned numbers a and b, at first 1 and 0 (Jordan et al. 2024).
    """

    sublayers: tuple[Sublayer, ...]
    position: Position | None = None
    shortcut: bool = False

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.sublayers:
            raise ValueError("layer.sublayers is empty: give at least one sublayer, such as Attention or FeedForward")


class LayerModule(nn.Module):
    """Runs the sublayers. It does not distinguish their kinds."""

    def __init__(self, width: int, value: Layer, residual: Residual):
        super().__init__()
        self.sublayers = nn.ModuleList(sublayer.build(width) for sublayer in value.sublayers)
        self.position = value.position.build(width) if value.position else None
        self.mix_2 = nn.Parameter(torch.tensor([1.0, 0.0])) if value.shortcut else None
        self.residuals = nn.ModuleList(residual.build(width) for _ in value.sublayers)
        self.keeps = [sublayer.new_entry() is not None for sublayer in self._sublayers()]

    def new_entries(self, segment_memory: bool = False) -> list[Entry]:
        """The entries of an empty cache, one for each sublayer that keeps one."""
        entries = (sublayer.new_entry(segment_memory) for sublayer in self._sublayers())
        return [entry for entry in entries if entry is not None]

    def forward(self, stream: Any, context: Context, entries: Sequence[Entry | None]) -> tuple[Any, list[Entry | None]]:
        """`entries` has one item for each sublayer that keeps one; None keeps nothing. The new entries are returned."""
        if self.mix_2 is not None:
            assert context.side.embedded is not None
            stream = self.mix_2[0] * stream + self.mix_2[1] * context.side.embedded
        stream, left = self.add_position(stream, context), list(entries)
        new_entries: list[Entry | None] = []
        for sublayer, residual, keeps in zip(self._sublayers(), self._residuals(), self.keeps, strict=True):
            stream, new = run(sublayer, residual, stream, context, left.pop(0) if keeps else None)
            new_entries += [new] if keeps else []
        if context.call.layer_outputs is not None:
            context.call.layer_outputs.append(stream)
        return stream, new_entries

    def add_position(self, stream: Any, context: Context) -> Any:
        return (
            stream if self.position is None else self.position(stream, context.positions.query_positions().clamp(min=0))
        )

    def max_distances(self) -> list[int | None]:
        """How far back the entry of each sublayer must reach with the weights as they are; None: to the start."""
        return [one.max_distance() for one, keeps in zip(self._sublayers(), self.keeps, strict=True) if keeps]

    def _sublayers(self) -> list[SublayerModule]:
        return list(self.sublayers._modules.values())  # type: ignore[arg-type]

    def _residuals(self) -> list[ResidualModule]:
        return list(self.residuals._modules.values())  # type: ignore[arg-type]


def run(
    sublayer: SublayerModule, residual: ResidualModule, stream: Any, context: Context, entry: Entry | None
) -> tuple[Any, Entry | None]:
    """Runs one sublayer in its residual.

    The inputs of a sublayer are kept as they are before the norm, so that the norm of a later call applies to them.
    """
    inputs: LayerInputs | None = None
    if isinstance(entry, LayerInputs):
        inputs = entry.append(residual.input(stream))
        entry = replace(entry, normalize=residual.normalize)
    join = residual if context.call.probe is None else residual.probed(context.call.probe)
    stream, new = join(stream, sublayer.execution(context, entry), context.positions.visible_BQ())
    kept = new if inputs is None else inputs
    return stream, None if entry is None else kept  # without a cache nothing is kept alive
