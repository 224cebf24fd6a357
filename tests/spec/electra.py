"""Replaced-token detection, written from Clark et al. 2020, section 2, for one row.

Symbols: x tokens, m masked positions, p_G(v | x^masked)_i the generator's distribution at position i, D_i the probability that token i of
x^corrupt is original, lam the weight of the discriminator's loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def sample(p: Sequence[float], u: float) -> int:
    """The first v with p_0 + ... + p_v > u."""
    total = 0.0
    for v, p_v in enumerate(p):
        total += p_v
        if total > u:
            return v
    return len(p) - 1


def corrupt(x: Sequence[int], p_G: Mapping[int, Sequence[float]], u: Mapping[int, float]) -> list[int]:
    return [sample(p_G[i], u[i]) if i in p_G else token for i, token in enumerate(x)]


def generator_loss(x: Sequence[int], p_G: Mapping[int, Sequence[float]]) -> float:
    """L_MLM = sum over m of -log p_G(x_i | x^masked)."""
    return -sum(math.log(p[x[i]]) for i, p in p_G.items())


def discriminator_loss(x: Sequence[int], x_corrupt: Sequence[int], D: Sequence[float]) -> float:
    """L_Disc = sum_t -1(x^corrupt_t = x_t) log D_t - 1(x^corrupt_t != x_t) log(1 - D_t)."""
    terms = zip(x, x_corrupt, D, strict=True)
    return -sum(math.log(d) if token == other else math.log(1 - d) for token, other, d in terms)
