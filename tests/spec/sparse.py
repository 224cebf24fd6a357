"""Child et al. 2019: attention over sets of keys, and the sets themselves. W's formulas, with j <= i put back.

W leaves j <= i out of the second strided set and of both fixed ones, and calls the sets of a query disjoint: both strided
ones have i itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attend(x_TD: Tensor, sets: Sequence[set[int]], w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:
    """Attend(X, S) = (a(x_i, S_i))_i, a(x_i, S_i) = softmax((W_q x_i) K_S^T / sqrt(d)) V_S over the keys in S_i."""
    rows = []
    for x_i, keys in zip(x_TD, sets, strict=True):
        chosen = sorted(keys)
        if not chosen:  # an empty set has nothing to answer
            rows.append(x_TD.new_zeros(w_v.shape[0]))
            continue
        score = torch.stack([(w_q @ x_i) @ (w_k @ x_TD[j]) / math.sqrt(w_q.shape[0]) for j in chosen])
        share = torch.exp(score - score.max())
        share = share / share.sum()
        rows.append(sum(a * (w_v @ x_TD[j]) for a, j in zip(share, chosen, strict=True)))
    return torch.stack(rows)


def strided(i: int, stride: int) -> tuple[set[int], set[int]]:
    """A1: the last l positions, as the paper's kernel has them; A2 = {j : (i - j) mod l = 0, j <= i}."""
    return set(range(max(0, i - stride + 1), i + 1)), {j for j in range(i + 1) if (i - j) % stride == 0}


def window_as_written(i: int, stride: int) -> set[int]:
    """A1 = {t, t + 1, ..., i}, t = max(0, i - l): l + 1 keys."""
    return set(range(max(0, i - stride), i + 1))


def fixed(i: int, stride: int, columns: int, head: int = 0) -> tuple[set[int], set[int]]:
    """A1 = {j <= i : floor(j / l) = floor(i / l)}; A2 = {j <= i : j mod l in {t, ..., t + c - 1}}, t = l - c; of head h, c h columns
    before."""
    cache, first = range(i + 1), stride - columns - columns * head
    return {j for j in cache if j // stride == i // stride}, {j for j in cache if 0 <= j % stride - first < columns}


def both(first: Sequence[set[int]], second: Sequence[set[int]]) -> list[set[int]]:
    """The merged head: the union of the sets of each query."""
    return [one | two for one, two in zip(first, second, strict=True)]
