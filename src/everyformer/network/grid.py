"""Positions of images and other arrays, numbered in raster order.

Grid    x + (r_row, c_column): half of the features encode the row, half the column     source K; Parmar et al. 2018
Axial   x + sum_a W_a[i_a], i_a the coordinates of position i in an array               Child et al. 2019
        x + (W_1[i_1], W_2[i_2], ...), with `widths`                                    Kitaev et al. 2020
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from everyformer.attention.pattern import cell
from everyformer.network.position import AddedPosition, Learned
from everyformer.network.sinusoid import Sinusoidal
from everyformer.value import Size, Value


class Grid(AddedPosition, Value, frozen=True):
    """Positions in an image of `rows` x `columns`, each coordinate encoded by half of the features.

    The encoding is sinusoids, or with `learned` a table each. With a `block` of rows x columns the positions go block by block,
    each in raster order (Parmar et al. 2018). If a pixel has several channels, each channel is a column.
    Example: `Grid(rows=28, columns=28, learned=True)`.
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
        """Returns the row and the column of each position."""
        return cell(position, self.columns, *(self.block or (1, self.columns)))

    def limit(self) -> int | None:
        return self.rows * self.columns

    def build_table(self, width: int) -> nn.Module:
        if width % 2:
            raise ValueError(f"a grid halves the features between row and column, but there are {width}; make it even")
        halves = (Learned(self.rows), Learned(self.columns)) if self.learned else (Sinusoidal(), Sinusoidal())
        return GridModule(self, halves[0].build_table(width // 2), halves[1].build_table(width // 2))


class Axial(AddedPosition, Value, frozen=True):
    """One learned vector for each coordinate of an array of these `sizes` (rows, columns, channels, ...), summed.

    With `widths` the vectors are concatenated; together they are as wide as the model. Example: `Axial((32, 32, 3))`.
    """

    sizes: tuple[Size, ...]
    widths: tuple[Size, ...] | None = None

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.sizes:
            raise ValueError("axial.sizes is empty: give the length of each axis, such as (96, 128)")
        if self.widths is not None and len(self.widths) != len(self.sizes):
            raise ValueError(
                f"axial.widths has {len(self.widths)} numbers for {len(self.sizes)} axes; give one for each, or leave it out"
            )

    def limit(self) -> int | None:
        return math.prod(self.sizes)

    def content_width(self, width: int) -> int:
        if self.widths is not None and sum(self.widths) != width:
            raise ValueError(
                f"axial.widths sum to {sum(self.widths)}, but {width} features are added to; make them equal"
            )
        return width

    def build_table(self, width: int) -> nn.Module:
        self.content_width(width)
        return AxialModule(self.sizes, self.widths or (width,) * len(self.sizes), self.widths is not None)


class GridModule(nn.Module):
    def __init__(self, grid: Grid, row: nn.Module, column: nn.Module):
        super().__init__()
        self.grid, self.row, self.column = grid, row, column

    def forward(self, position_BT: Tensor) -> Tensor:
        row_BT, column_BT = self.grid.cells(position_BT)
        return torch.cat((self.row(row_BT), self.column(column_BT)), dim=-1)


class AxialModule(nn.Module):
    def __init__(self, sizes: tuple[int, ...], widths: tuple[int, ...], concatenate: bool):
        super().__init__()
        self.sizes, self.concatenate = sizes, concatenate
        self.axes = nn.ModuleList(nn.Embedding(*shape) for shape in zip(sizes, widths, strict=True))

    def forward(self, position_BT: Tensor) -> Tensor:
        index_BT, vectors = position_BT, []
        for size, axis in zip(reversed(self.sizes), reversed(self.axes), strict=True):  # the last axis varies fastest
            vectors.append(axis(index_BT % size))
            index_BT = index_BT // size
        return torch.cat(vectors[::-1], dim=-1) if self.concatenate else torch.stack(vectors).sum(0)
