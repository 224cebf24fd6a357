"""Student's distribution with a whole number of degrees of freedom, exactly (Abramowitz & Stegun 1964, 26.7.3 and 26.7.4)."""

from __future__ import annotations

import math
from functools import lru_cache

MOST = 2000  # degrees of freedom; with more, the distribution of these many is taken, whose quantile is 0.06 % larger


def within(t: float, degrees: int) -> float:
    """Returns the probability that a variable is between -t and t."""
    degrees = min(degrees, MOST - degrees % 2)
    angle = math.atan(abs(t) / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2
    term = total = cosine if odd else 1.0
    for power in range(2 + odd, degrees - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


@lru_cache
def quantile(degrees: int, share: float = 0.95) -> float:
    """Returns the t with which `within(t, degrees)` is the share: by default the 0.975 quantile."""
    low, high = 0.0, 1.0
    while within(high, degrees) < share:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, degrees) < share else (low, middle)
    return high
