"""Predicts what a training run takes before it starts: parameters, operations, memory, time, and settings that fit.

    plan(recipe).memory                   # bytes at the peak of training
    plan(recipe, measure=True).seconds    # for one step, measured on a few real ones
    plan(recipe, limit=8 << 30).changes   # ("run.accumulate=4",): the mildest settings that fit into 8 GiB

Parameters and operations are exact for the initial weights. Training can change the operations: adaptive spans and act-rnn's
pondering are planned with their initial lengths, halting layers with all their steps.

`tensors` is the peak of a training step on fake tensors (`CostCounter`): weights, gradients, the optimizer's state and all that
is saved for the backward pass. It is within 10 % of the real step (docs/results/plan_memory.md). `process` comes on top: the
interpreter, its libraries and the data on a CPU, the workspaces of the libraries on CUDA, where the sum is what
torch.cuda.max_memory_allocated returns. On a CPU the resident memory can be higher still, because the C library keeps freed
blocks.

A compiled step is planned uncompiled and the flex kernel as sdpa; both need less. Evaluation is not planned: it saves nothing
for a backward pass. The time in which an agent acts is not planned either.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from everyformer.attention.span import DynamicSpanModule, SpanModule
from everyformer.family.table import find
from everyformer.network.model import EncoderDecoder
from everyformer.network.ponder_rnn import PonderCell
from everyformer.network.size import parameters, total_memory
from everyformer.study.cost import CostCounter
from everyformer.task.batch import Batch
from everyformer.task.task import TaskData
from everyformer.train.distributed import World, find_device
from everyformer.train.learner import Learner
from everyformer.train.memory import resident_memory
from everyformer.train.recipe import Recipe, override
from everyformer.train.schedule import batch_size, sequences_before

SAMPLED = 8  # steps of which the largest batch is planned
MEASURED = 4  # real steps that are timed, after the first ones
MAX_SECONDS = 20.0  # after which no other step is timed
MIN_WIDTH = 32  # no narrower model is proposed
MOST_PIECES = 2**16  # that run.accumulate accepts
USABLE = {"cuda": 0.95, "cpu": 0.8}  # share of the memory that a plan fills; allocators lose some of the rest


@dataclass(frozen=True)
class Plan:
    """What a run takes. Memory is in bytes."""

    recipe: Recipe
    device: str
    parameters: int
    flops: int  # of one step with the largest batch
    run_flops: int  # of all steps
    targets: int  # in one step
    tensors: int  # at the peak of a step
    process: int  # what the process holds besides
    checkpoint: int  # size of one checkpoint on disk
    limit: int  # memory that the run may take
    grows: tuple[str, ...] = ()  # learned sizes, as planned; training may enlarge them
    changes: tuple[str, ...] | None = ()  # settings that make it fit; None if none do
    seconds: float | None = None  # for one step, if measured
    measured: int | None = None  # tensors at the peak of the measured steps
    kernels: tuple[str, ...] = ()  # of the layers, as text
    untraced: str | None = (
        None  # why fake tensors could not be used, if they could not; real steps were counted instead
    )

    @property
    def memory(self) -> int:
        """Tensors and process together, at the peak of training."""
        return self.tensors + self.process

    @property
    def fits(self) -> bool:
        return self.memory <= self.limit

    def __str__(self) -> str:
        return "\n".join(f"{name:<11} {text}" for name, text in self.lines().items())

    def lines(self) -> dict[str, str]:
        """What is planned, by label, as text."""
        run = self.recipe.run
        lines = {
            "parameters": f"{self.parameters:,}",
            "operations": f"{self.flops:.3g} per step of {self.targets:,} targets, {self.run_flops:.3g} in {run.steps:,} steps",
            "memory": f"{size_of(self.memory)} at the peak: {size_of(self.tensors)} of tensors on {self.device}, and "
            f"{size_of(self.process)} for the process; {size_of(self.limit)} are available",
            "checkpoint": f"{size_of(self.checkpoint)} on disk; the last {run.keep} and the best are kept",
        }
        if self.kernels:
            lines["attention"] = "; ".join(self.kernels)
        if self.grows:
            lines["initially"] = f"{'; '.join(self.grows)}; training may enlarge them"
        if self.seconds is not None:
            rate = self.flops / self.seconds
            total = _duration(self.run_flops / rate)  # smaller batches of a batch schedule take less time
            lines["time"] = f"{self.seconds:.3g} s per step, {total} in total without evaluations; {rate:.3g} FLOP/s"
        if self.measured is not None:
            lines["measured"] = f"{size_of(self.measured)} of tensors at the peak"
        if self.untraced:
            lines["untraced"] = f"{self.untraced}; so the numbers are those of real steps, and no settings were tried"
        elif self.changes is None:
            lines["to fit"] = "no setting that was tried fits; choose a much smaller member, or a larger machine"
        elif self.changes:
            lines["to fit"] = " ".join(self.changes)
        return lines


def plan(recipe: Recipe, *, limit: int | None = None, measure: bool = False) -> Plan:
    """Plan a run on this machine. Raises ValueError if the recipe is invalid.

    limit: bytes that the run may take. Default: what the device has, less a margin.
    measure: time a few real steps. Default: False.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit} bytes; give 1 or more, or None for what the device has")
    device = find_device(recipe.run.device)
    init_from = None if recipe.init_from is None else Path(recipe.init_from)
    data = recipe.task.open(recipe.data, init_from)
    data.examples()  # reads the data, which the process then holds
    limit = limit or int(USABLE.get(device.type, 0.8) * total_memory(device))
    try:
        planned = _predict(recipe, data, device, limit)
    except (ValueError, MemoryError):
        raise
    except Exception as error:  # as of a part of your own that reads the values of its input
        planned = _count_real_steps(
            recipe, data, device, limit, f"the model cannot run on fake tensors ({_first_line(error)})"
        )
    if not planned.fits:
        changes = None if planned.untraced else _first_that_fits(planned, data, device)
        return dataclasses.replace(planned, changes=changes)
    return _measure(planned, data, device) if measure else planned


