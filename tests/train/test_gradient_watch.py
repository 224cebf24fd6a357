"""The gradient watch: its averages are their definitions, and spikes begin exactly where it says."""

from __future__ import annotations

import random

import pytest

from everyformer.train.gradient_watch import GradientWatch, Unstable


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
        assert (watch.check(loss, norm) is not None) == spike
        assert watch.loss == pytest.approx(loss_average) and watch.norm == pytest.approx(norm_average)
    assert watch.skipped_steps == skipped >= 5 and watch.seen == 120
    assert GradientWatch(**watch.state()) == watch


@pytest.mark.spec(137)
def test_the_limits_themselves_are_no_spikes():
    def check(loss, norm, average_loss=1.0, average_norm=1.0, seen=30):
        return GradientWatch(patience=3, loss=average_loss, norm=average_norm, seen=seen).check(loss, norm)

    assert check(1.0, 10.0) is None and check(1.0, 10.1) is not None
    assert check(3.0, 1.0) is None and check(3.1, 1.0) is not None  # 2 more than the average
    assert (
        check(8.0, 1.0, average_loss=4.0) is None and check(8.1, 1.0, average_loss=4.0) is not None
    )  # twice the average
    assert check(1.0, 99.0, seen=19) is None and check(1.0, 99.0, seen=20) is not None


@pytest.mark.spec(137)
def test_steps_that_are_not_finite_change_no_average():
    watch = GradientWatch(patience=4)
    watch.check(2.0, 3.0)
    for loss, norm in ((float("nan"), 1.0), (1.0, float("inf")), (float("-inf"), 1.0)):
        assert watch.check(loss, norm) is not None
    assert (watch.loss, watch.norm, watch.seen) == (2.0, 3.0, 1)
    assert (watch.skipped_in_a_row, watch.skipped_steps) == (3, 3)
    with pytest.raises(Unstable, match="4 skipped steps in a row: the gradient norm is nan"):
        watch.check(1.0, float("nan"))
    assert watch.check(2.0, 3.0) is None and (watch.skipped_in_a_row, watch.skipped_steps) == (0, 4)


def test_a_run_may_stop_at_its_first_steps():
    watch = GradientWatch(patience=2)
    assert watch.check(float("nan"), 1.0) == "the loss is nan"
    with pytest.raises(Unstable, match="2 skipped steps in a row"):
        watch.check(1.0, float("nan"))
    assert watch.skipped_steps == 2
