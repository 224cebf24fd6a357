"""Schedules: the learning rate and the batch size of a step, as pure functions.

    constant      1 after warm-up
    cosine        half a cosine down to `min_lr`                                   Loshchilov & Hutter 2016
    linear        a straight line down to `min_lr`
    inverse_sqrt  sqrt(warmup / step), as Vaswani et al. 2017, with their factor d^-0.5 in lr
    wsd           warmup-stable-decay: constant, then a straight line down in the last `decay` of the steps after warm-up
The numbers are factors of the peak learning rate. Warm-up is a straight line from 1/warmup at step 0 to 1.
"""

from __future__ import annotations

import math

from everyformer.train.recipe import Optim, Run


def lr_factor(optim: Optim, step: int, steps: int) -> float:
    """Returns the learning rate of a step, counted from 0, as a factor of `optim.lr`."""
    if step < optim.warmup:
        return (step + 1) / optim.warmup
    elapsed = (step - optim.warmup) / max(1, steps - 1 - optim.warmup)
    if optim.schedule == "cosine":
        return optim.min_lr + (1 - optim.min_lr) * 0.5 * (1 + math.cos(math.pi * elapsed))
    if optim.schedule == "linear":
        return optim.min_lr + (1 - optim.min_lr) * (1 - elapsed)
    if optim.schedule == "inverse_sqrt":
        return math.sqrt(max(1, optim.warmup) / (step + 1))
    if optim.schedule == "wsd":
        falling = max(0.0, elapsed - (1 - optim.decay)) / optim.decay
        return optim.min_lr + (1 - optim.min_lr) * (1 - falling)
    return 1.0


def batch_size(run: Run, step: int) -> int:
    """Returns the batch size of a step: the last size of the schedule whose step has been reached."""
    size = run.batch
    for start, scheduled in sorted(run.batch_schedule):
        if step >= start:
            size = scheduled
    return size


def sequences_before(run: Run, step: int) -> int:
    """Returns the number of sequences in the batches of all steps before this one."""
    bounds = [0, *(min(start, step) for start, _ in sorted(run.batch_schedule)), step]
    sizes = [run.batch, *(size for _, size in sorted(run.batch_schedule))]
    return sum(size * (end - start) for size, start, end in zip(sizes, bounds, bounds[1:], strict=False))