def _count_real_steps(recipe: Recipe, data: TaskData, device: torch.device, limit: int, reason: str) -> Plan:
    """A plan from real steps. Raises ValueError if they fail too."""
    if (least := _weight_bytes(recipe, data)) > limit:
        raise ValueError(
            f"{reason}, and its weights alone need {size_of(least)} in training; {size_of(limit)} are available"
        )
    try:
        return dataclasses.replace(_predict(recipe, data, device, limit, fake=False), untraced=reason)
    except (ValueError, MemoryError):
        raise
    except Exception as error:
        if "allocate" in str(error):  # out of memory, which the caller reports
            raise
        raise ValueError(
            f"a training step of this model fails ({_first_line(error)}); correct the part that fails"
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _predict(recipe: Recipe, data: TaskData, device: torch.device, limit: int, fake: bool = True) -> Plan:
    process = _process_memory(device)
    cost, learner, batch, count = count_steps(recipe, data, device, fake=fake)
    return Plan(
        recipe=recipe,
        device=str(device),
        parameters=sum(p.numel() for p in learner.network.parameters()),
        flops=cost.flops,
        run_flops=cost.flops * sequences_before(recipe.run, recipe.run.steps) // len(batch),
        targets=count,
        tensors=cost.peak,
        process=process,
        checkpoint=sum(x.numel() * x.element_size() for x in _saved(learner)),
        limit=limit,
        kernels=tuple(learner.kernel_lines()),
        grows=tuple(sorted({str(one.grows) for one in learner.network.modules() if hasattr(one, "grows")})),
    )


def count_steps(
    recipe: Recipe, data: TaskData, device: torch.device, pieces: int | None = None, fake: bool = True
) -> tuple[CostCounter, Learner, Batch, int]:
    """Steps until a segment memory is full, and the last one again: from the second step on the optimizer has its state. They run
    on fake tensors unless `fake` is False. With `pieces`, only so many pieces of an accumulated batch, which suffice for the memory."""
    run = recipe.run
    eager = {"compile": "no", "kernel": "sdpa" if run.kernel == "flex" else run.kernel}  # neither runs on fake tensors
    plain = replace(recipe, run=replace(run, **eager, accumulate=min(run.accumulate, pieces or run.accumulate)))
    cost = CostCounter(device, fake=fake)
    with torch.random.fork_rng(devices=[]):
        with cost, device:
            learner = _learner(plain, data, device)
        if fake:
            _assume_initial(learner.network)
        batch = _largest(recipe, data)  # a real one: code reads it
        count = data.count(batch)
        learner.scaler = torch.amp.GradScaler(device.type, enabled=False)  # it would read the gradients
        rows = len(batch) if pieces is None else min(len(batch), pieces * -(-len(batch) // run.accumulate))
        with cost:
            cost.add((dict(batch.tensors), dict(batch.shared or {})))
            for _ in _until_memory_is_full(learner):
                first_event, cost.flops, learner.kernels = len(cost.events), 0, None
                _step(learner, batch.rows(0, rows), count)
    cost.repeat_since(first_event)
    return cost, learner, batch, count


def _assume_initial(network: nn.Module) -> None:
    """Give spans and pondering their initial lengths: fake tensors have no values from which to read others."""
    for module in network.modules():
        if isinstance(module, SpanModule | DynamicSpanModule):
            module.assumed_span = module.value.start * module.value.max_span
        elif isinstance(module, PonderCell):
            module.max_steps = module.initial_steps


def _learner(recipe: Recipe, data: TaskData, device: torch.device) -> Learner:
    """A learner with random weights: a plan does not depend on their values."""
    value = data.adapt(recipe.value(data.member_settings()))
    return Learner(replace(recipe, init_from=None), data, value, World(device=device))


def _step(learner: Learner, batch: Batch, count: int) -> None:
    """One step at learning rate 0, so that a network does not learn to ponder longer than planned."""
    learner.step(batch, count, 0.0)


def _until_memory_is_full(learner: Learner) -> Iterator[None]:
    """Yields once before each step until the step before it carried no more than the one before: a segment memory grows."""
    before = -1
    while before != (before := _carried(learner)):
        yield


def _carried(learner: Learner) -> int:
    """The number of elements in the caches that the last step left for the next."""
    return sum(x.numel() for cache in learner.carried_cache if cache is not None for x in cache.state_dict().values())


def _largest(recipe: Recipe, data: TaskData) -> Batch:
    """The batch with the most elements among the first ones of each batch size and context: texts differ in length."""
    run = recipe.run
    starts = {0, *(start for start, _ in (*run.batch_schedule, *data.context_schedule) if start < run.steps)}
    steps = [step for start in starts for step in range(start, min(start + SAMPLED, run.steps))]
    batches = (data.batch(step, batch_size(run, step), run.seed) for step in steps)
    return max(batches, key=lambda batch: sum(x.numel() for x in batch.tensors.values()))


def _saved(learner: Learner) -> Iterator[Tensor]:
    """The tensors in a checkpoint."""
    yield from {id(x): x for x in learner.network.state_dict(keep_vars=True).values()}.values()
    for optimizer in learner.optimizers:
        for state in optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor))
    yield from (learner.ema or {}).values()


def _measure(planned: Plan, data: TaskData, device: torch.device) -> Plan:
    """The plan with the time and the peak tensor memory of a few real steps."""
    seconds: list[float] = []
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[]):
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(device)
        with nullcontext() if on_cuda else CostCounter(device) as cost:
            learner, batch = _learner(planned.recipe, data, device), _largest(planned.recipe, data)
            for _ in _until_memory_is_full(learner):  # at least the first step, which takes longer
                _step(learner, batch, planned.targets)
            if cost is not None:
                _step(learner, batch, planned.targets)  # with the optimizer's state
        while len(seconds) < MEASURED and sum(seconds) <= MAX_SECONDS:
            start = time.perf_counter()
            _step(learner, batch, planned.targets)
            if on_cuda:
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
    tensors = torch.cuda.max_memory_allocated(device) - planned.process if cost is None else cost.peak
    return dataclasses.replace(planned, seconds=statistics.median(seconds), measured=tensors)


