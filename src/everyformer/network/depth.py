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
from everyformer.attention.hashing import Hash, hashing, with_places
from everyformer.attention.heads import Heads
from everyformer.attention.pattern import Full, Pattern, far
from everyformer.attention.rule import Rule, RuleModule, narrowed
from everyformer.attention.scene import Scene
from everyformer.network.feedforward import Convolution, ConvolutionLayer, FeedForward, last
from everyformer.network.past import Entry, Hidden, Keys
from everyformer.network.position import Position
from everyformer.network.wiring import Ends, Wiring
from everyformer.value import Share, Size, Value


@dataclass(frozen=True)
class Source:
    """Another sequence to attend to: the encoder's output, and the scene in which it is seen."""

    x_BSD: Tensor
    scene: Scene


class Attention(Value, frozen=True):
    """Who sees whom, how strongly, through which heads."""

    heads: Heads
    pattern: Pattern = Full()
    rules: tuple[Rule, ...] = ()
    dropout: Share = 0.0  # of the weights

    def build(self, width: int) -> AttentionLayer:
        return AttentionLayer(width, self)


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
    wiring: Wiring
    each: tuple[Layer, ...]  # the kinds of layers with attention; there may be none

    def build(self, width: int) -> nn.Module:
        raise NotImplementedError

    def looks_back_only(self) -> bool:
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

    def looks_back_only(self) -> bool:
        heads = max((one.heads.heads for layer in self.each for one in layer.attentions()), default=1)
        patterns = {layer.attention.pattern for layer in self.each if layer.attention}
        meet = patterns or any(isinstance(layer.feedforward, Convolution) for layer in self.each)
        ahead = any(pattern.looks_ahead(heads=heads) for pattern in patterns)
        return bool(meet) and not ahead and not any(layer.spreads() for layer in self.each)


class Stack(Layered, Value, frozen=True):
    layers: Size
    each: tuple[Layer, ...]
    wiring: Wiring

    def build(self, width: int) -> nn.Module:
        layers = [self.each[number % len(self.each)] for number in range(self.layers)]
        return StackLayers([LayerModule(width, layer, self.wiring) for layer in layers], self.wiring.ends(width))


class AttentionLayer(nn.Module):
    """Project, remember, attend, merge."""

    def __init__(self, width: int, value: Attention):
        super().__init__()
        self.heads = value.heads.build(width)
        sizes = (self.heads.heads, self.heads.key_width, self.heads.value_width)
        self.rules = nn.ModuleList(rule.build(*sizes) for rule in value.rules)
        self.pattern, self.dropout, self.values = value.pattern, value.dropout, value.rules
        self.hash = next((Hash(part, *sizes[:2]) for part in hashing(value.pattern)), None)

    def share(self, known: dict[Any, nn.Module]) -> None:
        """Take the modules of shared rules from what earlier attentions had, and leave the others for later ones."""
        for number, rule in enumerate(self.values):
            if rule.shared:
                key = (rule, self.heads.heads, self.heads.key_width, self.heads.value_width)
                self.rules[number] = known.setdefault(key, self.rules[number])

    def far(self) -> int | None:
        """How far away the farthest key can be that is seen with the weights as they are; None: there is no end.

        Nor is there where keys are hashed: one that is too far away to be seen still says that a query is not alone.
        """
        if self.hash is not None or torch.compiler.is_compiling():
            return None
        return far(narrowed(self.pattern, self.rules))  # type: ignore[arg-type]

    def forward(
        self, x_BTD: Tensor, scene: Scene, keys: Keys | None, places: list[Tensor] | None = None
    ) -> tuple[Tensor, Keys]:
        """Self-attention over what is in `keys` and x itself.

        Where keys are hashed, their places are put into `places`; places that are there already are taken as they are.
        """
        q_BHQE, k_BHTE, v_BHTE = self.heads.project(x_BTD)
        keys = self.join(keys, Keys(k_BHTE, v_BHTE))
        if any(rule.reads_inputs for rule in self.rules):
            scene = replace(scene, x_BQD=x_BTD)
        if self.hash is not None:
            places = [] if places is None else places
            if not places:
                places.append(self.hash(keys.bucket_BHKR, scene))
            scene = with_places(scene, places[0])
        return self._attend(q_BHQE, keys, scene), keys

    def across(self, x_BTD: Tensor, source: Source, keys: Keys | None) -> tuple[Tensor, Keys]:
        """Cross-attention; the keys of the source are computed once and then come with the past."""
        keys = keys or Keys(*self.heads.memory(source.x_BSD), fixed=True)
        return self._attend(self.heads.query(x_BTD), keys, source.scene), keys

    def join(self, keys: Keys | None, new: Keys) -> Keys:
        return self._hashed(new) if keys is None else self._hashed(keys).append(self._hashed(new))

    def _hashed(self, keys: Keys) -> Keys:
        """With their buckets, if this attention hashes and they have none yet."""
        if self.hash is None or keys.bucket_BHKR is not None:
            return keys
        return replace(keys, bucket_BHKR=self.hash.buckets(keys.k_BHKE))

    def _attend(self, q_BHQE: Tensor, keys: Keys, scene: Scene) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        rules: list[RuleModule] = list(self.rules)  # type: ignore[arg-type]
        answer_BHQE = attend(
            q_BHQE,
            keys.k_BHKE,
            keys.v_BHKE,
            self.pattern,
            rules,
            scene=scene,
            scale=self.heads.scale,
            dropout=dropout,
        )
        return self.heads.merge(answer_BHQE)


