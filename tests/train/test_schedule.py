"""Rates and batch sizes at the steps where their definitions say something."""

from __future__ import annotations

import math

import pytest

from everyformer.train.recipe import Optim, Run
from everyformer.train.schedule import batch_size, rate, sequences_before


@pytest.mark.spec(135)
@pytest.mark.parametrize("schedule", ["constant", "cosine", "linear", "inverse_sqrt", "wsd"])
def test_warm_up_rises_to_one_in_a_straight_line(schedule):
    optim = Optim(schedule=schedule, warmup=10)
    assert [rate(optim, step, 100) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])


@pytest.mark.spec(135)
def test_the_ends_of_the_schedules():
    steps, last = 101, 100
    assert rate(Optim(schedule="cosine", warmup=0, min_lr=0.1), 0, steps) == 1
    assert rate(Optim(schedule="cosine", warmup=0, min_lr=0.1), 50, steps) == pytest.approx(0.55)
    assert rate(Optim(schedule="cosine", warmup=0, min_lr=0.1), last, steps) == pytest.approx(0.1)
    assert rate(Optim(schedule="linear", warmup=0, min_lr=0.0), 25, steps) == pytest.approx(0.75)
    assert rate(Optim(schedule="inverse_sqrt", warmup=4), 15, steps) == pytest.approx(math.sqrt(4 / 16))
    flat = Optim(schedule="wsd", warmup=0, decay=0.2, min_lr=0.0)
    assert rate(flat, 80, steps) == pytest.approx(1) and rate(flat, 90, steps) == pytest.approx(0.5)
    assert rate(flat, last, steps) == pytest.approx(0)
    later = Optim(schedule="wsd", warmup=50, decay=0.2, min_lr=0.0)  # the share is of what is left after warm-up
    assert rate(later, 90, steps) == pytest.approx(1) and rate(later, 95, steps) == pytest.approx(0.5)
    assert rate(Optim(schedule="constant", warmup=0), last, steps) == 1


@pytest.mark.spec(136)
def test_the_batch_grows_at_its_steps():
    run = Run(batch=4, batch_schedule=((10, 8), (20, 32)))
    assert [batch_size(run, step) for step in (0, 9, 10, 19, 20, 99)] == [4, 4, 8, 8, 32, 32]
    assert sequences_before(run, 25) == sum(batch_size(run, step) for step in range(25))
    assert sequences_before(run, 5) == 20


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"clip": -1.0}, ">= 0"),
        ({"min_lr": -5.0}, ">= 0"),
        ({"weight_decay": -0.1}, ">= 0"),
        ({"lr": math.inf}, "finite"),
        ({"decay": 2.0}, "<= 1"),
        ({"decay": 0.0}, "> 0"),
    ],
    ids=str,
)
def test_rates_that_lead_uphill_are_refused(wrong, reason):
    with pytest.raises(ValueError, match=f"optim.{next(iter(wrong))} is .*{reason}"):
        Optim(**wrong)
