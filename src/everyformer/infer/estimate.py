"""A mean over targets with its 95 % confidence interval, as the targets are scored.

    estimate = Estimate(progress)
    estimate.expect(10_000)                              # the number of targets, for the progress
    estimate.add(nats_U, targets_U)                      # sums and numbers of targets of units: texts, images, windows, ...
    estimate.mean, estimate.low, estimate.high

The mean is the ratio r = sum_u s_u / sum_u n_u. With U units its variance is estimated as
    U / (U - 1) * sum_u (s_u - r n_u)^2 / (sum_u n_u)^2                                              (Cochran 1977, chapter 6)
and the interval is r -+ t sqrt(variance), t the 0.975 quantile of Student's distribution with U - 1 degrees of freedom. Examples
are independent units. The windows of one text are not, because neighbours are alike: units that have a position are first
merged into at most 32 groups of neighbours ("batch means").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everyformer.infer.student import quantile

Progress = Callable[[int, int], None]  # called with the number of targets scored so far, and in all

GROUPS = 32  # of neighbouring units
NORMAL = 1.959964  # the 0.975 quantile of the normal distribution


class Estimate:
    """Sums over targets, collected unit by unit."""

    def __init__(self, progress: Progress | None = None):
        self.progress, self.expected, self.scored = progress, 0, 0
        self._sums: list[Tensor] = []
        self._targets: list[NDArray[np.int64]] = []
        self._positions: list[NDArray[np.int64]] = []

    def expect(self, targets: int) -> None:
        """Set the number of targets that will be scored."""
        self.expected = targets

    def add(self, sum_U: Tensor, targets: Sequence[int] | int, position_U: NDArray[Any] | None = None) -> None:
        """Add units: the sum over the targets of each, and how many they are.

        The position of a unit of a text is the index of its last target."""
        self._sums.append(sum_U.detach())
        self._targets.append(np.broadcast_to(np.asarray(targets, dtype=np.int64), (len(sum_U),)))
        if position_U is not None:
            self._positions.append(position_U)
        self.scored += int(self._targets[-1].sum())
        if self.progress is not None:
            self.progress(self.scored, self.expected)

    def target_indices(self) -> NDArray[np.int64]:
        """Returns the indices in the text of all targets of units with positions."""
        end_U, targets_U = np.concatenate(self._positions), np.concatenate(self._targets)
        before_U = np.cumsum(targets_U) - targets_U
        return np.repeat(end_U - targets_U + 1 - before_U, targets_U) + np.arange(self.scored)

    @property
    def total(self) -> float:
        """The sum over all targets."""
        return float(np.sum(self._sums_and_targets()[0]))

    @property
    def mean(self) -> float:
        if not self.scored:
            raise ValueError(
                "no token of these data is one that this model predicts; give longer data, or data that its tokenizer reads"
            )
        return self.total / self.scored

    @property
    def low(self) -> float:
        return self.mean - self._half_width()

    @property
    def high(self) -> float:
        return self.mean + self._half_width()

    def _half_width(self) -> float:
        """Half the length of the interval; NaN if there is a single unit."""
        sum_U, targets_U = self._sums_and_targets()
        units = len(sum_U)
        if units < 2:
            return math.nan
        residual_U = sum_U - self.mean * targets_U
        variance = units / (units - 1) * float(np.sum(residual_U**2)) / self.scored**2
        return quantile(units - 1) * math.sqrt(variance)

    def _sums_and_targets(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The sum and the number of targets of each unit; of units with positions, of groups of neighbours."""
        sum_U = torch.cat([one.double() for one in self._sums]).cpu().numpy()
        targets_U = np.concatenate(self._targets).astype(np.float64)
        if not self._positions:
            return sum_U, targets_U
        order_U = np.argsort(np.concatenate(self._positions), kind="stable")
        groups = min(GROUPS, len(order_U))
        group_U = np.arange(len(order_U)) * groups // len(order_U)
        merged: Any = [np.bincount(group_U, one[order_U]) for one in (sum_U, targets_U)]
        return merged[0], merged[1]


def row_sums(x_N: Tensor, selected_BT: Tensor) -> Tensor:
    """Returns the sum over the selected positions of each row, in float64; `x_N` are the numbers at these positions."""
    x_BT = torch.zeros_like(selected_BT, dtype=torch.float64)
    x_BT[selected_BT] = x_N.double()
    return x_BT.sum(1)


def proportion_interval(successes: int, count: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a proportion (Wilson 1927), which is sound at 0 and at 1 too."""
    share, weight = successes / count, NORMAL**2 / count
    centre = (share + weight / 2) / (1 + weight)
    half = NORMAL * math.sqrt(share * (1 - share) / count + weight / (4 * count)) / (1 + weight)
    return max(0.0, centre - half), min(1.0, centre + half)