class DepthLayer(nn.Module):
    """One layer of a depth. Its sublayers change the state by their steps of the wiring."""

    entries: int  # how many it leaves in a past

    def far(self) -> tuple[int | None, ...]:
        """How far back each of its parts can look with the weights as they are; None: there is no end."""
        return ()

    def forward(
        self, state: Any, scene: Scene, past: list[Any] | None, source: Source | None
    ) -> tuple[Any, list[Entry]]:
        """`past` holds the entries of this layer, or nothing yet; None keeps none. The new ones are returned."""
        raise NotImplementedError


class LayerModule(DepthLayer):
    """Attention, cross-attention, feed-forward or convolutional net."""

    def __init__(self, width: int, value: Layer, wiring: Wiring):
        super().__init__()
        self.attention = value.attention.build(width) if value.attention else None
        self.cross = value.cross.build(width) if value.cross else None
        self.position = value.position.build(width) if value.position else None
        self.feedforward = value.feedforward.build(width) if value.feedforward else None
        self.entries = len(value.attentions()) + (isinstance(value.feedforward, Convolution) and not value.spreads())
        self.steps = nn.ModuleDict(
            {
                name: wiring.step(width)
                for name in ("attention", "cross", "feedforward")
                if getattr(value, name) is not None
            }
        )

    def far(self) -> tuple[int | None, ...]:
        net = self.feedforward
        ends = () if self.attention is None else (self.attention.far(),)
        return (*ends, net.value.reach) if isinstance(net, ConvolutionLayer) else ends

    def forward(
        self, state: Any, scene: Scene, past: list[Any] | None, source: Source | None
    ) -> tuple[Any, list[Entry]]:
        visible_BT, left, here = scene.visible_BQ(), list(past or ()), scene
        state = self._enter(state, scene)
        found: list[Entry] = []
        if (attention := self.attention) is not None:
            step: Any = self.steps["attention"]
            before = left.pop(0) if left else None
            entry = _append(before, step.stream(state), scene) if scene.hidden else None
            if isinstance(before, Hidden):  # the norms of a model with a past mix no positions: none has to be marked
                here = scene if (end := attention.far()) is None else scene.nearer(end)
                seen_BMD = before.x_BMD[:, scene.keys - here.keys :]  # the others need no keys
                before = Keys(*attention.heads.memory(step.view(seen_BMD, None)))
            # A reversible stack computes this twice, from a stream that comes back to rounding: who saw whom must stay.
            places: list[Tensor] = []

            def attended(x_BTD: Tensor) -> tuple[Tensor, Keys]:
                if isinstance(before, Keys) and before.fixed:  # those of all positions, of which only some are asked
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
        if isinstance(net := self.feedforward, ConvolutionLayer):
            step, rows = self.steps["feedforward"], left.pop(0) if left else None
            if net.value.causal:
                found.append(_append(rows, step.stream(state), scene))
            state, _ = step(state, lambda x: (_convolve(net, step, x, rows, scene), None), visible_BT)
        elif net is not None:
            state, _ = self.steps["feedforward"](state, lambda x: (net(x), None), visible_BT)
        if scene.layers is not None:
            scene.layers.append(state)
        return state, found

    def keys(self, state: Any, scene: Scene, past: list[Any]) -> list[Entry]:
        """The entry of its attention alone, as `forward` makes it, without computing what becomes of the state."""
        assert self.attention is not None
        state = self._enter(state, scene)
        step: Any = self.steps["attention"]
        entry: Any = past[0] if past else None
        if scene.hidden:
            return [_append(entry, step.stream(state), scene)]
        new = Keys(*self.attention.heads.memory(step.view(step.stream(state), scene.visible_BQ())))
        return [self.attention.join(entry, new)]

    def _enter(self, state: Any, scene: Scene) -> Any:
        return state if self.position is None else self.position(state, scene.query_positions().clamp(min=0))


