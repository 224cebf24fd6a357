"""Pictures as lines of text, for a terminal of any width: matrices in shades, curves and points.

print("\\n".join(matrix(weight_QK, queries, keys, width=80)))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

SHADES = " ░▒▓█"
MARKS = "●○◆◇▲△■□"  # of one curve after the other
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
ROW_LABEL, COLUMN_LABEL = 12, 8  # characters of a label
Point = tuple[float, float]


def shade(value: float) -> str:
    """One character for a value from 0 to 1; only 0 is blank."""
    return SHADES[min(4, math.ceil(4 * value))] if value > 0.01 else " "


def digit(value: float) -> str:
    """One character for a whole number."""
    return DIGITS[int(value) % len(DIGITS)]


def matrix(
    value_RT: Tensor, rows: Sequence[str], columns: Sequence[str], width: int, cell: Callable[[float], str] = shade
) -> list[str]:
    """Lines with one character for each value, the labels of the rows before them and those of the columns above, downwards.

    If there are too many columns, a character stands for the mean of several, or for the first of them if it is a number.
    """
    names = [_printable(row)[:ROW_LABEL] for row in rows]
    edge = max(map(len, names), default=0)
    scale = math.ceil(len(columns) / max(1, width - edge - 2))
    if scale > 1 and cell is digit:
        value_RT = value_RT[:, ::scale]
    elif scale > 1:
        value_RT = F.avg_pool1d(value_RT.float(), scale, ceil_mode=True)
    heads = [_printable(column)[:COLUMN_LABEL] for column in columns[::scale]]
    height = max(map(len, heads), default=0)
    lines = [" " * (edge + 1) + "".join(f"{head:<{height}}"[row] for head in heads) for row in range(height)]
    for name, value_T in zip(names, value_RT.tolist(), strict=True):
        lines.append(f"{name:>{edge}}│" + "".join(map(cell, value_T)) + "│")
    if scale > 1:
        lines.append(f"a character stands for {scale} columns")
    return [line.rstrip() for line in lines]


def curves(
    named: Sequence[tuple[str, Sequence[Point]]], unit: str, width: int, height: int = 12, axis: str = "step"
) -> list[str]:
    """Lines with a mark for each curve: its values upwards, by step to the right, and a legend."""
    points = [point for _, some in named for point in some]
    if not points:
        return ["there is nothing to draw yet"]
    low, high = min(y for _, y in points), max(y for _, y in points)
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    numbers = [f"{high:.4g}", f"{low:.4g}"]
    edge = max(map(len, numbers))
    across = max(8, width - edge - 2)
    grid = [[" "] * across for _ in range(height)]
    for mark, (_, some) in zip(_marks(len(named)), named, strict=True):
        for x, y in some:
            column = round((x - first) / max(1e-12, last - first) * (across - 1))
            row = round((high - y) / max(1e-12, high - low) * (height - 1))
            grid[row][column] = mark
    sides = {0: numbers[0], height - 1: numbers[1]}
    lines = [f"{sides.get(row, ''):>{edge}} │" + "".join(cells).rstrip() for row, cells in enumerate(grid)]
    ends = f"{first:g}", f"{last:g}"
    lines += [" " * edge + " └" + "─" * across]
    lines += [" " * (edge + 2) + ends[0] + f"{axis:^{max(0, across - len(ends[0]) - len(ends[1]))}}" + ends[1]]
    return [unit, *lines, *(f"{mark} {name}" for mark, (name, _) in zip(_marks(len(named)), named, strict=True))]


def points(point_N2: Tensor, labels: Sequence[str], width: int) -> list[str]:
    """Lines with the labels at their points: a label of one character as it is, else a dot; the first one stays on top."""
    across = max(8, width - 2)
    down = max(6, across // 3)
    low_2, high_2 = point_N2.amin(0), point_N2.amax(0)
    at_N2 = (point_N2 - low_2) / (high_2 - low_2).clamp(min=1e-12)
    cell_N2 = torch.stack((at_N2[:, 0] * (across - 1), (1 - at_N2[:, 1]) * (down - 1)), dim=1).round().long()
    grid = [[" "] * across for _ in range(down)]
    for (column, row), label in reversed(list(zip(cell_N2.tolist(), labels, strict=True))):
        grid[row][column] = (
            label if len(label) == 1 and label.isprintable() and label not in " \N{REPLACEMENT CHARACTER}" else "·"
        )
    return ["┌" + "─" * across + "┐", *("│" + "".join(row) + "│" for row in grid), "└" + "─" * across + "┘"]


def _marks(count: int) -> list[str]:
    return [MARKS[index % len(MARKS)] for index in range(count)]


def _printable(label: str) -> str:
    return "".join(c if c.isprintable() else "·" for c in label)
