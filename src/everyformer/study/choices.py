"""Changes one choice of a model: its pattern, score modifications, residual, depth, cache, sublayers, positions or sizes.

    choose(member("gpt2", "tiny"), "pattern", "causal & window(8)")
    choose(member("gpt2", "tiny"), "residual", {"type": "post_norm"})

Each changes all layers, or those that are like the first. The result may be illegal; `illegal` returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from everyformer.attention.parse import parse
from everyformer.attention.projection import Projection, Standard
from everyformer.attention.score_mod import ScoreMod
from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Depth, Stack
from everyformer.network.feedforward import FeedForward
from everyformer.network.layer import Layer
from everyformer.network.legal import illegal_pair_reasons, illegal_reasons
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import OutputHead
from everyformer.network.position import Position
from everyformer.network.residual import Residual
from everyformer.network.sublayer import Sublayer
from everyformer.value import from_json, named

AnyModel = Model | EncoderDecoder
Side = Literal["encoder", "decoder"]


def choose(model: AnyModel, question: str, choice: Any, side: Side = "decoder") -> AnyModel:
    """Returns the model with another choice for a question, one of CHOICES. Of an encoder-decoder it is one side that changes.

    Raises ValueError if the choice is none for this question.
    """
    if question not in CHOICES:
        raise ValueError(f"there is no choice {question!r}; the choices are {', '.join(CHOICES)}")
    if isinstance(model, EncoderDecoder):
        sides = ("encoder", "decoder") if question == "width" else (side,)
        return replace(model, **{one: CHOICES[question](getattr(model, one), choice) for one in sides})
    return CHOICES[question](model, choice)


def illegal(model: AnyModel) -> list[str]:
    """Returns the reasons why a model must not be built; none if it is legal."""
    reasons = illegal_reasons(model) if isinstance(model, Model) else illegal_pair_reasons(model)
    return list(dict.fromkeys(reasons))


def alternatives(width: int, length: int = 64) -> dict[str, list[dict[str, Any]]]:
    """The choices for each question that is answered by a part, as JSON data: every part that is known, with its defaults."""
    fitting: dict[str, dict[str, Any]] = {
        "shaw": {"max_distance": 16}, "image_bias": {"rows": 8, "columns": 8}, "span": {"max_span": length},
        "dynamic_span": {"width": width, "max_span": length}, "four_term": {"width": width},
        "learned": {"length": length}, "joint_mlp": {"length": length, "hidden": width}, "axial": {"sizes": [8, 8, width]},
        "separate_mlp": {"length": length, "hidden": width}, "grid": {"rows": 8, "columns": 8},
        "attention": {"heads": {"type": "standard", "heads": max(1, width // 16)}, "pattern": {"type": "causal"}},
        "cross_attention": {"heads": {"type": "standard", "heads": max(1, width // 16)}},
        "feed_forward": {"hidden": 4 * width}, "convolution": {"hidden": width}, "ponder_rnn": {"steps": 3},
        "classify": {"classes": 2}, "per_token": {"outputs": 2},
    }  # fmt: skip
    protocols: dict[str, type[Any]] = {
        "score_mods": ScoreMod, "residual": Residual, "position": Position, "sublayers": Sublayer, "outputs": OutputHead,
    }  # fmt: skip
    found: dict[str, list[dict[str, Any]]] = {}
    for question, protocol in protocols.items():
        found[question] = []
        for tag in named(protocol):
            try:
                value: Any = _read({"type": tag, **fitting.get(tag, {})}, protocol)
            except ValueError:  # it has fields that have no default
                continue
            found[question].append(msgspec.to_builtins(value))
    return found


def _read(choice: Any, kind: type[Any]) -> Any:
    return from_json(msgspec.json.encode(choice), kind)


def _layers(model: Model, change: Callable[[Sublayer], Sublayer]) -> Model:
    layers = tuple(
        replace(layer, sublayers=tuple(change(one) for one in layer.sublayers)) for layer in model.body.layers
    )
    return replace(model, body=replace(model.body, layers=layers))  # type: ignore[type-var]


def _of_attention(**changes: Any) -> Callable[[Sublayer], Sublayer]:
    return lambda one: replace(one, **changes) if isinstance(one, Attention) else one


def _pattern(model: Model, choice: Any) -> Model:
    return _layers(model, _of_attention(pattern=parse(choice)))


def _score_mods(model: Model, choice: Any) -> Model:
    return _layers(model, _of_attention(score_mods=tuple(_read(one, ScoreMod) for one in choice)))


def _heads(model: Model, choice: Any) -> Model:
    heads: Projection = Standard(choice) if isinstance(choice, int) else _read(choice, Projection)

    def change(one: Sublayer) -> Sublayer:
        if not isinstance(one, Attention):
            return one
        kept = isinstance(choice, int) and isinstance(one.heads, Standard)
        return replace(one, heads=replace(one.heads, heads=choice, key_heads=None) if kept else heads)  # type: ignore[type-var]

    return _layers(model, change)


def _residual(model: Model, choice: Any) -> Model:
    return replace(model, body=replace(model.body, residual=_read(choice, Residual)))  # type: ignore[type-var]


def _depth(model: Model, choice: Any) -> Model:
    body: Any = model.body
    given = dict(choice) | {"layers": [], "residual": msgspec.to_builtins(body.residual)}
    given["layers"] = msgspec.to_builtins(body.layers)
    return replace(model, body=_read(given, Depth))


def _layer_count(model: Model, choice: Any) -> Model:
    name = "num_layers" if isinstance(model.body, Stack) else "steps"
    return replace(model, body=replace(model.body, **{name: choice}))  # type: ignore[type-var]


def _memory(model: Model, choice: Any) -> Model:
    return replace(model, memory=SegmentMemory(choice) if choice else None)


def _position(model: Model, choice: Any) -> Model:
    return replace(model, position=None if choice is None else _read(choice, Position))


def _outputs(model: Model, choice: Any) -> Model:
    return replace(model, outputs=(_read(choice, OutputHead),), auxiliary=None, generator=None)


def _width(model: Model, choice: Any) -> Model:
    """Another width; the hidden layers keep their ratio to it."""

    def change(one: Sublayer) -> Sublayer:
        return replace(one, hidden=max(1, one.hidden * choice // model.width)) if isinstance(one, FeedForward) else one

    return replace(_layers(model, change), width=choice)


def _sublayers(model: Model, choice: Sequence[Any]) -> Model:
    """Other sublayers of the first layer, and of those with sublayers of the same kinds. An attention is that of the layer."""
    sublayers = tuple(_read(one, Sublayer) for one in choice)

    def kinds(layer: Layer) -> list[type[Sublayer]]:
        return [type(one) for one in layer.sublayers]

    def change(layer: Layer) -> Layer:
        if kinds(layer) != kinds(model.body.layers[0]):
            return layer
        attention = next((one for one in layer.sublayers if isinstance(one, Attention)), None)
        kept = tuple(attention if attention and isinstance(one, Attention) else one for one in sublayers)
        return replace(layer, sublayers=kept)

    layers = tuple(change(layer) for layer in model.body.layers)
    return replace(model, body=replace(model.body, layers=layers))  # type: ignore[type-var]


CHOICES: dict[str, Callable[[Model, Any], Model]] = {
    "pattern": _pattern, "score_mods": _score_mods, "heads": _heads, "residual": _residual, "depth": _depth,
    "layers": _layer_count, "memory": _memory, "position": _position, "outputs": _outputs, "width": _width,
    "sublayers": _sublayers,
}  # fmt: skip
