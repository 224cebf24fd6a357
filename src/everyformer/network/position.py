"""Positions: how a token knows where it stands.

Equations (x the embedded token at position i, e_i the i-th unit vector):
    Learned       x + W_e[i]                                             B, W, M, K; Gehring et al. 2017
    Sinusoidal    x + p_i, p_{i,2m} = sin(i / 10000^(2m/D)), p_{i,2m+1} = cos(the same)    Vaswani et al. 2017
    Concatenated  (x, p_i)                                               K; with OneHot it is T's (x, e_i)
    JointMlp      W_z ReLU(W_x x + W_e[i])                               T eq. 10
    SeparateMlp   W_zx ReLU(W_x x) + W_ze ReLU(W_e[i])                   T eq. 11
    Grid          row and column each by half of the features            K, for images; Parmar et al. 2018
    Axial         x + sum_a W_a[i_a], i_a the coordinates of i in an array    Child et al. 2019
    TimePosition  x + p_i + p_t, t the step of a recurrent depth         Universal Transformer

Symbols: i position (k in T), D width, m pair of features (delta' in W).
Departures: T's eq. 12 passes x through an MLP and writes x_1 for x_k; Vaswani adds p to the scaled embedding, as here.
W counts positions and features from 1; the paper and we from 0. The `halves` layout puts all sines before all cosines:
a permutation of the features. T credits eq. 11 to Gehring et al., who simply add the two embeddings (Learned).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.pattern import cell
from everyformer.attention.score_mod import sin_cos
from everyformer.value import Positive, Size, Value


class Position:
    """A value that builds a module `position(x_BTC, position_BT, step)` from the content's width C to the model's D."""

    __slots__ = ()

    def content_width(self, width: int) -> int:
        """How wide the embedded token must be so that the result is `width` wide."""
        return width

    def limit(self) -> int | None:
        """The number of positions it knows, or None when there is no end."""
        return None

    def build(self, width: int) -> nn.Module:
        raise NotImplementedError


class Scheme:
    """A value that builds a module from positions B, T to vectors B, T, width: what positions are made of."""

    __slots__ = ()

    def limit(self) -> int | None:
        return None

    def build_table(self, width: int) -> nn.Module:
        raise NotImplementedError


class AddedScheme(Position, Scheme):
    """A table whose vectors are added to the tokens."""

    __slots__ = ()

    def build(self, width: int) -> nn.Module:
        return Added(self.build_table(width))


class Sinusoidal(AddedScheme, Value, frozen=True):
    layout: Literal["interleaved", "halves"] = "interleaved"
    base: Positive = 10000.0

    def build_table(self, width: int) -> nn.Module:
        return Waves(width, self.layout, self.base)


class Learned(AddedScheme, Value, frozen=True):
    length: Size

    def limit(self) -> int | None:
        return self.length

    def build_table(self, width: int) -> nn.Module:
        return nn.Embedding(self.length, width)


class OneHot(Scheme, Value, frozen=True):
    """Unit vectors, to be concatenated: a position is Concatenated(OneHot(n), n), T's x' = (x, e_i)."""

    length: Size

    def limit(self) -> int | None:
        return self.length

    def build_table(self, width: int) -> nn.Module:
        if width != self.length:
            raise ValueError(
                f"one_hot of {self.length} positions is {self.length} wide; give it a width of {self.length}, not {width}"
            )
        return Units(self.length)


class Concatenated(Position, Value, frozen=True):
    """The last `width` features are the position's, the others the token's."""

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
        return Joined(self.scheme.build_table(self.width))


class JointMlp(Position, Value, frozen=True):
    length: Size
    hidden: Size

    def limit(self) -> int | None:
        return self.length

    def build(self, width: int) -> nn.Module:
        return MlpPosition(width, self.length, self.hidden, joint=True)


class SeparateMlp(Position, Value, frozen=True):
    length: Size
    hidden: Size

    def limit(self) -> int | None:
        return self.length

    def build(self, width: int) -> nn.Module:
        return MlpPosition(width, self.length, self.hidden, joint=False)


class Grid(AddedScheme, Value, frozen=True):
    """Positions of a grid in raster order: half of the features tell the row, half the column.

    With a `block` of rows x columns the grid is read block after block, each in raster order (Parmar et al. 2018). Where a pixel
    has several channels, each is a column of its own.
    """

    rows: Size
    columns: Size
    learned: bool = False
    block: tuple[Size, Size] | None = None

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        for size, part, name in zip((self.rows, self.columns), self.block or (1, 1), ("rows", "columns"), strict=True):
            if size % part:
                raise ValueError(
                    f"grid.block is {self.block}: {size} {name} do not divide into blocks of {part}; give a divisor of {size}"
                )

    def cells(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """The row and the column of positions."""
        return cell(position, self.columns, *(self.block or (1, self.columns)))

    def limit(self) -> int | None:
        return self.rows * self.columns

    def build_table(self, width: int) -> nn.Module:
        if width % 2:
            raise ValueError(f"a grid halves the features between row and column, but there are {width}; make it even")
        halves = (Learned(self.rows), Learned(self.columns)) if self.learned else (Sinusoidal(), Sinusoidal())
        return Cells(self, halves[0].build_table(width // 2), halves[1].build_table(width // 2))


class Axial(AddedScheme, Value, frozen=True):
    """Positions of an array in raster order: one learned vector for each coordinate, summed. Rows, columns, channels."""

    sizes: tuple[Size, ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.sizes:
            raise ValueError("axial.sizes is empty: give the length of each axis, such as (96, 128)")

    def limit(self) -> int | None:
        return math.prod(self.sizes)

    def build_table(self, width: int) -> nn.Module:
        return Axes(self.sizes, width)


class TimePosition(Position, Value, frozen=True):
    """Sinusoids of the position and of the step of a recurrent depth, added."""

    def build(self, width: int) -> nn.Module:
        return TimedWaves(width)


class Added(nn.Module):
    def __init__(self, table: nn.Module):
        super().__init__()
        self.table = table

    def forward(self, x_BTD: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        return x_BTD + self.table(position_BT).to(x_BTD.dtype)


class Joined(nn.Module):
    def __init__(self, table: nn.Module):
        super().__init__()
        self.table = table

    def forward(self, x_BTC: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        p_BTD = self.table(position_BT).to(x_BTC.dtype)
        return torch.cat((x_BTC, p_BTD.expand(*x_BTC.shape[:2], -1)), dim=-1)


class MlpPosition(nn.Module):
    def __init__(self, width: int, length: int, hidden: int, joint: bool):
        super().__init__()
        self.x = nn.Linear(width, hidden, bias=False)
        self.e = nn.Embedding(length, hidden)
        self.zx = nn.Linear(hidden, width, bias=False)
        self.ze = None if joint else nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTD: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        x_BTF, e_BTF = self.x(x_BTD), self.e(position_BT)
        if self.ze is None:
            return self.zx(F.relu(x_BTF + e_BTF))
        return self.zx(F.relu(x_BTF)) + self.ze(F.relu(e_BTF))


class Waves(nn.Module):
    """Fixed sinusoids, wavelengths from 2 pi to 2 pi base."""

    def __init__(self, width: int, layout: str = "interleaved", base: float = 10000.0):
        super().__init__()
        if width % 2:
            raise ValueError(f"sinusoids come in pairs, but there are {width} features; make it even")
        self.width, self.layout, self.base = width, layout, base

    def forward(self, position_BT: Tensor) -> Tensor:
        pairs = torch.stack(sin_cos(position_BT, self.width, self.base, torch.float64), dim=-1)[:, 0]
        return (pairs if self.layout == "interleaved" else pairs.transpose(-1, -2)).flatten(-2)


class TimedWaves(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.table = Waves(width)

    def forward(self, x_BTD: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        step_11 = torch.full((1, 1), step, device=x_BTD.device)
        return x_BTD + (self.table(position_BT) + self.table(step_11)).to(x_BTD.dtype)


class Units(nn.Module):
    def __init__(self, length: int):
        super().__init__()
        self.length = length

    def forward(self, position_BT: Tensor) -> Tensor:
        return F.one_hot(position_BT, self.length)


class Cells(nn.Module):
    def __init__(self, grid: Grid, row: nn.Module, column: nn.Module):
        super().__init__()
        self.grid, self.row, self.column = grid, row, column

    def forward(self, position_BT: Tensor) -> Tensor:
        row_BT, column_BT = self.grid.cells(position_BT)
        return torch.cat((self.row(row_BT), self.column(column_BT)), dim=-1)


class Axes(nn.Module):
    def __init__(self, sizes: tuple[int, ...], width: int):
        super().__init__()
        self.sizes, self.axes = sizes, nn.ModuleList(nn.Embedding(size, width) for size in sizes)

    def forward(self, position_BT: Tensor) -> Tensor:
        at_BT, vectors = position_BT, []
        for size, axis in zip(reversed(self.sizes), reversed(self.axes), strict=True):  # the last axis is the fastest
            vectors.append(axis(at_BT % size))
            at_BT = at_BT // size
        return torch.stack(vectors).sum(0)
