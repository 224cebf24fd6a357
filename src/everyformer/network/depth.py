"""Depth: how often, and with which weights. A depth maps (x, scene, past, source) to (x, past, costs).

A `Layer` is attention, optionally cross-attention over a source, and a feed-forward or convolutional net. `Stack` runs `layers` of them
with weights of their own, going round the given ones in turn (one: all alike; two: alternating patterns).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everyformer.attention.attend import attend
from everyformer.attention.context import Context
from everyformer.attention.hashing import Hash, hashing
from everyformer.attention.pattern import Full, Pattern
from everyformer.attention.projection import Projection
from everyformer.attention.score_mod import ScoreMod, ScoreModModule, narrow_pattern
from everyformer.network.cache import Entry, KVCache, LayerInputs
from everyformer.network.feedforward import Convolution, ConvolutionModule, FeedForward, last
from everyformer.network.position import Position
from everyformer.network.residual import Residual, Stream
from everyformer.value import Share, Size, Value


@dataclass(frozen=True)
class Source:
    """Another sequence to attend to: the encoder's output, and the scene in which it is seen."""

    x_BSD: Tensor
    context: Context


class Attention(Value, frozen=True):
    """Who sees whom, how strongly, through which heads."""

    heads: Projection
    pattern: Pattern = Full()
    score_mods: tuple[ScoreMod, ...] = ()
    dropout: Share = 0.0  # of the weights

    def build(self, width: int) -> AttentionModule:
        return AttentionModule(width, self)


class Layer(Value, frozen=True):
    """The sublayers of one layer, in order: attention, cross-attention, feed-forward or convolution; each may be absent.

    A `position` is added to what enters the layer, from a table of its own (Al-Rfou et al. 2018).
    """

    attention: Attention | None
    feedforward: FeedForward | Convolution | None = None
    cross: Attention | None = None
    position: Position | None = None

    def attentions(self) -> tuple[Attention, ...]:
        return tuple(one for one in (self.attention, self.cross) if one is not None)

    def spreads(self) -> bool:
        """Has it a convolution to both sides?"""
        return isinstance(self.feedforward, Convolution) and not self.feedforward.causal


class Depth:
    """A value that builds a module (x, scene, past, source) -> (x, past, costs)."""

    __slots__ = ()
    residual: Residual
    each: tuple[Layer, ...]  # the kinds of layers with attention; there may be none

    def build(self, width: int) -> nn.Module:
        raise NotImplementedError

    def is_causal(self) -> bool:
        """Do positions meet, and none of them one that comes later?"""
        raise NotImplementedError

    def parts(self) -> Iterator[Pattern]:
        """All parts of all patterns."""
        return (part for layer in self.each for one in layer.attentions() for part in one.pattern.walk())


class Layered(Depth):
    """A depth that is made of the given layers."""

    __slots__ = ()

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the value
        if not self.each:
            raise ValueError(f"{type(self).__name__.lower()}.each is empty: give at least one Layer")

    def is_causal(self) -> bool:
        heads = max((one.heads.heads for layer in self.each for one in layer.attentions()), default=1)
        patterns = {layer.attention.pattern for layer in self.each if layer.attention}
        meet = patterns or any(isinstance(layer.feedforward, Convolution) for layer in self.each)
        ahead = any(pattern.attends_to_future(heads=heads) for pattern in patterns)
        return bool(meet) and not ahead and not any(layer.spreads() for layer in self.each)


class Stack(Layered, Value, frozen=True):
    layers: Size
    each: tuple[Layer, ...]
    residual: Residual

    def build(self, width: int) -> nn.Module:
        layers = [self.each[number % len(self.each)] for number in range(self.layers)]
        return StackLayers([LayerModule(width, layer, self.residual) for layer in layers], self.residual.ends(width))


