"""The call of a network as tensors with names: what goes in, with which shapes, and what comes out.

`torch.export` and ONNX record a call, so every argument must be a tensor. A model of tokens has the input `tokens` of the shape
(batch, length); what else there is follows from the model: padding where it would change an output, segments, edges, an encoder's
inputs. Sizes with a name are open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import SideInputs
from everyformer.attention.score_mod import ImageBias
from everyformer.network.embed import Embed, Features, Mixed, Nodes, Patches, Tokens
from everyformer.network.grid import Grid
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify, Language, Logistics, Masked, PerToken, Regress, ReplacedToken
from everyformer.value import snake

MEANINGS: dict[type, str] = {  # of outputs
    Language: "logits of the next token, at each position",
    Masked: "logits of the token itself, at each position",
    ReplacedToken: "the logit that the token was replaced, at each position",
    Classify: "logits of the classes",
    Regress: "numbers, in units of `std` from `mean` on where config.json has these",
    PerToken: "logits of each position",
    Logistics: "a mixture of logistic distributions of the next pixel, at each position",
}


@dataclass(frozen=True)
class NamedInput:
    """One tensor. An axis with a name has an open size, up to `limits[name]` of the signature."""

    name: str
    dtype: torch.dtype
    axes: tuple[str | int, ...]
    meaning: str
    size: int = 1  # whole numbers are below this

    def example(self, sizes: dict[str, int], random: torch.Generator) -> Tensor:
        """A tensor with random content, of these sizes of the open axes."""
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)
        if self.dtype == torch.int64:
            return torch.randint(0, self.size, shape, generator=random)
        if self.dtype.is_floating_point:
            return torch.randn(shape, generator=random, dtype=self.dtype)
        if len(shape) == 3:  # edges, those of a node to itself among them
            return (torch.rand(shape, generator=random) < 0.5) | torch.eye(shape[1], dtype=torch.bool)
        index_T, row_B1 = torch.arange(shape[1]), torch.arange(shape[0])[:, None]
        return index_T < shape[1] - row_B1 % shape[1]  # each row has one more position of padding at its end


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs of one call, and the largest size of the open axes that have one."""

    inputs: tuple[NamedInput, ...]
    outputs: tuple[str, ...]
    limits: dict[str, int]
    cached: dict[str, tuple[str | int, ...]] = field(default_factory=dict)  # the axes of outputs that belong to a cache

    @staticmethod
    def of(value: Model | EncoderDecoder) -> Signature:
        if isinstance(value, EncoderDecoder):
            source, target = (
                Signature(inputs_of(one, prefix), (), limits_of(one, prefix))
                for one, prefix in ((value.encoder, "source_"), (value.decoder, "target_"))
            )
            return Signature(source.inputs + target.inputs, outputs_of(value.decoder), source.limits | target.limits)
        return Signature(inputs_of(value, ""), outputs_of(value), limits_of(value, ""))

    @property
    def open_limits(self) -> dict[str, int]:
        """The limits of axes that are open."""
        return {axis: limit for axis, limit in self.limits.items() if axis in self.open_axes}

    @property
    def open_axes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(axis for one in self.inputs for axis in one.axes if isinstance(axis, str)))

    def example(self, batch: int, length: int, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs; an axis that is shorter by its limit has its limit."""
        random = torch.Generator().manual_seed(seed)
        sizes = {axis: min(length, self.limits.get(axis, length)) for axis in self.open_axes} | {"batch": batch}
        return {one.name: one.example(sizes, random) for one in self.inputs}


def output_axes(
    signature: Signature, given: dict[str, Tensor], outputs: tuple[Tensor, ...]
) -> dict[str, list[str | int]]:
    """The axes of each output, with the names of open axes, from the sizes of one call."""
    lengths = {
        size: axis for one in signature.inputs for axis, size in zip(one.axes, given[one.name].shape, strict=True)
        if isinstance(axis, str)
    }  # fmt: skip
    return {
        name: list(signature.cached[name])
        if name in signature.cached
        else ["batch", *(lengths.get(size, size) for size in x.shape[1:-1]), x.shape[-1]]
        for name, x in zip(signature.outputs, outputs, strict=True)
    }


def call(network: Network | PairNetwork, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Returns the outputs of a network for the inputs of its signature."""
    if isinstance(network, PairNetwork):
        encoder, decoder = network.value.encoder, network.value.decoder
        source, options = arguments(encoder, given, "source_")
        encoder_output = network.encode(source, visible=options["visible"])
        target, options = arguments(decoder, given, "target_")
        output = network.decode(target, encoder_output, **options)
    else:
        inputs, options = arguments(network.value, given, "")
        output = network(inputs, **options)
    logits = output.hidden if output.logits is None else output.logits
    return logits if isinstance(logits, tuple) else (logits,)


def grid_of(value: Model, length: int) -> tuple[int, int]:
    """The rows and columns of patches of an image for this model, at most `length` if its positions have no end."""
    score_mods = [one for sublayer in value.body.sublayers() for one in getattr(sublayer, "score_mods", ())]
    positions = [value.position, *(layer.position for layer in value.body.layers)]
    limit = value.limit()
    for one in (*score_mods, *positions):
        if isinstance(one, ImageBias | Grid) and limit in (None, one.rows * one.columns + value.class_token):
            return one.rows, one.columns
    side = math.isqrt(length if limit is None else limit - value.class_token)
    return (side, side) if limit is None or side * side + value.class_token == limit else (1, limit - value.class_token)


def meanings(value: Model | EncoderDecoder) -> tuple[str, ...]:
    """What each output is, in words."""
    if isinstance(value, EncoderDecoder):
        return meanings(value.decoder)
    if not value.outputs:
        return ("vectors of the last layer, at each position",)
    return tuple(MEANINGS.get(type(head), f"the output of {type(head).__name__}") for head in value.outputs)


def outputs_of(value: Model | EncoderDecoder) -> tuple[str, ...]:
    """The names of the outputs."""
    if isinstance(value, EncoderDecoder):
        return outputs_of(value.decoder)
    if len(value.outputs) > 1:
        return tuple(f"{snake(type(head).__name__)}_{number}" for number, head in enumerate(value.outputs))
    return ("logits",) if value.outputs else ("hidden",)


def limits_of(value: Model, prefix: str) -> dict[str, int]:
    limit = value.limit()
    return {} if limit is None else {f"{prefix}length": limit - value.class_token}


def reads_of(value: Model) -> set[str]:
    return set[str]().union(*(sublayer.reads() for sublayer in value.body.sublayers()))


def _takes_padding(value: Model) -> bool:
    """Whether padding after a sequence would change its outputs, and can be told from its tokens."""
    pools = any(isinstance(head, Classify | Regress) for head in value.outputs)
    return not isinstance(value.embed, Patches | Mixed) and (pools or not value.body.is_causal())


def inputs_of(value: Model, prefix: str) -> tuple[NamedInput, ...]:
    length, reads = f"{prefix}length", reads_of(value)
    found = _embedded(value.embed, value, prefix)
    if _takes_padding(value):
        meaning = "true where a position is real, false where it is padding"
        found += (NamedInput(f"{prefix}visible", torch.bool, ("batch", length), meaning),)
    if value.segments:
        meaning = f"the segment of each token, 0 to {value.segments - 1}; zeros for one text"
        found += (NamedInput(f"{prefix}segments", torch.int64, ("batch", length), meaning, value.segments),)
    if "documents" in reads:
        meaning = "the number of the document that each token belongs to; zeros for one text"
        found += (NamedInput(f"{prefix}documents", torch.int64, ("batch", length), meaning, 2),)
    if "edges" in reads:
        meaning = "true where a node attends to another one, by its row and the other's column"
        found += (NamedInput(f"{prefix}edges", torch.bool, ("batch", length, length), meaning),)
    if "prefix" in reads:
        meaning = "how many of the first tokens every token attends to"
        found += (NamedInput(f"{prefix}prefix", torch.int64, ("batch",), meaning, 3),)
    return found


def _embedded(embed: Embed, value: Model, prefix: str) -> tuple[NamedInput, ...]:
    axes = ("batch", f"{prefix}length")
    if isinstance(embed, Tokens):
        meaning = f"ids of tokens, 0 to {embed.vocabulary - 1}"
        return (NamedInput(f"{prefix}tokens", torch.int64, axes, meaning, embed.vocabulary),)
    if isinstance(embed, Features | Nodes):
        features = NamedInput(
            f"{prefix}features", torch.float32, (*axes, embed.inputs), "the features of each position"
        )
        kinds = embed.kinds if isinstance(embed, Nodes) else 0
        more = (NamedInput(f"{prefix}kinds", torch.int64, axes, "the kind of each node", kinds),) if kinds else ()
        return (features, *more)
    if isinstance(embed, Patches):
        rows, columns = (count * embed.size for count in grid_of(value, 16))
        meaning = "scaled pixels, by channel, row and column"
        return (NamedInput(f"{prefix}images", torch.float32, ("batch", embed.channels, rows, columns), meaning),)
    if isinstance(embed, Mixed):
        parts = [_embedded(part, value, f"{prefix}part{number}_") for number, (part, _) in enumerate(embed.parts)]
        return tuple(one for part in parts for one in part)
    raise ValueError(f"its input is made by {type(embed).__name__}, an embedding that is not known as tensors")


def arguments(value: Model, given: dict[str, Tensor], prefix: str) -> tuple[Any, dict[str, Any]]:
    """The input of a network and the options of its call."""
    found = {name: given.get(f"{prefix}{name}") for name in ("segments", "documents", "edges", "prefix")}
    side = SideInputs(**found) if any(x is not None for x in found.values()) else None
    return _embedding_input(value.embed, given, prefix), {"visible": given.get(f"{prefix}visible"), "side_inputs": side}


def _embedding_input(embed: Embed, given: dict[str, Tensor], prefix: str) -> Any:
    if isinstance(embed, Mixed):
        return tuple(_embedding_input(part, given, f"{prefix}part{n}_") for n, (part, _) in enumerate(embed.parts))
    if isinstance(embed, Nodes) and embed.kinds:
        return given[f"{prefix}features"], given[f"{prefix}kinds"]
    name = "tokens" if isinstance(embed, Tokens) else "images" if isinstance(embed, Patches) else "features"
    return given[f"{prefix}{name}"]
