"""Depth: how often layers are repeated, and with which weights. A depth maps (x, context, entries) to (x, entries).

`Stack` runs `num_layers` layers with weights of their own, taking the given layers in turn (one: all alike; two: alternating).
`Repeat` and `Halt`, which share weights, are in network/repeat.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everyformer.attention.context import Context
from everyformer.attention.has_data import is_transformed
from everyformer.attention.pattern import Pattern, Prefix
from everyformer.attention.prefix import NOTHING, largest, prefix_of
from everyformer.network.cache import Entry
from everyformer.network.layer import Layer, LayerModule
from everyformer.network.multi_head_attention import AttentionModule
from everyformer.network.residual import Residual, StreamModule
from everyformer.network.sublayer import Sublayer
from everyformer.value import Few, Value

Entries = Sequence[Entry] | None


class Depth:
    """A value that builds a `DepthModule` from layers and a residual. Example: `class Twice(Depth, Value, frozen=True)`."""

    __slots__ = ()
    layers: tuple[Layer, ...]
    residual: Residual

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of Value
        if not self.layers:
            raise ValueError(f"{type(self).__name__.lower()}.layers is empty: give at least one Layer")

    def build(self, width: int) -> DepthModule:
        """Returns the module for a model of this width."""
        raise NotImplementedError

    def sublayers(self) -> Iterator[Sublayer]:
        """The sublayers of all layers, in order."""
        return (sublayer for layer in self.layers for sublayer in layer.sublayers)

    def patterns(self) -> Iterator[Pattern]:
        """The patterns of all self-attentions, and the patterns that they are made of."""
        return (part for sublayer in self.sublayers() for pattern in sublayer.patterns() for part in pattern.walk())

    def is_causal(self) -> bool:
        """Whether positions depend on each other, and none on a later one. Only such a model can use a cache."""
        sublayers = list(self.sublayers())
        return any(one.mixes_positions() for one in sublayers) and not any(one.attends_to_future() for one in sublayers)

    def prefix(self) -> Prefix | None:
        """The first positions, outside of which none depends on a later one: Prefix(0) if it is causal; None if there are none."""
        return largest(NOTHING if not one.attends_to_future() else _prefix_of(one) for one in self.sublayers())

    def is_language_model(self) -> bool:
        """Whether positions depend on each other, and after a prefix none on a later one: it can be computed piece by piece."""
        return self.prefix() is not None and any(one.mixes_positions() for one in self.sublayers())

    def illegal_reasons(self, width: int) -> Iterator[str]:
        """The reasons why it cannot be built at this width, each with a remedy."""
        yield from ()


def _prefix_of(sublayer: Sublayer) -> Prefix | None:
    heads = getattr(getattr(sublayer, "heads", None), "heads", 1)
    return largest(prefix_of(pattern, heads) for pattern in sublayer.patterns()) if sublayer.patterns() else None


class Stack(Depth, Value, frozen=True):
    """`num_layers` layers, each with weights of its own. Example: `Stack(6, (Layer((Attention(Standard(8)),)),), PreNorm())`.

    The values of `layers` take turns if there are fewer than layers; `residual` is that of every sublayer.
    """

    num_layers: Few
    layers: tuple[Layer, ...]
    residual: Residual

    def build(self, width: int) -> DepthModule:
        layers = [self.layers[i % len(self.layers)] for i in range(self.num_layers)]
        return StackModule(
            [LayerModule(width, layer, self.residual) for layer in layers], self.residual.build_stream(width)
        )


class DepthModule(nn.Module):
    """Some layers, and the residual stream through them."""

    executions = 1  # how often each layer is executed

    def __init__(self, layers: Sequence[LayerModule], stream: StreamModule):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        shared: dict[Any, nn.Module] = {}
        for module in self.layers.modules():
            if isinstance(module, AttentionModule):
                module.share_score_mods(shared)
        self.shared = nn.ModuleList(shared.values())
        self.stream = stream
        self.checkpoint_segments = 0  # set by a run: recompute activations in the backward pass, in so many segments

    def forward(self, x_BTD: Tensor, context: Context, entries: Entries) -> tuple[Tensor, tuple[Entry, ...] | None]:
        """`entries` None keeps nothing; otherwise the entries of all executed sublayers are returned, in order."""
        raise NotImplementedError

    def layer_modules(self) -> list[LayerModule]:
        return list(self.layers)  # type: ignore[arg-type]

    def executed(self) -> list[LayerModule]:
        """The layers in the order in which a pass runs them."""
        return self.layer_modules() * self.executions

    def new_entries(self, segment_memory: bool = False) -> list[Entry]:
        """The entries of an empty cache."""
        return [entry for layer in self.executed() for entry in layer.new_entries(segment_memory)]

    def max_distances(self) -> list[int | None]:
        """How far back each entry must reach with the weights as they are; None: to the start."""
        return [distance for layer in self.executed() for distance in layer.max_distances()]

    @property
    def recomputes(self) -> bool:
        """Whether activation checkpointing is on for this pass."""
        wanted = self.checkpoint_segments > 0 and not self.stream.recomputes
        return wanted and self.training and torch.is_grad_enabled() and not is_transformed()

    def run_layers(
        self, stream: Any, context: Context, entries: Sequence[Entry | None], start: int, end: int
    ) -> tuple[Any, list[Entry | None]]:
        """Runs the layers from `start` to `end`. `entries` are those of these layers."""
        left = list(entries)
        new_entries: list[Entry | None] = []
        for layer in self.layer_modules()[start:end]:
            count = sum(layer.keeps)
            stream, new = layer(stream, context, left[:count])  # eq. K0
            left, new_entries = left[count:], new_entries + new
        return stream, new_entries


class StackModule(DepthModule):
    @property
    def has_shortcut(self) -> bool:
        """Whether a layer reads the input of the stack."""
        return any(layer.mix_2 is not None for layer in self.layer_modules())

    def forward(self, x_BTD: Tensor, context: Context, entries: Entries) -> tuple[Tensor, tuple[Entry, ...] | None]:
        counts = [sum(layer.keeps) for layer in self.layer_modules()]
        kept: Sequence[Entry | None] = [None] * sum(counts) if entries is None else entries
        segments = min(self.checkpoint_segments, len(self.layers)) if self.recomputes else 1
        bounds = [len(self.layers) * i // segments for i in range(segments + 1)]
        if self.has_shortcut:
            context = replace(context, side=replace(context.side, embedded=x_BTD))
        stream = self.stream.start(x_BTD, recompute=entries is None and context.call.probe is None)
        new_entries: list[Entry | None] = []
        for start, end in pairwise(bounds):
            first = sum(counts[:start])
            call = (stream, context, kept[first : first + sum(counts[start:end])], start, end)
            # A recomputed segment keeps its input only; dropout is the same in both computations.
            stream, new = (
                checkpoint(self.run_layers, *call, use_reentrant=False) if self.recomputes else self.run_layers(*call)
            )
            new_entries += new
        output_BTD = self.stream.finish(stream, context.positions.visible_BQ())
        return output_BTD, None if entries is None else tuple(entry for entry in new_entries if entry is not None)
