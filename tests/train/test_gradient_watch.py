"""The gradient watch: its averages are their definitions, and spikes begin exactly where it says."""

from __future__ import annotations

import math
import random

import pytest
import torch

from everyformer.train.gradient_watch import GradientWatch, StepCheck, Unstable
from everyformer.train.gradient_watch import spike as spike_limit


def check(watch, loss, norm):
    """Why the watch skips a step, if it does."""
    step = StepCheck(torch.device("cpu"), watch.skip_spikes)
    step.load(watch)
    skip = step.check(torch.tensor(loss, dtype=torch.float64), torch.tensor(norm, dtype=torch.float64))
    numbers = step.numbers.tolist()
    assert skip == numbers[2] and skip.dtype == torch.float32  # as the optimizers read it
    return watch.take(numbers)


def literal(steps):
    """Yields, for each step, whether it is a spike, and the averages after it: the mean of the first 50 steps, then an exponential
    one of decay 0.98. From step 21 on, a spike counts only up to its limit: 10 times the average norm, or the average loss plus 2 or
    times 2, whichever is more."""
    loss_average = norm_average = 0.0
    for n, (loss, norm) in enumerate(steps, start=1):
        loss_limit, norm_limit = max(loss_average + 2, 2 * loss_average), 10 * norm_average
        spike = n > 20 and (norm > norm_limit or loss > loss_limit)
        share = max(1 / n, 0.02)
        loss_average += share * ((min(loss, loss_limit) if n > 20 else loss) - loss_average)
        norm_average += share * ((min(norm, norm_limit) if n > 20 else norm) - norm_average)
        yield spike, loss_average, norm_average


@pytest.mark.spec(137)
@pytest.mark.parametrize("seed", range(3))
def test_spikes_and_averages_are_those_of_the_definition(seed):
    numbers = random.Random(seed)
    steps = [(numbers.lognormvariate(0.5, 0.3), numbers.lognormvariate(0, 0.5)) for _ in range(120)]
    for at in (5, 15, 30, 31, 60, 90):
        steps[at] = (steps[at][0], 30.0)
        steps[at + 2] = (11.0, steps[at + 2][1])
    watch, skipped = GradientWatch(patience=5), 0
    for (loss, norm), (spike, loss_average, norm_average) in zip(steps, literal(steps), strict=True):
        skipped += spike
        assert (check(watch, loss, norm) is not None) == spike
        assert watch.loss == pytest.approx(loss_average) and watch.norm == pytest.approx(norm_average)
    assert watch.skipped_steps == skipped >= 5 and watch.seen == 120
    assert GradientWatch(**watch.state()) == watch


@pytest.mark.spec(137)
def test_the_limits_themselves_are_no_spikes():
    def skips(loss, norm, average_loss=1.0, seen=30):
        return check(GradientWatch(patience=3, loss=average_loss, norm=1.0, seen=seen), loss, norm) is not None

    assert not skips(1.0, 10.0) and skips(1.0, 10.1)
    for average, limit in ((1.0, 3.0), (4.0, 8.0)):  # 2 more than the average, and twice the average
        assert not skips(limit, 1.0, average) and skips(limit + 0.1, 1.0, average) and spike_limit(average) == limit
    assert not skips(1.0, 99.0, seen=19) and skips(1.0, 99.0, seen=20)


@pytest.mark.spec(137)
def test_steps_that_are_not_finite_change_no_average():
    watch = GradientWatch(patience=4)
    check(watch, 2.0, 3.0)
    for loss, norm in ((float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), 1.0)):
        assert check(watch, loss, norm) is not None
    assert (watch.loss, watch.norm, watch.seen) == (2.0, 3.0, 1)
    assert (watch.skipped_in_a_row, watch.skipped_steps) == (3, 3)
    with pytest.raises(Unstable, match="4 skipped steps in a row: the gradient norm is nan"):
        check(watch, 1.0, float("nan"))
    assert check(watch, 2.0, 3.0) is None and (watch.skipped_in_a_row, watch.skipped_steps) == (0, 4)


def test_a_run_may_stop_at_its_first_steps():
    watch = GradientWatch(patience=2)
    assert check(watch, float("nan"), 1.0) == "the loss is nan"
    with pytest.raises(Unstable, match="2 skipped steps in a row"):
        check(watch, 1.0, float("nan"))
    assert watch.skipped_steps == 2


def test_the_averages_on_a_device_are_those_of_python_to_the_last_bit():
    numbers, watch = random.Random(7), GradientWatch(patience=99)
    loss_average = norm_average = 0.0
    for seen in range(1, 200):
        loss, norm = numbers.lognormvariate(0.5, 0.5), numbers.lognormvariate(0, 1.5)
        decay, early = min(0.98, 1 - 1 / seen), seen <= 20
        limits = (math.inf, math.inf) if early else (max(loss_average + 2, 2 * loss_average), 10 * norm_average)
        loss_average = decay * loss_average + (1 - decay) * min(loss, limits[0])
        norm_average = decay * norm_average + (1 - decay) * min(norm, limits[1])
        assert (check(watch, loss, norm) is not None) == (loss > limits[0] or norm > limits[1])
        assert (watch.loss, watch.norm, watch.seen) == (loss_average, norm_average, seen)
    assert watch.skipped_steps > 0
