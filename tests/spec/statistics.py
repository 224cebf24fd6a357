"""Student's distribution from its density, the interval of a mean, the paired test, and Holm's correction, as their definitions read."""

from __future__ import annotations

import math


def density(x: float, degrees: int) -> float:
    constant = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    return constant * (1 + x * x / degrees) ** (-(degrees + 1) / 2)


def within(t: float, degrees: int, pieces: int = 2000) -> float:
    """The probability of -t to t: Simpson's rule on the density."""
    width = 2 * t / pieces
    total = density(-t, degrees) + density(t, degrees)
    for number in range(1, pieces):
        total += (4 if number % 2 else 2) * density(-t + number * width, degrees)
    return total * width / 3


def half_interval(values: list[float], quantile: float) -> float:
    n, mean = len(values), sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / (n - 1)
    return quantile * math.sqrt(variance / n)


def paired_p(a: list[float], b: list[float]) -> float:
    d = [x - y for x, y in zip(a, b, strict=True)]
    n, mean = len(d), sum(d) / len(d)
    t = mean / math.sqrt(sum((x - mean) ** 2 for x in d) / (n - 1) / n)
    return 1 - within(abs(t), n - 1)


def holm_rejects(p: list[float], level: float) -> list[bool]:
    """Holm 1979: reject the smallest p if it is at most level/m, the next if at most level/(m-1), ...; stop at the first that is not."""
    rejected = [False] * len(p)
    for place, index in enumerate(sorted(range(len(p)), key=lambda one: p[one])):
        if p[index] > level / (len(p) - place):
            break
        rejected[index] = True
    return rejected
