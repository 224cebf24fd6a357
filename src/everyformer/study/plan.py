"""The plan of a run, before it is begun: parameters, operations, memory, time, and what to change where it does not fit.

    plan(recipe).memory                   # bytes at the peak of training
    plan(recipe, measure=True).seconds    # a step takes, from a few real ones
    plan(recipe, limit=8 << 30).changes   # ("run.accumulate=4",): the first settings that fit into 8 GiB

Parameters and operations are exact, but what is learned may change the operations: spans and act-rnn's pondering are planned as
they begin, halting layers with all their steps. Memory is that of a training step run on imagined tensors (`Tally`): weights,
gradients, the optimizer's state, everything kept for the backward pass, at their peak. To it come what the process
holds anyhow and, on a CPU, the freed memory that the C library keeps (`everyformer.study.malloc`), which can be as much
again. On CUDA the sum is what torch.cuda.max_memory_allocated then says; on a CPU it is the resident memory at its peak,
which differs by some percent from one run to the next. A compiled step is planned as it is without, and the flex kernel
as sdpa; both need less. Evaluations are not planned:
they keep nothing for a backward pass. Nor is the time in which an agent acts.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from everyformer.family.table import find, parameters
from everyformer.network.model import EncoderDecoder
from everyformer.study import malloc
from everyformer.study.tally import Tally
from everyformer.task.batch import Batch
from everyformer.task.task import TaskData
from everyformer.train.distributed import World, find_device
from everyformer.train.learner import Learner
from everyformer.train.memory import peak_memory, resident_memory, total_memory
from everyformer.train.recipe import Recipe, override
from everyformer.train.schedule import batch_size, sequences_before

LOOKED = 8  # steps whose batches are looked at for the largest
MEASURED = 4  # real steps, after the first ones
ENOUGH = 20.0  # seconds of them
NARROW = 32  # a model is not made narrower than this to fit
REPEATED = 4  # times a step comes again; the C library keeps some more after each of the first few
SAFE = 0.95  # of the device's memory; the rest is for what the allocator cannot use


@dataclass(frozen=True)
class Plan:
    """What a run will take. Memory in bytes."""

    recipe: Recipe
    device: str
    parameters: int
    flops: int  # of one step, with the largest batch
    run_flops: int  # of all steps
    targets: int  # that one step learns from
    tensors: int  # at the peak of a step
    kept: int  # freed, but kept by the C library
    process: int  # what is held besides
    checkpoint: int  # on the disk, for each that is kept
    limit: int  # what there is
    grows: tuple[str, ...] = ()  # what may take more memory when it has learned, as it begins
    changes: tuple[str, ...] | None = ()  # what makes it fit; None where nothing does
    seconds: float | None = None  # of one step, where it was measured
    measured: int | None = None  # memory at the peak of the measured steps

    @property
    def memory(self) -> int:
        """At the peak of training."""
        return self.tensors + self.kept + self.process

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit

    def __str__(self) -> str:
        run = self.recipe.run
        kept = f"{size_of(self.kept)} freed but kept by the C library, " if self.kept else ""
        lines = {
            "parameters": f"{self.parameters:,}",
            "operations": f"{self.flops:.3g} a step of {self.targets:,} targets, {self.run_flops:.3g} in {run.steps:,} steps",
            "memory": f"{size_of(self.memory)} at the peak: {size_of(self.tensors)} of tensors on {self.device}, "
            f"{kept}{size_of(self.process)} besides; there is {size_of(self.limit)}",
            "checkpoint": f"{size_of(self.checkpoint)} on the disk, {run.keep} and the best are kept",
        }
        if self.grows:
            lines["begins with"] = f"{'; '.join(self.grows)}; what it learns may take more"
        if self.seconds is not None:
            rate = self.flops / self.seconds
            whole = _duration(self.run_flops / rate)  # a batch that grows takes less time before
            lines["time"] = f"{self.seconds:.3g} s a step, {whole} in all without evaluations; {rate:.3g} operations/s"
        if self.measured is not None:
            lines["measured"] = f"{size_of(self.measured)} at the peak"
        if self.changes is None:
            lines["to fit"] = "nothing tried fits; take a much smaller member, or a larger machine"
        elif self.changes:
            lines["to fit"] = " ".join(self.changes)
        return "\n".join(f"{name:<11} {text}" for name, text in lines.items())


def plan(recipe: Recipe, *, limit: int | None = None, measure: bool = False) -> Plan:
    """Plan a run on this machine. `limit` is the memory in bytes that it may take; None: what the device has."""
    if limit is not None and limit < 1:
        raise ValueError(f"a limit of {limit} bytes: give 1 or more, or None for what the device has")
    device = find_device(recipe.run.device)
    begun = None if recipe.init_from is None else Path(recipe.init_from)
    data = recipe.task.open(recipe.data, recipe.model.get("context"), begun)
    data.examples()  # reads the data, if nothing has: the process holds them
    found = _imagine(recipe, data, device, _held(device), limit or int(SAFE * total_memory(device)))
    if not found.fits:
        return dataclasses.replace(found, changes=_first_that_fits(found, data, device))
    return _measure(found, data, device) if measure else found


def _imagine(recipe: Recipe, data: TaskData, device: torch.device, process: int, limit: int) -> Plan:
    tally, learner, batch, count = _walk(recipe, data, device)
    return Plan(
        recipe=recipe,
        device=str(device),
        parameters=sum(p.numel() for p in learner.network.parameters()),
        flops=tally.flops,
        run_flops=tally.flops * sequences_before(recipe.run, recipe.run.steps) // len(batch),
        targets=count,
        tensors=tally.peak,
        kept=_taken(tally) - tally.peak,
        process=process,
        checkpoint=sum(x.numel() * x.element_size() for x in _saved(learner)),
        limit=limit,
        grows=tuple(sorted({str(one.grows) for one in learner.network.modules() if hasattr(one, "grows")})),
    )


def _walk(
    recipe: Recipe, data: TaskData, device: torch.device, pieces: int | None = None
) -> tuple[Tally, Learner, Batch, int]:
    """Imagined steps until a memory is full, and the last of them again: from the second on there is an optimizer's state. With
    `pieces`, for the memory alone, only so many pieces of the batch."""
    run = recipe.run
    eager = {"compile": "no", "kernel": "sdpa" if run.kernel == "flex" else run.kernel}  # these cannot be imagined
    plain = replace(recipe, run=replace(run, **eager, accumulate=min(run.accumulate, pieces or run.accumulate)))
    tally = Tally(device, imagined=True)
    with torch.random.fork_rng(devices=[]):
        with tally, device:
            learner = _learner(plain, data, device)
        batch = _largest(recipe, data)  # a real one: code looks at it
        count = data.count(batch)
        learner.scaler = torch.amp.GradScaler(device.type, enabled=False)  # it would look at the gradients
        rows = len(batch) if pieces is None else min(len(batch), pieces * -(-len(batch) // run.accumulate))
        with tally:
            tally.add((dict(batch.tensors), dict(batch.shared or {})))
            for _ in _filling(learner):
                begun, tally.flops = len(tally.events), 0
                _step(learner, batch.rows(0, rows), count)
    tally.repeat(begun, REPEATED)
    return tally, learner, batch, count


def _taken(tally: Tally) -> int:
    """Bytes that the tensors take at the peak, with what the C library keeps."""
    heap = tally.device.type == "cpu" and sys.platform == "linux"  # of others it is not known
    return max(tally.peak, malloc.resident(tally.events)) if heap else tally.peak


def _learner(recipe: Recipe, data: TaskData, device: torch.device) -> Learner:
    """What its weights begin with does not matter."""
    value = data.adapt(recipe.value(data.member_settings()))
    return Learner(replace(recipe, init_from=None), data, value, World(device=device))


def _step(learner: Learner, batch: Batch, count: int) -> Tensor:
    """At a rate of 0: a net that learned to ponder longer would not be the planned one."""
    loss, norm = learner.gradients(batch, count)
    learner.step(0.0, norm if learner.recipe.optim.clip else None)
    learner.scaler.update()
    learner.zero_grad()
    return loss


def _filling(learner: Learner) -> Iterator[None]:
    """Once for each step until a memory, if there is any, was full before it: it grows, and with it what a step takes."""
    before = -1
    while before != (before := _carried(learner)):
        yield


def _carried(learner: Learner) -> int:
    """How many numbers the last step left for the next."""
    return sum(x.numel() for cache in learner.carried_cache if cache is not None for x in cache.tensors().values())


def _largest(recipe: Recipe, data: TaskData) -> Batch:
    """Of the first batches of the largest size the one with the most numbers: texts differ in length."""
    run = recipe.run
    size = max(batch_size(run, start) for start in (0, *(start for start, _ in run.batch_schedule)))
    batches = [data.batch(step, size, run.seed) for step in range(min(LOOKED, run.steps))]
    return max(batches, key=lambda batch: sum(x.numel() for x in batch.tensors.values()))


def _saved(learner: Learner) -> Iterator[Tensor]:
    """What a checkpoint keeps."""
    yield from {id(x): x for x in learner.network.state_dict(keep_vars=True).values()}.values()
    for optimizer in learner.optimizers:
        for state in optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor))
    yield from (learner.ema or {}).values()


def _measure(found: Plan, data: TaskData, device: torch.device) -> Plan:
    """The plan with the time and the memory of a few real steps."""
    seconds: list[float] = []
    with torch.random.fork_rng(devices=[]):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        learner, batch = _learner(found.recipe, data, device), _largest(found.recipe, data)
        for _ in _filling(learner):  # which is the first step at least, and that takes longer
            _step(learner, batch, found.targets)
        while len(seconds) < MEASURED and sum(seconds) <= ENOUGH:
            began = time.perf_counter()
            float(_step(learner, batch, found.targets))  # waits for the device
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - began)
    return dataclasses.replace(found, seconds=statistics.median(seconds), measured=peak_memory(device))


def _first_that_fits(found: Plan, data: TaskData, device: torch.device) -> tuple[str, ...] | None:
    """The mildest settings that fit: the batch in more pieces, then activations recomputed, bf16, a smaller model."""
    recipe = found.recipe

    def fits(settings: tuple[str, ...]) -> bool:
        changed, room = override(recipe, settings), found.limit - found.process
        try:
            if _least(changed, data) > room:
                return False
            tally = _walk(changed, data, device, pieces=2)[0]  # a third piece needs no more than the second
        except ValueError:  # a width that does not divide into the heads, for example
            return False
        return tally.peak <= room and _taken(tally) <= room

    pieces = [recipe.run.accumulate]
    while pieces[-1] < recipe.run.batch:
        pieces.append(min(2 * pieces[-1], recipe.run.batch))
    for stage in _stages(recipe, data):
        ways = [(*stage, *([f"run.accumulate={number}"] if number > pieces[0] else [])) for number in pieces]
        if fits(ways[-1]):
            low, high = 0, len(ways) - 1  # more pieces never need more: halve the interval
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(ways[middle]) else (middle + 1, high)
            return ways[high]
    return None


def _least(recipe: Recipe, data: TaskData) -> int:
    """Bytes of weights, gradients and what the optimizer keeps of them, at the least."""
    each = 4 * (4 if recipe.optim.name == "adamw" else 3)
    return each * parameters(data.adapt(recipe.value(data.member_settings())))


def _stages(recipe: Recipe, data: TaskData) -> Iterator[tuple[str, ...]]:
    """Settings that need less and less, each with those before it."""
    value = recipe.value(data.member_settings())
    side = value.decoder if isinstance(value, EncoderDecoder) else value
    layers, width = getattr(side.body, "layers", 1), side.width
    yield ()
    run = [] if recipe.run.checkpoint_segments >= layers else [f"run.checkpoint_segments={layers}"]
    yield tuple(run)
    if recipe.run.precision == "fp32":
        run = [*run, "run.precision=bf16"]
        yield tuple(run)
    known = find(recipe.member).settings()
    while ("layers" in known and layers > 1) or ("width" in known and width > NARROW):
        smaller = []
        if "layers" in known:
            layers = max(1, layers // 2)
            smaller += [f"model.layers={layers}"]
        run = [
            f"run.checkpoint_segments={layers}" if one.startswith("run.checkpoint_segments=") else one for one in run
        ]
        yield (*run, *smaller, *([f"model.width={width}"] if width != side.width else []))
        if "width" in known:
            width = max(NARROW, width // 2)
            yield (*run, *smaller, f"model.width={width}")


def _held(device: torch.device) -> int:
    """What is held besides the run's tensors: the process on a CPU, the libraries' workspaces on CUDA.

    A small layer is trained first, because libraries take their memory when they are first used.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, device=device)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        for kind in (torch.float32, torch.bfloat16):
            with torch.autocast(device.type, torch.bfloat16, enabled=kind == torch.bfloat16):
                layer(torch.ones(8, 64, 64, device=device)).sum().backward()
            optimizer.step()
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident_memory()


def size_of(count: int) -> str:
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.3g} {unit}"
    return f"{count} bytes"


def _duration(seconds: float) -> str:
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} seconds" if seconds >= 10 else f"{seconds:.2g} seconds"
