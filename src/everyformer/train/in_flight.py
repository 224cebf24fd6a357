"""The numbers of training steps on their way to the host: a device computes the next steps meanwhile.

The copy of the numbers of a step is queued behind the step, and the host waits for it only when `MAX_STEPS` later steps are queued.
Numbers arrive in the order of their steps, after a number of steps that does not depend on the clock: what follows from them
happens at the same step in each process and after each interruption.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

MAX_STEPS = 2  # on a GPU


def steps_ahead(device: torch.device) -> int:
    """Returns how many steps the host may be ahead of a device. On a CPU there is nothing to overlap."""
    return MAX_STEPS if device.type == "cuda" else 0


class Sent(NamedTuple):
    """A step whose numbers are on their way."""

    step: int
    start: float  # when it started
    record: dict[str, Any]  # what the host has of it already


class Arrived(NamedTuple):
    """A step whose numbers have arrived. Its seconds are those since the step before ended, or since it started."""

    step: int
    seconds: float
    record: dict[str, Any]
    numbers: list[float]


class InFlight:
    """A queue of the steps whose numbers have not arrived."""

    def __init__(self, steps: int):
        self.steps = steps
        self.queue: deque[tuple[Sent, Tensor, torch.cuda.Event | None]] = deque()
        self.last = 0.0

    def send(self, sent: Sent, numbers: Tensor) -> None:
        """Begin to copy the numbers of a step, which later steps may overwrite then."""
        if numbers.device.type != "cuda":
            self.queue.append((sent, numbers.clone(), None))
            return
        copy, event = torch.empty_like(numbers, device="cpu", pin_memory=True), torch.cuda.Event(blocking=True)
        copy.copy_(numbers, non_blocking=True)
        event.record()
        self.queue.append((sent, copy, event))

    def arrived(self, *, all_steps: bool = False) -> Iterator[Arrived]:
        """Yields the steps, oldest first, until at most `steps` of them, or none with `all_steps`, are left in flight."""
        while len(self.queue) > (0 if all_steps else self.steps):
            sent, copy, event = self.queue.popleft()
            if event is not None:
                event.synchronize()
            now = time.perf_counter()
            seconds, self.last = now - max(sent.start, self.last), now
            yield Arrived(sent.step, seconds, sent.record, copy.tolist())
