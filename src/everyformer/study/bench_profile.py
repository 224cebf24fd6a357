"""Profiles training steps: which kernels of a GPU, or operators of a CPU, take the time, and how long none runs.

    print(profile(way, torch.device("cuda"), steps=5).kernels[:10])

The share without any is the time between the first and the last step's end that no kernel covers: the device waits for the host then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from everyformer.study.bench_steps import WARMUP, Way, free
from everyformer.study.ceilings import StepClock


@dataclass(frozen=True)
class Kernel:
    """A kernel or operator: milliseconds and calls in a step, and its share of the step."""

    name: str
    milliseconds: float
    calls: float
    share: float


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes. Kernels come with the slowest first."""

    milliseconds: float  # of a step
    idle: float  # share of the step in which no kernel or operator runs
    kernels: tuple[Kernel, ...]


def profile(way: Way, device: torch.device, steps: int) -> Profile:
    """Returns the profile of a few steps after the warm-up."""
    on_gpu = device.type == "cuda"
    kind, activity = ("CUDA", ProfilerActivity.CUDA) if on_gpu else ("CPU", ProfilerActivity.CPU)
    recorder = torch_profile(activities=[activity], acc_events=True)
    clock = StepClock(device, WARMUP.get(device.type, 2), steps)

    def tick() -> bool:
        wanted = clock.tick()
        if len(clock.marks) == clock.warmup + 1:
            _wait(device)
            recorder.start()
        if not wanted:
            _wait(device)
            recorder.stop()
        return wanted

    free(device)
    way(tick)
    seconds, busy = clock.seconds(), defaultdict[str, list[float]](list)
    free(device)
    spans: list[tuple[float, float]] = []
    for event in recorder.events() or []:
        if event.device_type.name == kind and not event.is_user_annotation:
            busy[event.name].append(event.self_device_time_total if on_gpu else event.self_cpu_time_total)
            spans.append((event.time_range.start, event.time_range.end))
    whole = 1e6 * sum(seconds)  # microseconds
    kernels = [
        Kernel(name, sum(times) / 1000 / steps, len(times) / steps, sum(times) / whole) for name, times in busy.items()
    ]
    kernels.sort(key=lambda one: -one.milliseconds)
    return Profile(whole / 1000 / steps, max(0.0, 1 - covered(spans) / whole), tuple(kernels))


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the length of the union of some intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
