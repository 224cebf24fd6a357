"""Measures training steps: those of a run of this library, or of any other function.

A way is a function that builds a model, takes steps, and calls `tick` before the first step and after each one until that returns
False. The steps of our ways are those of `everyformer train`, by its loop, with everything that a run does between two of them. The
time of a step is that from the end of the one before to its own end.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from everyformer.study.ceilings import StepClock
from everyformer.study.cost import CostCounter
from everyformer.train.distributed import World
from everyformer.train.loop import Loop
from everyformer.train.recipe import Recipe
from everyformer.train.trained import TrainedRun

Tick = Callable[[], bool]
Way = Callable[[Tick], object]
WARMUP = {
    "cuda": 6
}  # steps in which code is compiled, algorithms are chosen, and CUDA graphs are captured; elsewhere 2
ROUNDS = {"cuda": 1}  # how often each way is built and measured, in turn with the others; elsewhere 3


@dataclass(frozen=True)
class Steps:
    """Seconds of a training step (median, least, most), of the processor in a step (median) and of the warm-up, and bytes at the
    peak; or why it failed."""

    median: float
    least: float
    most: float
    count: int
    processor: float
    warmup: float
    memory: int | None
    failure: str | None = None


def train_steps(recipe: Recipe, device: torch.device, tick: Tick) -> TrainedRun:
    """Train as `everyformer train` does, without a folder, until `tick` returns False. Returns the run."""
    data = recipe.task.open(recipe.data, None)
    model = data.adapt(recipe.value(data.member_settings()))
    measured = "all steps are measured"

    def count(record: dict[str, object]) -> None:
        # On a GPU the records of the last steps arrive after the stop.
        if loop.stop_reason is None and record["kind"] in ("begin", "step") and not tick():
            loop.stop_reason = measured

    loop = Loop(recipe, data, model, None, World(device=device), (count,))
    run = loop.run(None)
    if loop.stop_reason != measured:
        raise KeyboardInterrupt  # the loop takes the signal for a request to stop after the step
    return run


def measure(ways: dict[str, Way], device: torch.device, steps: int) -> dict[str, Steps]:
    """Returns the steps of each way. Without a GPU the ways take turns, because other programs slow them down."""
    rounds = ROUNDS.get(device.type, 3) if len(ways) > 1 else 1
    each = -(-steps // rounds)
    times, busy = ({name: list[float]() for name in ways} for _ in range(2))
    failures, memory, warmups = dict[str, str](), dict[str, int | None](), dict[str, float]()
    for _ in range(rounds):
        for name, way in ways.items():
            if name in failures:
                continue
            try:
                if name not in memory:
                    memory[name] = None if device.type == "cuda" else _tensors(way, device)
                clock, peak = _timed(way, device, each)
            except Exception as error:  # the other ways and rows are measured all the same
                failures[name] = reason(error)
                continue
            times[name] += clock.seconds()
            busy[name] += clock.processor_seconds()
            warmups.setdefault(name, clock.warmed_up)
            memory[name] = memory[name] or peak
    return {
        name: Steps(0.0, 0.0, 0.0, 0, 0.0, 0.0, None, failures[name])
        if name in failures
        else _steps(times[name], busy[name], warmups[name], memory[name])
        for name in ways
    }


def _steps(times: Sequence[float], busy: Sequence[float], warmup: float, memory: int | None) -> Steps:
    return Steps(statistics.median(times), min(times), max(times), len(times), statistics.median(busy), warmup, memory)


def reason(error: BaseException) -> str:
    """Returns why a way failed, in one line."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def _timed(way: Way, device: torch.device, steps: int) -> tuple[StepClock, int | None]:
    """The marks of the steps, and the peak of the memory on a GPU."""
    free(device)
    clock, before = StepClock(device, WARMUP.get(device.type, 2), steps), 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    try:
        way(clock.tick)
        clock.seconds()  # waits for the last step, whose errors would else come later
        return clock, torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None
    finally:
        free(device)


def _tensors(way: Way, device: torch.device) -> int | None:
    """The peak of the tensors in two steps, without a GPU. None for code that is compiled, whose tensors are not seen."""
    if getattr(way, "compiles", False):
        return None
    clock = StepClock(device, 0, 2)
    with CostCounter(device) as cost:
        way(clock.tick)
    return cost.peak


def free(device: torch.device) -> None:
    """Free the models of the way before, and its compiled code."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
