"""The interval of a mean has the length that its equation says, and contains the true mean as often as it should."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from everyformer import Learned
from everyformer.infer.estimate import Estimate, proportion_interval, row_sums
from everyformer.infer.evaluate import streaming_nll, streaming_rows, window_nll
from everyformer.infer.student import quantile
from tests.infer.test_evaluate import TEXT, VALUE, WINDOW
from tests.network import model, ready


def test_the_mean_of_examples_has_the_interval_of_a_ratio():
    estimate = Estimate()
    estimate.add(torch.tensor([1.0, 6.0]), [1, 3])
    estimate.add(torch.tensor([5.0]), 2)
    assert estimate.total == 12 and estimate.scored == 6 and estimate.mean == 2
    half = quantile(2) * math.sqrt(3 / 2 * (1 + 0 + 1)) / 6  # residuals 1 - 2, 6 - 6, 5 - 4
    assert (estimate.low, estimate.high) == pytest.approx((2 - half, 2 + half))


def test_the_quantiles_of_student():
    """Those of a printed table, and that of many degrees of freedom, which is nearly that of the normal distribution."""
    for degrees, value in ((1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (31, 2.0395)):
        assert quantile(degrees) == pytest.approx(value, abs=5e-5)
    assert quantile(10_000) == pytest.approx(1.9602, rel=1e-3)


def test_one_unit_has_no_interval_and_two_have_one():
    estimate = Estimate()
    estimate.add(torch.tensor([3.0]), 2)
    assert estimate.mean == 1.5 and math.isnan(estimate.low) and math.isnan(estimate.high)
    estimate.add(torch.tensor([5.0]), 2)
    half = quantile(1) * math.sqrt(2 / 1 * (1 + 1)) / 4  # residuals 3 - 4, 5 - 4
    assert (estimate.low, estimate.high) == pytest.approx((2 - half, 2 + half))


def test_the_mean_of_no_target_is_refused_and_progress_is_of_0_until_the_number_is_known():
    calls: list[tuple[int, int]] = []
    estimate = Estimate(lambda done, of: calls.append((done, of)))
    estimate.add(torch.zeros(2), 0)
    with pytest.raises(ValueError, match="no token of these data is one that this model predicts; give longer data"):
        _ = estimate.mean
    estimate.expect(9)
    estimate.add(torch.ones(2), 2)
    assert calls == [(0, 0), (4, 9)]


def test_neighbouring_units_of_a_text_are_merged_into_32_groups():
    """In the order of their positions, not in that in which they are added."""
    generator, merged, pairs = np.random.default_rng(0), Estimate(), Estimate()
    value_U, order_U = torch.from_numpy(generator.normal(size=64)), generator.permutation(64)
    merged.add(value_U[order_U], 1, order_U)
    pairs.add(value_U.view(32, 2).sum(1), 2)
    assert (merged.low, merged.high) == pytest.approx((pairs.low, pairs.high))


@pytest.mark.parametrize("neighbours", [False, True])
def test_the_interval_contains_the_true_mean_in_95_of_100_cases(neighbours):
    """Also if neighbouring units are alike: 1,024 units of an autoregressive series, whose mean is 0."""
    generator, hits = np.random.default_rng(0), 0
    for _ in range(400):
        noise_U, value_U = generator.normal(size=1024), np.zeros(1024)
        for unit in range(1024):
            value_U[unit] = noise_U[unit] + (0.8 * value_U[unit - 1] if neighbours and unit else 0)
        estimate = Estimate()
        estimate.add(torch.from_numpy(value_U), 1, np.arange(1024) if neighbours else None)
        hits += estimate.low <= 0 <= estimate.high
    assert 0.92 <= hits / 400 <= 0.98


def test_the_interval_of_a_proportion():
    assert proportion_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Wilson 1927
    assert proportion_interval(4, 4) == pytest.approx((0.5101, 1), abs=1e-4)
    for count in range(1, 40):  # not even by rounding
        assert proportion_interval(0, count)[0] >= 0 and proportion_interval(count, count)[1] <= 1


def test_sums_by_row():
    selected_BT = torch.tensor([[True, False, True], [False, True, False]])
    assert row_sums(torch.tensor([1.0, 2.0, 4.0]), selected_BT).tolist() == [3, 4]


@pytest.mark.parametrize("limit", [1, 8, 17, 30])
@pytest.mark.parametrize("stride", [1, 3, WINDOW])
def test_a_limited_evaluation_scores_some_targets_as_the_whole_one_does(limit, stride):
    """Each with the same context, and spread over the text."""
    network, whole, part = ready(VALUE), Estimate(), Estimate()
    window_nll(network, TEXT, WINDOW, stride, estimate=whole)
    total, count = window_nll(network, TEXT, WINDOW, stride, limit=limit, estimate=part)
    each = {
        int(end): float(x)
        for ends, xs in zip(whole._positions, whole._sums, strict=True)
        for end, x in zip(ends, xs, strict=True)
    }
    chosen = [int(end) for ends in part._positions for end in ends]
    assert count == len(chosen) * stride <= max(limit, stride) and part.expected == count
    assert total == pytest.approx(sum(each[end] for end in chosen), rel=1e-12)
    assert len(set(part.target_indices().tolist())) == count
    assert chosen[0] == WINDOW + stride and (len(chosen) < 2 or chosen[-1] > len(TEXT) // 2)


def test_a_limited_evaluation_scores_the_end_of_the_second_window_of_two_and_the_whole_of_a_single_one():
    network, stride, limit = ready(VALUE), 3, 5
    (first, _), (both, _) = (window_nll(network, TEXT[: WINDOW + more], WINDOW, stride) for more in (1, 1 + stride))
    assert window_nll(network, TEXT[: WINDOW + 1], WINDOW, stride, limit=limit) == (first, WINDOW)
    last, count = window_nll(network, TEXT[: WINDOW + 1 + stride], WINDOW, stride, limit=limit)
    assert last == pytest.approx(both - first, rel=1e-12) and count == stride


def test_a_limited_evaluation_in_segments_reads_each_row_in_part():
    network, token_N = ready(model(position=Learned(200), outputs=VALUE.outputs)), np.tile(TEXT[:1], 200)
    part = Estimate()
    _, count = streaming_nll(network, token_N, 4, 4, rows=5, lead=4, limit=40, estimate=part)
    index_N = part.target_indices()
    assert count == part.expected == 5 * 8 == len(set(index_N.tolist()))
    assert index_N.max() > 150 and index_N.min() == 5
    whole = Estimate()
    _, count = streaming_nll(network, token_N, 4, 4, rows=5, lead=4, estimate=whole)
    assert count == whole.expected == 199 and sorted(whole.target_indices()) == list(range(1, 200))


def test_a_limit_of_all_targets_is_no_limit():
    network = ready(VALUE)
    assert window_nll(network, TEXT, WINDOW, 4, limit=39) == window_nll(network, TEXT, WINDOW, 4)
    count = 2 * 32 * 256  # just enough for two rows
    assert streaming_rows(count, 4, 8, limit=count) == streaming_rows(count, 4, 8) == (2, 256)
    assert streaming_rows(count - 1, 4, 8) == (1, 0)
    for more, rows in ((-1, 4), (0, 5)):  # each with room for its lead and a segment
        assert streaming_rows(5 * (256 + 4) + more, 4, 8, limit=1000) == (rows, 256)
