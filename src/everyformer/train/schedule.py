"""Schedules: the learning rate and the batch size at a step, as pure functions.

    constant      1 after warm-up
    cosine        half a cosine down to `floor`                                    Loshchilov & Hutter 2016
    linear        a straight line down to `floor`
    inverse_sqrt  sqrt(warmup / step), what Vaswani et al. 2017 do with d^-0.5 taken into lr
    wsd           constant, then a straight line down in the last `decay` of the steps after warm-up    warmup-stable-decay
Warm-up rises in a straight line from 1/warmup at step 0 to 1.
"""

from __future__ import annotations

import math

from everyformer.train.recipe import Optim, Run


def rate(optim: Optim, step: int, steps: int) -> float:
    """The share of `lr` at a step, counted from 0."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    left = (step - optim.warmup) / max(1, steps - 1 - optim.warmup)
    if optim.schedule == "cosine":
        return optim.min_lr + (1 - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * left))
    if optim.schedule == "linear":
        return optim.min_lr + (1 - optim.min_lr) * (1 - left)
    if optim.schedule == "inverse_sqrt":
        return math.sqrt(max(1, optim.warmup) / (step + 1))
    if optim.schedule == "wsd":
        falling = max(0.0, left - (1 - optim.decay)) / optim.decay
        return optim.min_lr + (1 - optim.min_lr) * (1 - falling)
    return 1.0


def batch_size(run: Run, step: int) -> int:
    """How many sequences a step takes: the last of the sizes whose step has come."""
    size = run.batch
    for start, larger in sorted(run.batch_schedule):
        if step >= start:
            size = larger
    return size


def sequences_before(run: Run, step: int) -> int:
    """How many sequences the steps before this one took."""
    marks = [0, *(min(start, step) for start, _ in sorted(run.batch_schedule)), step]
    sizes = [run.batch, *(size for _, size in sorted(run.batch_schedule))]
    return sum(size * (end - start) for size, start, end in zip(sizes, marks, marks[1:], strict=False))