def _append(rows: Hidden | None, x_BTD: Tensor, scene: Scene) -> Hidden:
    x_BTD = x_BTD.detach() if scene.hidden else x_BTD
    return Hidden(x_BTD) if rows is None else rows.append(x_BTD)


def _convolve(net: ConvolutionLayer, step: Any, x_BTD: Tensor, rows: Hidden | None, scene: Scene) -> Tensor:
    """The convolution of what is new, which looks back at what the past holds of its inputs."""
    if rows is None:
        return net(x_BTD, scene.visible_BQ())
    before_BM = None if scene.in_place else scene.key_positions()[:, : scene.keys - scene.queries] >= 0
    tail_BMD, seen_BM = last(rows.x_BMD, net.value.reach, before_BM)
    now_BT = scene.visible_BQ()
    if seen_BM is not None and now_BT is not None:
        now_BT = torch.cat((seen_BM, now_BT.expand(x_BTD.shape[:2])), dim=1)
    whole_BTD = torch.cat((step.view(tail_BMD, None), x_BTD), dim=1)
    return net(whole_BTD, now_BT)[:, tail_BMD.shape[1] :]


class Layers(nn.Module):
    """Some layers, one after the other, between the ends of a wiring: what the depths are made of."""

    def __init__(self, layers: Sequence[DepthLayer], ends: Ends):
        super().__init__()
        self.layers = nn.ModuleList(layers)
        shared: dict[Any, nn.Module] = {}
        for module in self.layers.modules():
            if isinstance(module, AttentionLayer):
                module.share(shared)
        self.shared = nn.ModuleList(shared.values())
        self.ends = ends
        self.entries = [layer.entries for layer in layers]
        self.sections = 0  # set by a run: recompute activations in the backward pass, so many sections at a time

    @property
    def recomputing(self) -> bool:
        return self.sections > 0 and not self.ends.recomputes and self.training and torch.is_grad_enabled()

    def check(self, past: tuple[Entry, ...] | None, times: int = 1) -> None:
        wanted = times * sum(self.entries)
        if past and len(past) != wanted:
            raise ValueError(
                f"the past has {len(past)} entries, the model makes {wanted}: it is of another model; begin with Past()"
            )

    def section(
        self, state: Any, scene: Scene, past: Sequence[Any] | None, source: Source | None, section: tuple[int, int]
    ) -> tuple[Any, list[Entry]]:
        """Some of the layers, and what they leave for later; `past` is of all of them, None keeps nothing."""
        found: list[Entry] = []
        for number in range(*section):
            start = sum(self.entries[:number])
            mine = None if past is None else list(past[start : start + self.entries[number]])
            state, kept = self.layers[number](state, scene, mine, source)
            found += kept if past is not None else []
        return state, found


class StackLayers(Layers):
    def forward(
        self, x_BTD: Tensor, scene: Scene, past: tuple[Entry, ...] | None, source: Source | None
    ) -> tuple[Tensor, tuple[Entry, ...] | None, dict[str, Tensor]]:
        """`past` None keeps nothing; otherwise the entries of every layer come back, in the order of execution."""
        self.check(past)
        recompute = self.recomputing
        sections = self.sections if recompute else 1
        bounds = [len(self.layers) * number // sections for number in range(sections + 1)]
        state = self.ends.open(x_BTD, again=past is None and scene.probe is None)
        found: list[Entry] = []
        for section in pairwise(bounds):
            given = (state, scene, past, source, section)
            # Recomputed sections keep only their input; dropout falls alike in both computations.
            state, kept = checkpoint(self.section, *given, use_reentrant=False) if recompute else self.section(*given)
            found += kept
        return self.ends.close(state, scene.visible_BQ()), None if past is None else tuple(found), {}
