"""Scores far beyond what exp can take, and parts without keys, in every way to compute attention on a CPU."""

from __future__ import annotations

import pytest
import torch

from everyformer import Hashed, parse
from everyformer.attention.algebra import And
from everyformer.attention.attend import attend
from everyformer.attention.kernels.merge import merge, merge_, merge_sums
from tests.attention.test_hashed import context_of, draw


@pytest.mark.spec(6)
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kernel", ["reference", "sdpa", "blocked", "tiled"])
def test_scores_of_thousands_give_the_exact_softmax(kernel, sign):
    """All scores are moved by 2,000, which changes no weight; exp(710) is infinite in float64."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    pattern = parse("causal & (window(8) | stride(8))")
    wanted = attend(q, k, v, pattern, kernel="reference", scale=1.0)
    one = torch.ones_like(q[..., :1])
    moved = (torch.cat((q, one), -1), torch.cat((k, sign * 2000 * one), -1), v)
    found = attend(*moved, pattern, kernel=kernel, scale=1.0)
    assert (found - wanted).abs().max() < 1e-9


@pytest.mark.spec(6, 115)
def test_hashed_attention_takes_large_scores():
    pattern, (q, k, v) = Hashed(2, 4, 8), (x.double() for x in draw(40))
    context = context_of(pattern, k)
    for scale in (1.0, 3000.0):
        found = attend(q, k, v, pattern, context=context, kernel="hashed", scale=scale)
        wanted = attend(q, k, v, pattern, context=context, kernel="reference", scale=scale)
        assert found.isfinite().all() and (found - wanted).abs().max() < 1e-9


def test_parts_without_keys_change_nothing_and_none_at_all_gives_zero():
    nothing = torch.full((2, 1), -torch.inf)
    value, total = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[900.0], [-900.0]])
    output, sums = value.clone(), total.clone()
    merge_(output, sums, torch.full((2, 2), 9.0), nothing)
    assert torch.equal(output, value) and torch.equal(sums, total)
    output, sums = torch.zeros(2, 2), nothing.clone()
    merge_(output, sums, torch.full((2, 2), 9.0), nothing)
    assert torch.equal(output, torch.zeros(2, 2)) and torch.equal(sums, nothing)
    merge_(output, sums, value, total)
    assert torch.equal(output, value) and torch.equal(sums, total)
    assert torch.allclose(merge([value, 3 * value], [total, total]), 2 * value)
    assert torch.equal(merge([value, value], [nothing, nothing]), torch.zeros(2, 2))
    weighted = torch.cat((value, torch.ones(2, 1)), dim=1)
    assert torch.allclose(merge_sums([weighted, 3 * weighted], [total, total]), value)
    assert torch.allclose(merge_sums([weighted, 3 * weighted], [total, total - 800]), value)


def test_a_pattern_combines_at_least_one():
    with pytest.raises(ValueError, match="at least one pattern"):
        And(())
