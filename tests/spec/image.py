"""The Image Transformer, Parmar et al. 2018: order of generation and local memory. PixelCNN++, Salimans et al. 2017: logistics.

Weng 2020 (source W) lets a query attend to all of its memory. Pixels that are generated later must be masked in it, as in the
paper's figure 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def block_raster(rows: int, columns: int, height: int, width: int) -> list[tuple[int, int]]:
    """Pixels in the order of generation: blocks in raster order, and the pixels of each block in raster order."""
    order = []
    for top in range(0, rows, height):
        for left in range(0, columns, width):
            for y in range(top, top + height):
                for x in range(left, left + width):
                    order.append((y, x))
    return order


def memory_1d(i: int, length: int, before: int) -> set[int]:
    """1-D local attention: the query block of l_q positions that contains i, and the l_m positions before it."""
    start = 0
    while start + length <= i:
        start += length
    return set(range(max(0, start - before), start + length))


def memory_2d(i: int, order: Sequence[tuple[int, int]], height: int, width: int, up: int, side: int) -> set[int]:
    """2-D local attention: the query rectangle that contains i, extended by h_m rows above and w_m columns left and right."""
    y, x = order[i]
    top, left = y - y % height, x - x % width
    rows, columns = range(top - up, top + height), range(left - side, left + width + side)
    return {j for j, (row, column) in enumerate(order) if row in rows and column in columns}


def sigma(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def scaled(value: int, levels: int) -> float:
    """Maps 0 .. levels - 1 to -1 .. 1."""
    return 2 * value / (levels - 1) - 1


def bin_probability(value: int, mean: float, log_scale: float, levels: int) -> float:
    """Salimans et al. 2017, eq. 2: the probability of the bin around a value; the first and last bins are unbounded."""
    x, half, s = scaled(value, levels), 1 / (levels - 1), math.exp(max(log_scale, -7.0))
    above = 1.0 if value == levels - 1 else sigma((x + half - mean) / s)
    below = 0.0 if value == 0 else sigma((x - half - mean) / s)
    return above - below


def pixel_probability(values: Sequence[int], components: Sequence[dict], levels: int) -> float:
    """p(x) = sum_k pi_k prod_c P(x_c | m_kc + sum_{d<c} tanh(a_kcd) x_d, s_kc), pi = softmax of the weights."""
    total = sum(math.exp(one["weight"]) for one in components)
    probability = 0.0
    for one in components:
        p = math.exp(one["weight"]) / total
        for c, value in enumerate(values):
            mean = one["mean"][c]
            for d in range(c):
                mean += math.tanh(one["earlier"][c, d]) * scaled(values[d], levels)
            p *= bin_probability(value, mean, one["log_scale"][c], levels)
        probability += p
    return probability
