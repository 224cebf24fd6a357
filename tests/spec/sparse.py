"""The Sparse Transformer, Child et al. 2019: attention over sets of keys, and the strided and fixed sets.

Weng 2020 (source W) omits j <= i in the second strided set and in both fixed ones, and calls the sets of a query disjoint, but
both strided sets contain i itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def attend(x_TD: Tensor, sets: Sequence[set[int]], w_q: Tensor, w_k: Tensor, w_v: Tensor) -> Tensor:  # eq. W19
    """Eq. 2-4: Attend(X, S) = (a(x_i, S_i))_i, a(x_i, S_i) = softmax((W_q x_i) K_S^T / sqrt(d)) V_S over the keys in S_i."""
    rows = []
    for x_i, keys in zip(x_TD, sets, strict=True):
        chosen = sorted(keys)
        if not chosen:  # the output for an empty set is 0
            rows.append(x_TD.new_zeros(w_v.shape[0]))
            continue
        score = torch.stack([(w_q @ x_i) @ (w_k @ x_TD[j]) / math.sqrt(w_q.shape[0]) for j in chosen])
        weight = torch.exp(score - score.max())
        weight = weight / weight.sum()
        rows.append(sum(a * (w_v @ x_TD[j]) for a, j in zip(weight, chosen, strict=True)))
    return torch.stack(rows)


def strided(i: int, stride: int) -> tuple[set[int], set[int]]:  # eq. W21
    """A1 = the last l positions, as in the published kernel; A2 = {j : (i - j) mod l = 0, j <= i}."""
    return set(range(max(0, i - stride + 1), i + 1)), {j for j in range(i + 1) if (i - j) % stride == 0}


def window_as_written(i: int, stride: int) -> set[int]:
    """A1 as printed in the paper: {t, t + 1, ..., i}, t = max(0, i - l), which has l + 1 keys."""
    return set(range(max(0, i - stride), i + 1))


def fixed(i: int, stride: int, columns: int, head: int = 0) -> tuple[set[int], set[int]]:  # eq. W22
    """A1 = {j <= i : floor(j / l) = floor(i / l)}; A2 = {j <= i : j mod l in {t, ..., t + c - 1}}, t = l - c.

    The columns of head h start c h columns earlier."""
    past, first = range(i + 1), stride - columns - columns * head
    return {j for j in past if j // stride == i // stride}, {j for j in past if 0 <= j % stride - first < columns}


def merged(first: Sequence[set[int]], second: Sequence[set[int]]) -> list[set[int]]:  # eq. W24
    """A merged head attends to the union of both sets of each query."""
    return [one | two for one, two in zip(first, second, strict=True)]
