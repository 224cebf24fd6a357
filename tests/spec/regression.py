"""The metrics of predicted numbers, term by term: f are the predictions, y the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

Numbers = Sequence[float]


def mean(x: Numbers) -> float:
    return sum(x) / len(x)


def mean_squared_error(f: Numbers, y: Numbers) -> float:
    """1/n sum_i (f_i - y_i)^2."""
    return mean([(a - b) ** 2 for a, b in zip(f, y, strict=True)])


def r2(f: Numbers, y: Numbers) -> float:
    """The coefficient of determination: 1 - sum_i (f_i - y_i)^2 / sum_i (y_i - mean y)^2."""
    return 1 - sum((a - b) ** 2 for a, b in zip(f, y, strict=True)) / sum((b - mean(y)) ** 2 for b in y)


def pearson(f: Numbers, y: Numbers) -> float:
    """The covariance of f and y over the product of their standard deviations."""
    product = sum((a - mean(f)) * (b - mean(y)) for a, b in zip(f, y, strict=True))
    return product / sqrt(sum((a - mean(f)) ** 2 for a in f) * sum((b - mean(y)) ** 2 for b in y))


def regress(z: Sequence[Numbers], visible: Sequence[bool], W: Sequence[Numbers], b: Numbers) -> list[float]:
    """W z + b of the mean z of the visible tokens."""
    seen = [row for row, one in zip(z, visible, strict=True) if one]
    pooled = [mean([row[d] for row in seen]) for d in range(len(z[0]))]
    return [sum(w * x for w, x in zip(row, pooled, strict=True)) + c for row, c in zip(W, b, strict=True)]
