"""Parmar et al. 2018: the order of generation, the two kinds of local memory. Salimans et al. 2017: mixtures of logistics.

W lets a query attend to all of its memory; the order of generation has to be masked inside it, as the paper's figure 2 does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def block_raster(rows: int, columns: int, height: int, width: int) -> list[tuple[int, int]]:
    """The cells in the order of generation: block after block in raster order, and so the cells in each."""
    order = []
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            for y in range(top, top + height):
                for x in range(left, left + width):
                    order.append((y, x))
    return order


def memory_1d(i: int, length: int, before: int) -> set[int]:
    """The query block of l_q positions that i is in, and the l_m positions before that block."""
    start = 0
    while start + length <= i:
        start += length
    return set(range(max(0, start - before), start + length))


def memory_2d(i: int, order: Sequence[tuple[int, int]], height: int, width: int, up: int, side: int) -> set[int]:
    """The positions of the rectangle that i is in, made larger by h_m rows upwards and w_m columns to the left and right."""
    y, x = order[i]
    top, left = y - y % height, x - x % width
    rows, columns = range(top - up, top + height), range(left - side, left + width + side)
    return {j for j, (row, column) in enumerate(order) if row in rows and column in columns}


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def scaled(value: int, levels: int) -> float:
    """0 .. levels - 1 as -1 .. 1."""
    return 2 * value / (levels - 1) - 1


def share(value: int, mean: float, log_scale: float, levels: int) -> float:
    """A logistic distribution's share of the bin around a value; the first and last bins have no end."""
    x, half, s = scaled(value, levels), 1 / (levels - 1), math.exp(max(log_scale, -7.0))
    above = 1.0 if value == levels - 1 else sigma((x + half - mean) / s)
    below = 0.0 if value == 0 else sigma((x - half - mean) / s)
    return above - below


def pixel(values: Sequence[int], components: Sequence[dict], levels: int) -> float:
    """p(x) = sum_k pi_k prod_c P(x_c | m_kc + sum_{d<c} tanh(a_kcd) x_d, s_kc), pi = softmax of the weights."""
    total = sum(math.exp(one["weight"]) for one in components)
    found = 0.0
    for one in components:
        p = math.exp(one["weight"]) / total
        for c, value in enumerate(values):
            mean = one["mean"][c]
            for d in range(c):
                mean += math.tanh(one["earlier"][c, d]) * scaled(values[d], levels)
            p *= share(value, mean, one["log_scale"][c], levels)
        found += p
    return found
