"""Sampling: what is left of a distribution is what the definitions say, and it is drawn by its probabilities."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from everyformer.infer.sample import cut, sample
from tests.infer import spec
from tests.network import randn

CUTS = [
    dict(zip(("top_k", "top_p", "min_p"), numbers, strict=True))
    for numbers in itertools.product((None, 1, 4, 99), (None, 0.01, 0.5, 0.9, 1.0), (None, 0.0, 0.3, 1.0))
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_what_is_left_is_what_the_definitions_say(cuts):
    share_BV = (3 * randn(6, 17)).softmax(-1)
    share_BV[0, 5:9] = share_BV[0, 5]  # equals
    left_BV, order_BV = cut(share_BV, **cuts)
    order_BV = torch.arange(17).expand(6, -1) if order_BV is None else order_BV
    for row, left, order in zip(share_BV, left_BV, order_BV, strict=True):
        wanted = spec.kept(row.tolist(), **cuts)
        found = {int(token): float(one / left.sum()) for token, one in zip(order, left, strict=True) if one > 0}
        assert found.keys() == wanted.keys()
        assert all(math.isclose(found[token], wanted[token], rel_tol=1e-12) for token in wanted)


@pytest.mark.parametrize(
    "cuts", [{"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"top_k": 4, "top_p": 0.9, "min_p": 0.2}]
)
def test_what_is_left_is_drawn_by_its_probabilities(cuts):
    logits, count, temperature = randn(7), 40_000, 0.7
    wanted = spec.kept(
        (logits / temperature).softmax(-1).tolist(), **{"top_k": None, "top_p": None, "min_p": None} | cuts
    )
    drawn = sample(logits.expand(count, -1), temperature, torch.Generator().manual_seed(0), **cuts)
    found = torch.bincount(drawn, minlength=7) / count
    assert len(wanted) < 7
    for token in range(7):
        share = wanted.get(token, 0.0)
        assert abs(found[token] - share) <= 4 * math.sqrt(share * (1 - share) / count)


def test_a_row_is_drawn_by_its_own_generator():
    logits_BV = randn(50, 17)
    alone = [sample(logits_BV[[row]], 1.0, torch.Generator().manual_seed(row))[0] for row in range(50)]
    together = sample(logits_BV, 1.0, [torch.Generator().manual_seed(row) for row in range(50)])
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300, torch.inf])
def test_no_temperature_is_too_small_or_too_large(temperature):
    drawn = sample(1e4 * randn(1, 5).expand(999, -1), temperature, torch.Generator().manual_seed(0))
    assert len(set(drawn.tolist())) == (1 if temperature < 1 else 5)


@pytest.mark.parametrize("temperature", [1.0, torch.inf])
def test_a_token_that_cannot_be_is_never_drawn(temperature):
    logits = torch.full((20_000, 3), -torch.inf)
    logits[:, 1] = 0
    assert (sample(logits, temperature, torch.Generator().manual_seed(0)) == 1).all()


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_are_refused(wrong, temperature):
    logits_BV = randn(3, 5)
    logits_BV[1, 2] = wrong
    with pytest.raises(ValueError, match="not numbers"):
        sample(logits_BV, temperature)
    with pytest.raises(ValueError, match=r"logits of the shape \(5,\): give a row"):
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
def test_numbers_that_mean_nothing_are_refused(wrong, remedy):
    with pytest.raises(ValueError, match=remedy):
        sample(randn(1, 5), **wrong)


def test_so_many_generators_as_rows():
    with pytest.raises(ValueError, match="one for each"):
        sample(randn(3, 5), 1.0, [torch.Generator()])
