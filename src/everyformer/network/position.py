"""Positions that are added to or joined with the embedded tokens.

Equations, x the embedded token at position i, e_i the i-th unit vector, p_i the vector of a table:
    Learned        x + W_e[i]                                      Bloem 2019 (source B); Gehring et al. 2017
    Concatenated   (x, p_i)                                        source K; with OneHot it is (x, e_i) of source T
    JointMlp       W_z ReLU(W_x x + W_e[i])                        Thickstun (source T) eq. 10
    SeparateMlp    W_zx ReLU(W_x x) + W_ze ReLU(W_e[i])            source T eq. 11
    Sinusoidal and TimePosition are in network/sinusoid.py; Grid and Axial, for images, in network/grid.py

Symbols: i position (k in source T), D width.
Departures: eq. 12 of source T passes x through an MLP and writes x_1 for x_k. Source T credits eq. 11 to Gehring et al., who add the
two embeddings (Learned).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.value import Size, Value


class Position:
    """A value that builds a module `position(x_BTC, position_BT, step)`, from the width C of the embedding to the model's width D.

    Example: `class Clock(Position, Value, frozen=True)`.
    """

    __slots__ = ()

    def content_width(self, width: int) -> int:
        """Returns the width of the embedding for a model of this width."""
        return width

    def limit(self) -> int | None:
        """Returns the number of positions that it has, or None if any."""
        return None

    def build(self, width: int) -> nn.Module:
        """Returns the module for a model of this width."""
        raise NotImplementedError


class Scheme:
    """A position encoding: a value that builds a module from positions B, T to vectors B, T, width."""

    __slots__ = ()

    def limit(self) -> int | None:
        """Returns the number of positions that it has, or None if any."""
        return None

    def build_table(self, width: int) -> nn.Module:
        """Returns the module from positions B, T to vectors of this width."""
        raise NotImplementedError


class AddedPosition(Position, Scheme):
    """A table whose vectors are added to the tokens."""

    __slots__ = ()

    def build(self, width: int) -> nn.Module:
        return AddedPositionModule(self.build_table(width))


class Learned(AddedPosition, Value, frozen=True):
    """A learned vector for each of `length` positions. Example: `Learned(512)`."""

    length: Size

    def limit(self) -> int | None:
        return self.length

    def build_table(self, width: int) -> nn.Module:
        return nn.Embedding(self.length, width)


class OneHot(Scheme, Value, frozen=True):
    """Unit vectors of `length` positions, to be concatenated: `Concatenated(OneHot(8), 8)` is (x, e_i) of source T."""

    length: Size

    def limit(self) -> int | None:
        return self.length

    def build_table(self, width: int) -> nn.Module:
        if width != self.length:
            raise ValueError(
                f"one_hot of {self.length} positions is {self.length} wide; give it a width of {self.length}, not {width}"
            )
        return OneHotModule(self.length)


class Concatenated(Position, Value, frozen=True):
    """The last `width` features are those of the position, from `scheme`, the others those of the token.

    Example: `Concatenated(OneHot(64), 64)`.
    """

    scheme: Scheme
    width: Size

    def content_width(self, width: int) -> int:
        if width <= self.width:
            raise ValueError(
                f"positions take {self.width} of {width} features and leave none for the token; widen the model"
            )
        return width - self.width

    def limit(self) -> int | None:
        return self.scheme.limit()

    def build(self, width: int) -> nn.Module:
        return ConcatenatedModule(self.scheme.build_table(self.width))


class JointMlp(Position, Value, frozen=True):
    """A net with `hidden` features that reads the token and one of `length` positions together.

    Example: `JointMlp(length=64, hidden=128)`.
    """

    length: Size
    hidden: Size

    def limit(self) -> int | None:
        return self.length

    def build(self, width: int) -> nn.Module:
        return MlpPositionModule(width, self.length, self.hidden, joint=True)


class SeparateMlp(Position, Value, frozen=True):
    """Two nets with `hidden` features, one that reads the token and one that reads one of `length` positions, summed.

    Example: `SeparateMlp(length=64, hidden=128)`.
    """

    length: Size
    hidden: Size

    def limit(self) -> int | None:
        return self.length

    def build(self, width: int) -> nn.Module:
        return MlpPositionModule(width, self.length, self.hidden, joint=False)


class AddedPositionModule(nn.Module):
    def __init__(self, table: nn.Module):
        super().__init__()
        self.table = table

    def forward(self, x_BTD: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        return x_BTD + self.table(position_BT).to(x_BTD.dtype)  # eq. T12, M2


class ConcatenatedModule(nn.Module):
    def __init__(self, table: nn.Module):
        super().__init__()
        self.table = table

    def forward(self, x_BTC: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        p_BTD = self.table(position_BT).to(x_BTC.dtype)
        return torch.cat((x_BTC, p_BTD.expand(*x_BTC.shape[:2], -1)), dim=-1)


class MlpPositionModule(nn.Module):
    """The nets of JointMlp and SeparateMlp."""

    def __init__(self, width: int, length: int, hidden: int, joint: bool):
        super().__init__()
        self.x = nn.Linear(width, hidden, bias=False)
        self.e = nn.Embedding(length, hidden)
        self.zx = nn.Linear(hidden, width, bias=False)
        self.ze = None if joint else nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        x_BTF, e_BTF = self.x(x_BTD), self.e(position_BT)
        if self.ze is None:
            return self.zx(F.relu(x_BTF + e_BTF))  # eq. T10
        return self.zx(F.relu(x_BTF)) + self.ze(F.relu(e_BTF))  # eq. T11


class OneHotModule(nn.Module):
    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, position_BT: Tensor) -> Tensor:
        return F.one_hot(position_BT, self.length)
