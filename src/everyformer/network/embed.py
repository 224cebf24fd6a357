"""Embeddings: how the things of the world become tokens of one width.

    Tokens     ids of a vocabulary                W_e[id], times sqrt(D) if scaled (Vaswani et al. 2017)
    Patches    an image cut into squares          W vec(patch) + b                  K; Dosovitskiy et al. 2020
    Features   vectors as they come               W x + b
    Nodes      the nodes of a graph               W x + b + W_kind[kind]
    Mixed      several of these in one sequence   each with its own positions and a learned mark of its kind (B, K)

Which nodes see which is the pattern's business (Graph); an embedding only makes tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.network.describe import describe
from everyformer.network.initial import keep_initialized
from everyformer.network.position import Position
from everyformer.value import Count, Positive, Size, Value

WHOLE = (torch.int64, torch.int32)  # what may number rows of a table


class Embed:
    """A value that builds a module from inputs to B, T, width."""

    __slots__ = ()

    def build(self, width: int) -> EmbedModule:
        raise NotImplementedError


class EmbedModule(nn.Module):
    def check(self, inputs: Any) -> None:
        """Raise a ValueError that names what is wrong with the inputs."""
        raise NotImplementedError


class Tokens(Embed, Value, frozen=True):
    vocabulary: Size
    scaled: bool = False

    def build(self, width: int) -> TokenEmbedding:
        return TokenEmbedding(self.vocabulary, width, width**0.5 if self.scaled else 1.0)


class Patches(Embed, Value, frozen=True):
    """Squares of `size` x `size` pixels in raster order, from images of `channels` x rows x columns."""

    size: Size
    channels: Size = 3

    def build(self, width: int) -> PatchEmbedding:
        return PatchEmbedding(self.size, self.channels, width)


class Features(Embed, Value, frozen=True):
    """Vectors of `inputs` numbers. With a `deviation` the map begins so small, and without an offset; None: as torch does."""

    inputs: Size
    std: Positive | None = None

    def build(self, width: int) -> FeatureEmbedding:
        module = FeatureEmbedding(self.inputs, 0, width)
        if self.std is not None:
            keep_initialized(nn.init.normal_(module.map.weight, std=self.std))
            keep_initialized(nn.init.zeros_(module.map.bias))
        return module


class Nodes(Embed, Value, frozen=True):
    """Nodes with `inputs` features each and, where there are `kinds`, a kind: then the input is (features, kinds)."""

    inputs: Size
    kinds: Count = 0

    def build(self, width: int) -> FeatureEmbedding:
        return FeatureEmbedding(self.inputs, self.kinds, width)


class Mixed(Embed, Value, frozen=True):
    """One sequence of several kinds: the inputs are a tuple, one for each part; a part is (embed, position or None)."""

    parts: tuple[tuple[Embed, Position | None], ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.parts:
            raise ValueError("mixed has no parts: give a tuple of (embed, position) pairs")

    def build(self, width: int) -> MixedEmbedding:
        return MixedEmbedding(self, width)


class TokenEmbedding(EmbedModule):
    def __init__(self, vocabulary: int, width: int, scale: float):
        super().__init__()
        self.vocabulary, self.scale = vocabulary, scale
        self.table = nn.Embedding(vocabulary, width)

    def check(self, inputs: Any) -> None:
        if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.dtype not in WHOLE:
            raise ValueError(
                f"tokens must be whole numbers of the shape batch, time (int64 or int32), not {describe(inputs)}"
            )
        if inputs.numel() == 0:
            raise ValueError(f"tokens have the shape {tuple(inputs.shape)}: give at least one sequence of one token")
        # Under torch.compile the look at the data is left out; a loader's data is checked where it is made.
        if not torch.compiler.is_compiling():
            low, high = (int(x) for x in torch.aminmax(inputs))
            if low < 0 or high >= self.vocabulary:
                wrong = low if low < 0 else high
                raise ValueError(
                    f"token {wrong} is outside the vocabulary of {self.vocabulary} (0 to {self.vocabulary - 1}); "
                    "use the tokenizer that the model was built for, or a larger vocabulary"
                )

    def forward(self, token_BT: Tensor) -> Tensor:
        x_BTD = self.table(token_BT)
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale


class PatchEmbedding(EmbedModule):
    def __init__(self, size: int, channels: int, width: int):
        super().__init__()
        self.size, self.channels = size, channels
        self.map = nn.Linear(channels * size * size, width)

    def check(self, inputs: Any) -> None:
        wanted = f"images must be floats of the shape batch, {self.channels}, rows, columns"
        if not isinstance(inputs, Tensor) or inputs.dim() != 4 or not inputs.is_floating_point():
            raise ValueError(f"{wanted}, not {describe(inputs)}")
        if inputs.shape[1] != self.channels or 0 in inputs.shape:
            raise ValueError(f"{wanted}, not {describe(inputs)}")
        if inputs.shape[2] % self.size or inputs.shape[3] % self.size:
            raise ValueError(
                f"an image of {inputs.shape[2]} x {inputs.shape[3]} does not divide into patches of {self.size} x {self.size}; "
                f"resize it to multiples of {self.size}"
            )

    def forward(self, image_BCYX: Tensor) -> Tensor:
        _check_precision(image_BCYX, self.map.weight)
        return self.map(patches(image_BCYX, self.size))


class FeatureEmbedding(EmbedModule):
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
        if not isinstance(kind, Tensor) or kind.shape != x.shape[:2] or kind.dtype not in WHOLE:
            raise ValueError(
                f"nodes of {self.kinds} kinds: give (features, kinds), kinds of the shape {tuple(x.shape[:2])}, not {describe(kind)}"
            )
        if not torch.compiler.is_compiling() and not 0 <= int(kind.min()) <= int(kind.max()) < self.kinds:
            raise ValueError(
                f"kinds of nodes go from {int(kind.min())} to {int(kind.max())}, but there are {self.kinds} (0 to {self.kinds - 1})"
            )

    def forward(self, inputs: Any) -> Tensor:
        x_BTF, kind_BT = (inputs, None) if self.kind is None else inputs
        _check_precision(x_BTF, self.map.weight)
        x_BTD = self.map(x_BTF)
        return x_BTD if self.kind is None else x_BTD + self.kind(kind_BT)


class MixedEmbedding(EmbedModule):
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
                f"a mixed sequence has {len(self.embeds)} parts: give a tuple of as many inputs, not {describe(inputs)}"
            )
        for embed, part in zip(self.embeds, inputs, strict=True):
            assert isinstance(embed, EmbedModule)
            embed.check(part)

    def forward(self, inputs: tuple[Any, ...]) -> Tensor:
        found = []
        for number, (embed, position, part) in enumerate(zip(self.embeds, self.positions, inputs, strict=True)):
            x_BTD = embed(part)
            length = x_BTD.shape[1]
            if not isinstance(position, nn.Identity):
                check_limit(length, self.limits[number])
                x_BTD = position(x_BTD, torch.arange(length, device=x_BTD.device)[None])
            found.append(x_BTD + self.kind_ND[number])
            if x_BTD.shape[0] != found[0].shape[0]:
                raise ValueError(
                    f"part 0 of a mixed sequence has {found[0].shape[0]} sequences, part {number} {x_BTD.shape[0]}; give as many of each"
                )
        return torch.cat(found, dim=1)


def patches(image_BCYX: Tensor, size: int) -> Tensor:
    """B, P, C * size * size: the squares in raster order, each flattened channel by channel."""
    return F.unfold(image_BCYX, kernel_size=size, stride=size).transpose(1, 2)


def check_limit(length: int, limit: int | None) -> None:
    if limit is not None and length > limit:
        raise ValueError(
            f"position {length - 1} is past the {limit} positions that the model knows; give at most {limit} tokens "
            "(cut the input, or keep its last part), or build the model with a longer table"
        )


def _check_precision(x: Tensor, weight: Tensor) -> None:
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"the input is {x.dtype}, the model {weight.dtype}; give it as input.to({weight.dtype})")
