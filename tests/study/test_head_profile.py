"""The numbers that describe a head, against sums over its queries one by one."""

from __future__ import annotations

import math

import pytest
import torch

from everyformer.study.head_profile import profile


@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (5, 9), (20, 3)])
def test_the_profile_is_the_mean_over_the_queries_that_have_keys(queries, keys):
    torch.manual_seed(0)
    weight_QK = torch.rand(queries, keys)
    weight_QK[1] = 0  # a query without keys
    found = profile(weight_QK)
    rows = [(query, (row / row.sum()).tolist()) for query, row in enumerate(weight_QK) if float(row.sum()) > 0]

    def mean(of):
        return sum(sum(of(query, key, weight) for key, weight in enumerate(row)) for query, row in rows) / len(rows)

    assert found["keys"] == pytest.approx(2 ** mean(lambda q, k, w: -w * math.log2(w)), rel=1e-5)
    assert found["first"] == pytest.approx(mean(lambda q, k, w: w * (k == 0)), rel=1e-5)
    assert found["distance"] == pytest.approx(mean(lambda q, k, w: w * abs(q - k)), rel=1e-5)
    assert found["ahead"] == pytest.approx(mean(lambda q, k, w: w * (k > q)), rel=1e-5)
    for distance, share in enumerate(found["by_distance"]):
        assert share == pytest.approx(mean(lambda q, k, w, d=distance: w * (q - k == d)), rel=1e-5)


def test_a_head_without_weights_has_no_keys():
    assert profile(torch.zeros(3, 3)) == {"keys": 0.0, "first": 0.0}
