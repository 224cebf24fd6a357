"""The ceilings of this machine: the rate of a large matrix product, and the bandwidth of a copy in memory.

    for ceiling in ceilings(torch.device("cuda")): print(ceiling)

A product of two matrices of n x n has 2 n^3 operations; a copy reads and writes each byte. Matrices are random: zeros would be faster,
because a GPU then takes less power and keeps a higher clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

SIZES = {"cuda": 8192, "cpu": 1024}  # of the matrices
COPIED = {"cuda": 2**30, "cpu": 2**27}  # bytes
REPEATS, WARMUP = 20, 3


@dataclass(frozen=True)
class Ceiling:
    """A rate per second: operations or bytes, the median, the least and the most."""

    name: str
    unit: str
    rate: float
    least: float
    most: float


def ceilings(device: torch.device) -> Iterator[Ceiling]:
    """Yields the matrix rate (in bfloat16 on a GPU, in float32 on a CPU) and the bandwidth of a copy."""
    size, copied = SIZES.get(device.type, 1024), COPIED.get(device.type, 2**27)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x_DD, y_DD = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out_DD = torch.empty_like(x_DD)
    name = f"matrix product of {size} x {size} in {str(dtype).removeprefix('torch.')}"
    yield _ceiling(name, "TFLOP/s", 2e-12 * size**3, seconds(lambda: torch.mm(x_DD, y_DD, out=out_DD), device))
    source_N = torch.zeros(copied, dtype=torch.uint8, device=device)
    target_N = torch.empty_like(source_N)
    yield _ceiling("copy in memory", "GB/s", 2e-9 * copied, seconds(lambda: target_N.copy_(source_N), device))


def _ceiling(name: str, unit: str, work: float, times: list[float]) -> Ceiling:
    rates = [work / one for one in times]
    return Ceiling(name, unit, statistics.median(rates), min(rates), max(rates))


def seconds(
    once: Callable[[], object], device: torch.device, repeats: int = REPEATS, warmup: int = WARMUP
) -> list[float]:
    """The times of a function, after some times that are not counted."""
    clock = StepClock(device, warmup, repeats)
    while clock.tick():
        once()
    return clock.seconds()


class StepClock:
    """Marks the ends of steps, of which the first are a warm-up: on a GPU by events on its stream, which wait for nothing.

    Call `tick` before the first step and after each one, until it returns False.
    """

    def __init__(self, device: torch.device, warmup: int, steps: int):
        self.device, self.warmup, self.steps = device, warmup, steps
        self.marks: list[torch.cuda.Event | float] = []
        self.processor: list[float] = []  # seconds that all threads of this process have computed, at each mark
        self.warmed_up = 0.0  # seconds of the warm-up, with all that is compiled in it

    def tick(self) -> bool:
        """Mark the end of a step. Returns whether another one is wanted."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        self.processor.append(time.process_time())
        if len(self.marks) == 1:
            self.warmed_up = -time.perf_counter()
        if len(self.marks) == self.warmup + 1:
            self.warmed_up += time.perf_counter()
        return len(self.marks) <= self.warmup + self.steps

    def processor_seconds(self) -> list[float]:
        """Returns the processor time of each step after the warm-up."""
        return [b - a for a, b in pairwise(self.processor[self.warmup :])]

    def seconds(self) -> list[float]:
        """Returns the time of each step after the warm-up."""
        marks = self.marks[self.warmup :]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return [a.elapsed_time(b) / 1000 for a, b in pairwise(marks)]  # type: ignore[union-attr,arg-type]
        return [b - a for a, b in pairwise(marks)]  # type: ignore[operator]
