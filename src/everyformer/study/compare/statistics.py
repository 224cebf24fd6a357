"""The statistics of a table: intervals over seeds, paired differences, and Holm's correction.

mean -+ t s / sqrt(n)                         t the 0.975 quantile of Student's distribution with n - 1 degrees of freedom
paired test    d_s = a_s - b_s over the seeds s,  t = mean(d) sqrt(n) / s(d),  p from the same distribution, two-sided
Holm 1979      of m sorted p-values the i-th (from 0) becomes max over j <= i of (m - j) p_j, at most 1
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from everyformer.infer.student import quantile, within


@dataclass(frozen=True)
class Interval:
    """A mean with its 95 % interval; the bounds are NaN with a single value."""

    mean: float
    low: float
    high: float
    count: int


def interval(values: Sequence[float]) -> Interval | None:
    """Returns the mean with Student's interval; None without values."""
    if not values:
        return None
    mean, half = statistics.fmean(values), math.nan
    if len(values) > 1:
        half = quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half, len(values))


def paired_p(difference: Sequence[float]) -> float:
    """Returns the two-sided p-value of Student's test that the mean difference is 0; NaN with fewer than two."""
    if len(difference) < 2:
        return math.nan
    spread = statistics.stdev(difference)
    if spread == 0.0:
        return 1.0 if difference[0] == 0 else 0.0
    t = statistics.fmean(difference) * math.sqrt(len(difference)) / spread
    return max(0.0, 1 - within(t, len(difference) - 1))  # not below 0 by rounding


def holm(p: Mapping[str, float]) -> dict[str, float]:
    """Returns p-values by name, corrected for their number. Those that are NaN stay NaN and do not count."""
    known = sorted((value, name) for name, value in p.items() if not math.isnan(value))
    corrected, largest = dict(p), 0.0
    for place, (value, name) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - place) * value))
        corrected[name] = largest
    return corrected
