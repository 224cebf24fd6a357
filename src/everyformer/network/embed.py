"""Embeddings: they map the inputs of a model to a sequence of vectors of the model's width.

    Tokens     ids of a vocabulary                 W_e[id], times sqrt(D) if scaled (Vaswani et al. 2017)
    Patches    an image, split into squares        W vec(patch) + b                 source K; Dosovitskiy et al. 2020
    Features   vectors                             W x + b
    Nodes      the nodes of a graph                W x + b + W_kind[kind]
    Mixed      several of these in one sequence    each with its own positions and a learned vector of its kind (sources B, K)

The edges of a graph belong to the pattern `Graph`, not to the embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.has_data import can_read
from everyformer.network.describe import describe
from everyformer.network.initial import keep_initialized
from everyformer.network.position import Position
from everyformer.value import Count, Positive, Size, Value

INDEX_DTYPES = (torch.int64, torch.int32)


class Embed:
    """A value that builds a module from inputs to B, T, width. Example: `class Bits(Embed, Value, frozen=True)`."""

    __slots__ = ()

    def build(self, width: int) -> EmbedModule:
        """Returns the module for a model of this width."""
        raise NotImplementedError


class EmbedModule(nn.Module):
    """A module from inputs to B, T, width."""

    def check(self, inputs: Any) -> None:
        """Raises ValueError if the inputs are not of the expected kind, shape or range."""
        raise NotImplementedError


class Tokens(Embed, Value, frozen=True):
    """Token ids from 0 to `vocabulary` - 1. `scaled` multiplies the embedding by sqrt(width). Example: `Tokens(256)`."""

    vocabulary: Size
    scaled: bool = False

    def build(self, width: int) -> TokensModule:
        return TokensModule(self.vocabulary, width, width**0.5 if self.scaled else 1.0)


class Patches(Embed, Value, frozen=True):
    """Squares of `size` x `size` pixels in raster order, from images of `channels` x rows x columns.

    Example: `Patches(size=4, channels=3)`.
    """

    size: Size
    channels: Size = 3

    def build(self, width: int) -> PatchesModule:
        return PatchesModule(self.size, self.channels, width)


class Features(Embed, Value, frozen=True):
    """Vectors of `inputs` features. `std` is the initial std of the map, whose bias then starts at 0. Default: as nn.Linear.

    Example: `Features(inputs=12)`.
    """

    inputs: Size
    std: Positive | None = None

    def build(self, width: int) -> FeaturesModule:
        module = FeaturesModule(self.inputs, 0, width)
        if self.std is not None:
            keep_initialized(nn.init.normal_(module.map.weight, std=self.std))
            keep_initialized(nn.init.zeros_(module.map.bias))
        return module


class Nodes(Embed, Value, frozen=True):
    """Nodes with `inputs` features each. With `kinds` above 0 each node also has a kind, and the input is (features, kinds).

    Example: `Nodes(inputs=1433)`.
    """

    inputs: Size
    kinds: Count = 0

    def build(self, width: int) -> FeaturesModule:
        return FeaturesModule(self.inputs, self.kinds, width)


class Mixed(Embed, Value, frozen=True):
    """Several embeddings in one sequence. Each of `parts` is (embed, position or None); the input is a tuple with one item per part.

    Example: `Mixed(((Tokens(256), Learned(64)), (Features(12), None)))`.
    """

    parts: tuple[tuple[Embed, Position | None], ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.parts:
            raise ValueError("mixed has no parts: give a tuple of (embed, position) pairs")

    def build(self, width: int) -> MixedModule:
        return MixedModule(self, width)


class TokensModule(EmbedModule):
    def __init__(self, vocabulary: int, width: int, scale: float):
        super().__init__()
        self.vocabulary, self.scale = vocabulary, scale
        self.table = nn.Embedding(vocabulary, width)

    def check(self, inputs: Any) -> None:
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.dtype not in INDEX_DTYPES:
            raise ValueError(
                f"tokens must be integers of the shape batch, time (int64 or int32), not {describe(inputs)}"
            )
        if inputs.numel() == 0:
            raise ValueError(f"tokens have the shape {tuple(inputs.shape)}: give at least one sequence of one token")
        if can_read(inputs):  # a compiled graph cannot; training data is checked where it is loaded
            low, high = (int(x) for x in torch.aminmax(inputs))
            if low < 0 or high >= self.vocabulary:
                outside = low if low < 0 else high
                raise ValueError(
                    f"token {outside} is outside the vocabulary of {self.vocabulary} (0 to {self.vocabulary - 1}); "
                    "use the tokenizer that the model was built for, or a larger vocabulary"
                )

    def forward(self, token_BT: Tensor) -> Tensor:
        x_BTD = self.table(token_BT)
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale


class PatchesModule(EmbedModule):
    def __init__(self, size: int, channels: int, width: int):
        super().__init__()
        self.size, self.channels = size, channels
        self.map = nn.Linear(channels * size * size, width)

    def check(self, inputs: Any) -> None:
        expected = f"images must be floats of the shape batch, {self.channels}, rows, columns"
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not inputs.is_floating_point():
            raise ValueError(f"{expected}, not {describe(inputs)}")
        if inputs.shape[1] != self.channels or 0 in inputs.shape:
            raise ValueError(f"{expected}, not {describe(inputs)}")
        if inputs.shape[2] % self.size or inputs.shape[3] % self.size:
            raise ValueError(
                f"an image of {inputs.shape[2]} x {inputs.shape[3]} does not divide into patches of {self.size} x {self.size}; "
                f"resize it to multiples of {self.size}"
            )

    def forward(self, image_BCYX: Tensor) -> Tensor:
        _check_precision(image_BCYX, self.map.weight)
        return self.map(patches(image_BCYX, self.size))


class FeaturesModule(EmbedModule):
    """The module of Features and Nodes."""

    def __init__(self, inputs: int, kinds: int, width: int):
        super().__init__()
        self.inputs, self.kinds = inputs, kinds
        self.map = nn.Linear(inputs, width)
        self.kind = nn.Embedding(kinds, width) if kinds else None

    def check(self, inputs: Any) -> None:
        pair = self.kind is not None and isinstance(inputs, tuple) and len(inputs) == 2
        x, kind = inputs if pair else (inputs, None)
        if (
            not isinstance(x, Tensor)
            or x.dim() != 3
            or not x.is_floating_point()
            or x.shape[-1] != self.inputs
            or 0 in x.shape
        ):
            raise ValueError(f"features must be floats of the shape batch, tokens, {self.inputs}, not {describe(x)}")
        if self.kind is None:
            return
        if not isinstance(kind, Tensor) or kind.shape != x.shape[:2] or kind.dtype not in INDEX_DTYPES:
            raise ValueError(
                f"nodes have {self.kinds} kinds: give (features, kinds) with kinds of the shape {tuple(x.shape[:2])}, not {describe(kind)}"
            )
        if can_read(kind) and not 0 <= int(kind.min()) <= int(kind.max()) < self.kinds:
            raise ValueError(
                f"kinds of nodes are {int(kind.min())} to {int(kind.max())}, but the model has {self.kinds} (0 to {self.kinds - 1}); "
                "build it with more kinds"
            )

    def forward(self, inputs: Any) -> Tensor:
        x_BTF, kind_BT = (inputs, None) if self.kind is None else inputs
        _check_precision(x_BTF, self.map.weight)
        x_BTD = self.map(x_BTF)
        return x_BTD if self.kind is None else x_BTD + self.kind(kind_BT)


class MixedModule(EmbedModule):
    def __init__(self, value: Mixed, width: int):
        super().__init__()
        self.embeds = nn.ModuleList(
            embed.build(width if position is None else position.content_width(width)) for embed, position in value.parts
        )
        self.positions = nn.ModuleList(
            nn.Identity() if position is None else position.build(width) for _, position in value.parts
        )
        self.limits = [None if position is None else position.limit() for _, position in value.parts]
        self.kind_ND = nn.Parameter(torch.randn(len(value.parts), width) * 0.02)

    def check(self, inputs: Any) -> None:
        if not isinstance(inputs, tuple | list) or len(inputs) != len(self.embeds):
            raise ValueError(
                f"a mixed sequence has {len(self.embeds)} parts: give a tuple with one input per part, not {describe(inputs)}"
            )
        for embed, part in zip(self.embeds, inputs, strict=True):
            assert isinstance(embed, EmbedModule)
            embed.check(part)

    def forward(self, inputs: tuple[Any, ...]) -> Tensor:
        parts: list[Tensor] = []
        for number, (embed, position, part) in enumerate(zip(self.embeds, self.positions, inputs, strict=True)):
            x_BTD = embed(part)
            length = x_BTD.shape[1]
            if not isinstance(position, nn.Identity):
                check_limit(length, self.limits[number])
                x_BTD = position(x_BTD, torch.arange(length, device=x_BTD.device)[None])
            parts.append(x_BTD + self.kind_ND[number])
            if x_BTD.shape[0] != parts[0].shape[0]:
                raise ValueError(
                    f"part 0 of a mixed sequence has {parts[0].shape[0]} sequences, part {number} has {x_BTD.shape[0]}; give equal numbers"
                )
        return torch.cat(parts, dim=1)


def patches(image_BCYX: Tensor, size: int) -> Tensor:
    """Returns the squares in raster order, each flattened channel by channel: B, P, C * size * size."""
    return F.unfold(image_BCYX, kernel_size=size, stride=size).transpose(1, 2)


def check_limit(length: int, limit: int | None) -> None:
    """Raises ValueError if there are more positions than the model has."""
    if limit is not None and length > limit:
        raise ValueError(
            f"position {length - 1} is past the {limit} positions of the model; give at most {limit} tokens, such as the last ones, "
            "or build the model with a longer table"
        )


def _check_precision(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"the input is {x.dtype}, the model is {weight.dtype}; give input.to({weight.dtype})")
