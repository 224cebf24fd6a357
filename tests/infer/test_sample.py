"""Sampling: the filters keep the tokens of their definitions, and tokens are sampled by their probabilities."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from everyformer.infer.sample import choose, filter_tokens, sample
from tests.infer import spec
from tests.network import randn

FILTERS = [
    dict(zip(("top_k", "top_p", "min_p"), numbers, strict=True))
    for numbers in itertools.product((None, 1, 4, 99), (None, 0.01, 0.5, 0.9, 1.0), (None, 0.0, 0.3, 1.0))
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters_keep_the_tokens_of_their_definitions(filters):
    probability_BV = (3 * randn(6, 17)).softmax(-1)
    probability_BV[0, 5:9] = probability_BV[0, 5]  # ties
    filtered_BV, order_BV = filter_tokens(probability_BV, **filters)
    order_BV = torch.arange(17).expand(6, -1) if order_BV is None else order_BV
    for row, filtered, order in zip(probability_BV, filtered_BV, order_BV, strict=True):
        expected = spec.filtered(row.tolist(), **filters)
        result = {int(token): float(p / filtered.sum()) for token, p in zip(order, filtered, strict=True) if p > 0}
        assert result.keys() == expected.keys()
        assert all(math.isclose(result[token], expected[token], rel_tol=1e-12) for token in expected)


@pytest.mark.parametrize(
    "filters", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9, "min_p": 0.2}]
)
def test_filtered_tokens_are_sampled_by_their_probabilities(filters):
    logits, count, temperature = randn(7), 40_000, 0.7
    expected = spec.filtered(
        (logits / temperature).softmax(-1).tolist(), **{"top_k": None, "top_p": None, "min_p": None} | filters
    )
    tokens = sample(logits.expand(count, -1), temperature, torch.Generator().manual_seed(0), **filters)
    frequency = torch.bincount(tokens, minlength=7) / count
    assert len(expected) < 7
    for token in range(7):
        p = expected.get(token, 0.0)
        assert abs(frequency[token] - p) <= 4 * math.sqrt(p * (1 - p) / count)


def test_a_token_is_the_first_whose_cumulative_probability_exceeds_the_uniform_number():
    """At a temperature of 1, if none is given."""
    logits_BV, u_B1 = randn(50, 9), torch.rand(50, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for options, temperature in (({}, 1.0), ({"temperature": 0.5}, 0.5)):
        expected = ((logits_BV / temperature).softmax(-1).cumsum(-1) <= u_B1).sum(-1)
        assert choose(logits_BV, u_B1, **options).tolist() == expected.tolist()


def test_each_row_uses_its_own_generator():
    logits_BV = randn(50, 17)
    alone = [sample(logits_BV[[row]], 1.0, torch.Generator().manual_seed(row))[0] for row in range(50)]
    together = sample(logits_BV, 1.0, [torch.Generator().manual_seed(row) for row in range(50)])
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300, torch.inf])
def test_extreme_temperatures_do_not_overflow(temperature):
    logits = 1e4 * torch.tensor([[0.0, -1.0, 0.5, 2.0, 1.0]])
    tokens = sample(logits.expand(999, -1), temperature, torch.Generator().manual_seed(0))
    assert set(tokens.tolist()) == ({int(logits.argmax())} if temperature < 1 else set(range(5)))


@pytest.mark.parametrize("temperature", [1.0, torch.inf])
def test_a_token_with_probability_0_is_never_sampled(temperature):
    logits = torch.full((20_000, 3), -torch.inf)
    logits[:, 1] = 0
    assert (sample(logits, temperature, torch.Generator().manual_seed(0)) == 1).all()


def test_a_number_at_the_lower_end_of_its_range_samples_no_removed_token(monkeypatch):
    """The uniform number may be 0, and the sum of the tokens before the first one is 0 too."""
    monkeypatch.setattr("everyformer.infer.sample._uniform", lambda rows, _: torch.zeros(rows, dtype=torch.float64))
    assert sample(torch.tensor([[-torch.inf, 0.0, 0.0]])).tolist() == [1]


def test_limits_that_remove_nothing_change_nothing():
    """The limits are legal values; with the same random numbers the same tokens are sampled. The temperature is 1 if none is given."""
    logits_BV = randn(200, 9)

    def tokens(**options):
        return sample(logits_BV, generator=torch.Generator().manual_seed(0), **options).tolist()

    assert tokens() == tokens(temperature=1.0) == tokens(top_p=1.0) == tokens(min_p=0.0) == tokens(top_p=1.0, min_p=0.0)
    assert tokens(top_k=1) == tokens(min_p=1.0) == logits_BV.argmax(-1).tolist()
    tiny = torch.tensor([[1.0, 1e-20]], dtype=torch.float64)
    assert (filter_tokens(tiny, top_k=2, top_p=1.0)[0] > 0).all()  # not even by rounding


def test_top_p_keeps_no_token_after_the_sum_has_reached_p_exactly():
    probability = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
    kept, order = filter_tokens(probability, top_p=0.5)
    assert kept.tolist() == [[0.5, 0, 0]] and order.tolist() == [[1, 0, 2]]
    kept, _ = filter_tokens(probability, min_p=0.5)
    assert kept.tolist() == [[0.5, 0.25, 0.25]]


def test_of_equally_likely_tokens_those_with_lower_ids_are_kept():
    """Of as many as a sort does not keep in their order by itself."""
    uniform_BV = torch.full((2, 500), 1 / 512, dtype=torch.float64)
    for filters in ({"top_k": 3}, {"top_p": 2.5 / 500}):
        kept_BV, order_BV = filter_tokens(uniform_BV, **filters)
        assert order_BV is not None and order_BV[kept_BV > 0].tolist() == [0, 1, 2] * 2


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_nan_and_infinite_logits_are_refused(wrong, temperature):
    logits_BV = randn(3, 5)
    logits_BV[1, 2] = wrong
    with pytest.raises(ValueError, match="NaN or infinite"):
        sample(logits_BV, temperature)
    with pytest.raises(ValueError, match=r"the logits have the shape \(5,\): give one row"):
        sample(randn(5), temperature)


@pytest.mark.parametrize(
    "wrong, remedy",
    [
        ({"temperature": -1}, "0 .* or more"),
        ({"temperature": torch.nan}, "0 .* or more"),
        ({"top_k": 0}, "1 or more"),
        ({"top_k": 2.5}, "whole number"),
        ({"top_p": 0.0}, "more than 0"),
        ({"top_p": 1.5}, "at most 1"),
        ({"top_p": torch.nan}, "at most 1"),
        ({"min_p": -0.1}, "0 to 1"),
        ({"min_p": 2}, "0 to 1"),
    ],
    ids=str,
)
def test_sampling_options_out_of_range_are_refused(wrong, remedy):
    with pytest.raises(ValueError, match=remedy):
        sample(randn(1, 5), **wrong)


def test_a_wrong_number_of_generators_is_refused():
    with pytest.raises(ValueError, match="one for each row"):
        sample(randn(3, 5), 1.0, [torch.Generator()])