class AttentionModule(nn.Module):
    """Project, remember, attend, merge."""

    def __init__(self, width: int, value: Attention):
        super().__init__()
        self.heads = value.heads.build(width)
        sizes = (self.heads.heads, self.heads.key_width, self.heads.value_width)
        self.score_mods = nn.ModuleList(score_mod.build(*sizes) for score_mod in value.score_mods)
        self.pattern, self.dropout, self.values = value.pattern, value.dropout, value.score_mods
        self.hash = next((Hash(part, *sizes[:2]) for part in hashing(value.pattern)), None)

    def share(self, known: dict[Any, nn.Module]) -> None:
        """Take the modules of shared rules from what earlier attentions had, and leave the others for later ones."""
        for number, score_mod in enumerate(self.values):
            if score_mod.shared:
                key = (score_mod, self.heads.heads, self.heads.key_width, self.heads.value_width)
                self.score_mods[number] = known.setdefault(key, self.score_mods[number])

    def max_distance(self) -> int | None:
        """How far away the farthest key can be that is seen with the weights as they are; None: there is no end.

        Nor is there where keys are hashed: one that is too far away to be seen still says that a query is not alone.
        """
        if self.hash is not None or torch.compiler.is_compiling():
            return None
        return narrow_pattern(self.pattern, self.score_mods).max_distance()  # type: ignore[arg-type]

    def forward(
        self, x_BTD: Tensor, context: Context, keys: KVCache | None, places: list[Tensor] | None = None
    ) -> tuple[Tensor, KVCache]:
        """Self-attention over what is in `keys` and x itself.

        Where keys are hashed, their places are put into `places`; places that are there already are taken as they are.
        """
        q_BHQE, k_BHTE, v_BHTE = self.heads.project(x_BTD)
        keys = self.join(keys, KVCache(k_BHTE, v_BHTE))
        if any(score_mod.reads_inputs for score_mod in self.score_mods):
            context = replace(context, side=replace(context.side, query_inputs=x_BTD))
        if self.hash is not None:
            places = [] if places is None else places
            if not places:
                places.append(self.hash(keys.bucket_BHKR, context))
            context = context.with_hashes(places[0])
        return self._attend(q_BHQE, keys, context), keys

    def across(self, x_BTD: Tensor, source: Source, keys: KVCache | None) -> tuple[Tensor, KVCache]:
        """Cross-attention; the keys of the source are computed once and then come with the past."""
        keys = keys or KVCache(*self.heads.keys_values(source.x_BSD), fixed=True)
        return self._attend(self.heads.query(x_BTD), keys, source.context), keys

    def join(self, keys: KVCache | None, new: KVCache) -> KVCache:
        return self._hashed(new) if keys is None else self._hashed(keys).append(self._hashed(new))

    def _hashed(self, keys: KVCache) -> KVCache:
        """With their buckets, if this attention hashes and they have none yet."""
        if self.hash is None or keys.bucket_BHKR is not None:
            return keys
        return replace(keys, bucket_BHKR=self.hash.buckets(keys.k_BHKE))

    def _attend(self, q_BHQE: Tensor, keys: KVCache, context: Context) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        score_mods: list[ScoreModModule] = list(self.score_mods)  # type: ignore[arg-type]
        answer_BHQE = attend(
            q_BHQE,
            keys.k_BHKE,
            keys.v_BHKE,
            self.pattern,
            score_mods,
            context=context,
            scale=self.heads.scale,
            dropout=dropout,
        )
        return self.heads.merge(answer_BHQE)


class DepthLayer(nn.Module):
    """One layer of a depth. Its sublayers change the state by their steps of the wiring."""

    entries: int  # how many it leaves in a past

    def max_distance(self) -> tuple[int | None, ...]:
        """How far back each of its parts can look with the weights as they are; None: there is no end."""
        return ()

    def forward(
        self, state: Any, context: Context, cache: list[Any] | None, source: Source | None
    ) -> tuple[Any, list[Entry]]:
        """`past` holds the entries of this layer, or nothing yet; None keeps none. The new ones are returned."""
        raise NotImplementedError


