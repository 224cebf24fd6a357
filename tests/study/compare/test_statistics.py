"""The statistics of a table are those of their definitions, and of printed tables."""

from __future__ import annotations

import math
from random import Random

import pytest

from everyformer.infer.student import quantile, within
from everyformer.study.compare.statistics import holm, interval, paired_p
from tests.spec import statistics as spec


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 12])
def test_student_is_the_integral_of_its_density(degrees):
    for t in (0.1, 0.7, 1.5, 3.0):
        assert within(t, degrees) == pytest.approx(spec.within(t, degrees), abs=1e-9)
        assert quantile(degrees, within(t, degrees)) == pytest.approx(t, rel=1e-9)


def test_the_interval_of_three_seeds():
    """4.30265 is the printed 0.975 quantile with two degrees of freedom."""
    values = [2.0, 2.1, 2.4]
    found = interval(values)
    assert found is not None and found.mean == pytest.approx(13 / 6) and found.count == 3
    assert found.high - found.mean == pytest.approx(spec.half_interval(values, 4.30265), rel=1e-6)
    one = interval([2.0])
    assert interval([]) is None and one is not None and one.mean == 2.0 and math.isnan(one.low)


def test_the_paired_test_uses_pairs():
    a, b = [2.00, 2.52, 3.01, 3.49], [1.90, 2.40, 2.92, 3.41]
    difference = [x - y for x, y in zip(a, b, strict=True)]
    assert paired_p(difference) == pytest.approx(spec.paired_p(a, b), abs=1e-9)
    assert spec.paired_p(a, b) < 0.01
    assert spec.paired_p(a, b[::-1]) > 0.5  # the same numbers in other pairs
    assert math.isnan(paired_p([0.1])) and paired_p([0.0, 0.0]) == 1.0 and paired_p([0.1, 0.1]) == 0.0


def test_a_p_value_is_not_negative_by_rounding():
    assert all(0.0 <= paired_p([50.0 + random for random in map(math.sin, range(n))]) <= 1e-12 for n in range(10, 40))


def test_holm_by_hand():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": math.nan}) == pytest.approx(
        {"a": 0.03, "b": 0.06, "c": 0.06, "d": math.nan}, nan_ok=True
    )
    assert holm({"a": 0.7, "b": 0.6}) == {"a": 1.0, "b": 1.0}


def test_holm_rejects_what_its_definition_rejects():
    random = Random(0)
    for _ in range(200):
        p = [random.random() ** 3 for _ in range(random.randint(1, 6))]
        corrected = holm({str(number): one for number, one in enumerate(p)})
        assert [corrected[str(number)] <= 0.05 for number in range(len(p))] == spec.holm_rejects(p, 0.05)