def _first_that_fits(planned: Plan, data: TaskData, device: torch.device) -> tuple[str, ...] | None:
    """The mildest settings that fit: the batch in more pieces, then recomputed activations, bf16, a smaller model."""
    recipe = planned.recipe

    def fits(settings: tuple[str, ...]) -> bool:
        changed, available = override(recipe, settings), planned.limit - planned.process
        try:
            if _weight_bytes(changed, data) > available:
                return False
            return count_steps(changed, data, device, pieces=2)[0].peak <= available  # a third piece needs no more
        except (ValueError, RuntimeError):  # for example a width that the heads do not divide
            return False

    pieces, most = [recipe.run.accumulate], min(recipe.run.batch, MOST_PIECES)
    while pieces[-1] < most:
        pieces.append(min(2 * pieces[-1], most))
    for stage in _stages(recipe, data):
        options = [(*stage, *([f"run.accumulate={number}"] if number > pieces[0] else [])) for number in pieces]
        if fits(options[-1]):
            low, high = 0, len(options) - 1  # more pieces never need more: bisect
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if fits(options[middle]) else (middle + 1, high)
            return options[high]
    return None


def _weight_bytes(recipe: Recipe, data: TaskData) -> int:
    """Bytes of weights, gradients and optimizer state: a lower bound of the memory."""
    copies = 4 if recipe.optim.name == "adamw" else 3
    return 4 * copies * parameters(data.adapt(recipe.value(data.member_settings())))


def _stages(recipe: Recipe, data: TaskData) -> Iterator[tuple[str, ...]]:
    """Settings that need less and less memory; each includes those before it."""
    value = recipe.value(data.member_settings())
    side = value.decoder if isinstance(value, EncoderDecoder) else value
    layers, width = getattr(side.body, "num_layers", 1), side.width
    yield ()
    run = [] if recipe.run.checkpoint_segments >= layers else [f"run.checkpoint_segments={layers}"]
    yield tuple(run)
    if recipe.run.precision == "fp32":
        run = [*run, "run.precision=bf16"]
        yield tuple(run)
    known = find(recipe.member).settings()
    while ("layers" in known and layers > 1) or ("width" in known and width > MIN_WIDTH):
        smaller = []
        if "layers" in known:
            layers = max(1, layers // 2)
            smaller += [f"model.layers={layers}"]
        run = [
            f"run.checkpoint_segments={layers}" if setting.startswith("run.checkpoint_segments=") else setting
            for setting in run
        ]
        yield (*run, *smaller, *([f"model.width={width}"] if width != side.width else []))
        if "width" in known:
            width = max(MIN_WIDTH, width // 2)
            yield (*run, *smaller, f"model.width={width}")


def _process_memory(device: torch.device) -> int:
    """Memory besides the run's tensors: of the process on a CPU, of the libraries' workspaces on CUDA.

    A small layer is trained first, because libraries allocate at their first use.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with torch.random.fork_rng(devices=[]):
        layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, device=device)
        optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
        for bf16 in (False, True):
            with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
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