class LayerModule(DepthLayer):
    """Attention, cross-attention, feed-forward or convolutional net."""

    def __init__(self, width: int, value: Layer, residual: Residual):
        super().__init__()
        self.attention = value.attention.build(width) if value.attention else None
        self.cross = value.cross.build(width) if value.cross else None
        self.position = value.position.build(width) if value.position else None
        self.feedforward = value.feedforward.build(width) if value.feedforward else None
        self.entries = len(value.attentions()) + (isinstance(value.feedforward, Convolution) and not value.spreads())
        self.steps = nn.ModuleDict(
            {
                name: residual.step(width)
                for name in ("attention", "cross", "feedforward")
                if getattr(value, name) is not None
            }
        )

    def max_distance(self) -> tuple[int | None, ...]:
        net = self.feedforward
        ends = () if self.attention is None else (self.attention.max_distance(),)
        return (*ends, net.value.reach) if isinstance(net, ConvolutionModule) else ends

    def forward(
        self, state: Any, context: Context, cache: list[Any] | None, source: Source | None
    ) -> tuple[Any, list[Entry]]:
        visible_BT, left, here = context.positions.visible_BQ(), list(cache or ()), context
        state = self._enter(state, context)
        found: list[Entry] = []
        if (attention := self.attention) is not None:
            step: Any = self.steps["attention"]
            before = left.pop(0) if left else None
            entry = _append(before, step.stream(state), context) if context.call.segment_memory else None
            if isinstance(
                before, LayerInputs
            ):  # the norms of a model with a past mix no positions: none has to be marked
                here = context if (end := attention.max_distance()) is None else context.crop(end)
                seen_BMD = before.x_BMD[:, context.positions.keys - here.positions.keys :]  # the others need no keys
                before = KVCache(*attention.heads.keys_values(step.view(seen_BMD, None)))
            # A reversible stack computes this twice, from a stream that comes back to rounding: who saw whom must stay.
            places: list[Tensor] = []

            def attended(x_BTD: Tensor) -> tuple[Tensor, KVCache]:
                if isinstance(before, KVCache) and before.fixed:  # those of all positions, of which only some are asked
                    return attention.across(x_BTD, Source(x_BTD, here), before)
                return attention(x_BTD, here, before, places)

            state, keys = step(state, attended, visible_BT)
            found.append(entry or keys)
        if (cross := self.cross) is not None:
            if source is None:
                raise ValueError("this model attends to a source, but none was given; call it with source=")
            known = left.pop(0) if left else None
            state, keys = self.steps["cross"](state, lambda x: cross.across(x, source, known), visible_BT)
            found.append(keys)
        if isinstance(net := self.feedforward, ConvolutionModule):
            step, rows = self.steps["feedforward"], left.pop(0) if left else None
            if net.value.causal:
                found.append(_append(rows, step.stream(state), context))
            state, _ = step(state, lambda x: (_convolve(net, step, x, rows, context), None), visible_BT)
        elif net is not None:
            state, _ = self.steps["feedforward"](state, lambda x: (net(x), None), visible_BT)
        if context.call.layer_outputs is not None:
            context.call.layer_outputs.append(state)
        return state, found

    def keys(self, state: Any, context: Context, cache: list[Any]) -> list[Entry]:
        """The entry of its attention alone, as `forward` makes it, without computing what becomes of the state."""
        assert self.attention is not None
        state = self._enter(state, context)
        step: Any = self.steps["attention"]
        entry: Any = cache[0] if cache else None
        if context.call.segment_memory:
            return [_append(entry, step.stream(state), context)]
        new = KVCache(*self.attention.heads.keys_values(step.view(step.stream(state), context.positions.visible_BQ())))
        return [self.attention.join(entry, new)]

    def _enter(self, state: Any, context: Context) -> Any:
        return (
            state if self.position is None else self.position(state, context.positions.query_positions().clamp(min=0))
        )


def _append(rows: LayerInputs | None, x_BTD: Tensor, context: Context) -> LayerInputs:
    x_BTD = x_BTD.detach() if context.call.segment_memory else x_BTD
    return LayerInputs(x_BTD) if rows is None else rows.append(x_BTD)


def _convolve(net: ConvolutionModule, step: Any, x_BTD: Tensor, rows: LayerInputs | None, context: Context) -> Tensor:
    """The convolution of what is new, which looks back at what the past holds of its inputs."""
    if rows is None:
        return net(x_BTD, context.positions.visible_BQ())
    before_BM = (
        None
        if context.positions.in_order
        else context.positions.key_positions()[:, : context.positions.keys - context.positions.queries] >= 0
    )
    tail_BMD, seen_BM = last(rows.x_BMD, net.value.reach, before_BM)
    now_BT = context.positions.visible_BQ()
    if seen_BM is not None and now_BT is not None:
        now_BT = torch.cat((seen_BM, now_BT.expand(x_BTD.shape[:2])), dim=1)
    whole_BTD = torch.cat((step.view(tail_BMD, None), x_BTD), dim=1)
    return net(whole_BTD, now_BT)[:, tail_BMD.shape[1] :]


class Layers(nn.Module):
    """Some layers, one after the other, between the ends of a wiring: what the depths are made of."""

    def __init__(self, layers: Sequence[DepthLayer], ends: Stream):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        shared: dict[Any, nn.Module] = {}
        for module in self.layers.modules():
            if isinstance(module, AttentionModule):
                module.share(shared)
        self.shared = nn.ModuleList(shared.values())
        self.ends = ends
        self.entries = [layer.entries for layer in layers]
        self.checkpoint_segments = (
            0  # set by a run: recompute activations in the backward pass, so many sections at a time
        )

    @property
    def recomputing(self) -> bool:
        return self.checkpoint_segments > 0 and not self.ends.recomputes and self.training and torch.is_grad_enabled()

    def check(self, cache: tuple[Entry, ...] | None, times: int = 1) -> None:
        wanted = times * sum(self.entries)
        if cache and len(cache) != wanted:
            raise ValueError(
                f"the past has {len(cache)} entries, the model makes {wanted}: it is of another model; begin with Past()"
            )

    def section(
        self, state: Any, context: Context, cache: Sequence[Any] | None, source: Source | None, section: tuple[int, int]
    ) -> tuple[Any, list[Entry]]:
        """Some of the layers, and what they leave for later; `past` is of all of them, None keeps nothing."""
        found: list[Entry] = []
        for number in range(*section):
            start = sum(self.entries[:number])
            mine = None if cache is None else list(cache[start : start + self.entries[number]])
            state, kept = self.layers[number](state, context, mine, source)
            found += kept if cache is not None else []
        return state, found


class StackLayers(Layers):
    def forward(
        self, x_BTD: Tensor, context: Context, cache: tuple[Entry, ...] | None, source: Source | None
    ) -> tuple[Tensor, tuple[Entry, ...] | None, dict[str, Tensor]]:
        """`past` None keeps nothing; otherwise the entries of every layer come back, in the order of execution."""
        self.check(cache)
        recompute = self.recomputing
        checkpoint_segments = self.checkpoint_segments if recompute else 1
        bounds = [len(self.layers) * number // checkpoint_segments for number in range(checkpoint_segments + 1)]
        state = self.ends.open(x_BTD, again=cache is None and context.call.probe is None)
        found: list[Entry] = []
        for section in pairwise(bounds):
            given = (state, context, cache, source, section)
            # Recomputed sections keep only their input; dropout falls alike in both computations.
            state, kept = checkpoint(self.section, *given, use_reentrant=False) if recompute else self.section(*given)
            found += kept
        return self.ends.close(state, context.positions.visible_BQ()), None if cache is None else tuple(found), {}
