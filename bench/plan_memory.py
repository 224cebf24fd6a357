"""Compares the memory that `everyformer plan` predicts with the memory of real training steps.

    python -m bench.plan_memory                      # the table of docs/results/plan_memory.md, on this machine
    python -m bench.plan_memory --only gpt2 --steps 5

For each row the plan is made in one process, and real steps of the training loop run in another. On a CPU the tensors' peak is
compared: the peak of what torch's allocator hands out, recorded by torch.profiler. On CUDA tensors and workspaces are compared
with torch.cuda.max_memory_allocated. A ratio of 1 is a perfect plan.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

# member, size, settings
Row = tuple[str, str, list[str]]
CPU: list[Row] = [
    ("gpt2", "tiny", ["run.batch=32"]),
    ("gpt2", "small", ["run.batch=2", "task.context=256"]),
    ("gpt2", "small", ["run.batch=2", "task.context=256", "optim.name=muon", "optim.ema=0.99"]),
    ("byte-language", "tiny", ["run.batch=256", "run.accumulate=4"]),
    ("byte-language", "paper", ["run.batch=8"]),
    ("byte-language", "paper", ["run.batch=8", "run.precision=bf16"]),
    ("byte-language", "paper", ["run.batch=16", "run.checkpoint_segments=4"]),
    ("bert", "tiny", ["run.batch=64"]),
    ("transformer", "base", ["run.batch=16", "run.precision=bf16"]),
    ("vit", "small", ["run.batch=64", "task.kind=images"]),
    (
        "transformer-xl",
        "tiny",
        ["model.width=256", "model.heads=4", "model.layers=6", "run.batch=16", "task.context=128"],
    ),
    (
        "adaptive-span",
        "tiny",
        ["model.width=256", "model.heads=4", "model.layers=4", "model.span=256", "run.batch=8"],
    ),
    (
        "reformer",
        "tiny",
        ["model.width=256", "model.layers=6", "task.context=512", "model.axial_columns=16", "run.batch=8"],
    ),
    ("universal-transformer", "tiny", ["model.width=256", "run.batch=32"]),
    ("lstm", "byte", ["run.batch=16"]),
]
CUDA: list[Row] = [
    ("byte-language", "tiny", ["run.batch=256"]),
    ("gpt2", "tiny", ["run.batch=32"]),
    ("gpt2", "small", ["run.batch=8"]),
    ("gpt2", "small", ["run.batch=8", "run.precision=bf16"]),
    ("gpt2", "small", ["run.batch=8", "run.precision=bf16", "model.dropout=0"]),
    ("gpt2", "small", ["run.batch=32", "run.precision=bf16", "model.dropout=0"]),
    ("gpt2", "small", ["run.batch=32", "run.precision=bf16", "model.dropout=0", "run.checkpoint_segments=12"]),
    ("gpt2", "small", ["run.batch=32", "run.precision=bf16", "model.dropout=0", "run.accumulate=4"]),
    ("gpt2", "small", ["run.batch=8", "run.precision=fp16", "model.dropout=0"]),
    ("gpt2", "medium", ["run.batch=8", "run.precision=bf16", "run.checkpoint_segments=6"]),
    ("gpt2", "small", ["run.batch=8", "run.precision=bf16", "optim.name=muon", "optim.ema=0.99"]),
    ("byte-language", "paper", ["run.batch=32"]),
    ("byte-language", "paper", ["run.batch=32", "run.precision=bf16"]),
    ("byte-language", "paper", ["run.batch=256", "run.precision=bf16", "run.checkpoint_segments=4"]),
    ("vit", "small", ["run.batch=256", "task.kind=images", "run.precision=bf16"]),
    ("bert", "base", ["run.batch=32", "run.precision=bf16"]),
    ("transformer", "base", ["run.batch=64", "run.precision=bf16"]),
    ("transformer-xl", "enwik8-12", ["run.batch=8", "run.precision=bf16"]),
    (
        "adaptive-span",
        "tiny",
        ["model.width=256", "model.heads=4", "model.layers=6", "model.span=512", "run.batch=64", "task.context=256"],
    ),
    ("image-transformer", "tiny", ["model.width=256", "model.layers=8", "run.batch=64", "run.precision=bf16"]),
    (
        "sparse-transformer",
        "tiny",
        ["model.width=256", "model.layers=6", "task.context=1024", "run.batch=32", "run.precision=bf16"],
    ),
    (
        "reformer",
        "tiny",
        [
            "model.width=256",
            "model.layers=6",
            "task.context=1024",
            "model.axial_columns=32",
            "run.batch=32",
            "run.precision=bf16",
        ],
    ),
    ("universal-transformer", "tiny", ["model.width=256", "run.batch=128"]),
    ("lstm", "byte", ["run.batch=128", "run.precision=bf16"]),
    ("ablated-lstm", "byte", ["run.batch=128", "run.precision=bf16"]),
    ("act-rnn", "wikipedia", []),
    ("gtrxl", "paper", ["run.batch=4"]),
]
GPT2_VOCABULARY = 50257  # the embedded text is read as bytes, but the model keeps its published size


def recipe_of(member: str, size: str, settings: list[str], steps: int, device: str) -> Any:
    from everyformer.task.table import task_for
    from everyformer.train.recipe import Recipe, Run, override

    full = [f"model.vocabulary={GPT2_VOCABULARY}"] if member == "gpt2" and size != "tiny" else []
    run = Run(device=device, steps=steps, evaluate=0, save=0)
    return override(Recipe(member=member, size=size, task=task_for(member, size), run=run), full + settings)


def planned(*row: Any) -> dict[str, Any]:
    from everyformer.study.plan import plan

    start = time.perf_counter()
    result = plan(recipe_of(*row))
    return {
        "parameters": result.parameters,
        "flops": result.flops,
        "planned": result.tensors if result.device == "cpu" else result.memory,
        "process": result.process,
        "changes": result.changes,
        "planning_seconds": time.perf_counter() - start,
    }


def measured(*row: Any) -> dict[str, Any]:
    """Bytes at the peak of some real steps, and the median seconds of those after the first."""
    import torch

    from everyformer.train.distributed import World, find_device
    from everyformer.train.loop import Loop
    from everyformer.train.memory import peak_memory
    from everyformer.train.record import Records

    recipe, seconds = recipe_of(*row), list[float]()
    device = find_device(recipe.run.device)
    data = recipe.task.open(recipe.data)

    def steps() -> None:
        loop = Loop(recipe, data, data.adapt(recipe.value(data.member_settings())), None, World(device=device), ())
        for step in range(recipe.run.steps):
            start = time.perf_counter()
            loop._step(step, Records(None))  # reads the loss at its end, so the device has finished
            seconds.append(time.perf_counter() - start)

    if device.type == "cuda":
        steps()
        tensors = torch.cuda.max_memory_allocated(device)
    else:
        tensors = allocated_peak(steps)
    return {"measured": tensors, "resident": peak_memory(device), "seconds": statistics.median(seconds[1:])}


def allocated_peak(run: Callable[[], None]) -> int:
    """Bytes at the peak of what torch's CPU allocator hands out during a call, as torch.profiler records it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        run()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def in_new_process(function: Callable[..., dict[str, Any]], row: tuple[Any, ...]) -> dict[str, Any]:
    """Call a function in a new process: peaks of a process only grow."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, row)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="members, separated by commas")
    parser.add_argument("--steps", type=int, default=3, help="real steps, 2 or more")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    import torch

    from everyformer.train.provenance import start_log

    start_log(seed=0)
    on_cuda = torch.cuda.is_available() and options.device != "cpu"
    if not options.json:
        print(
            "| model | settings | parameters | planned MiB | measured MiB | ratio | process adds MiB | resident MiB |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for member, size, settings in CUDA if on_cuda else CPU:
        if options.only and member not in options.only.split(","):
            continue
        row = (member, size, settings, options.steps, options.device)
        result = {"member": member, "size": size, "settings": settings} | in_new_process(planned, row)
        if result["changes"] == ():
            result |= in_new_process(measured, row)
        print(json.dumps(result) if options.json else line(result), flush=True)


def line(result: dict[str, Any]) -> str:
    start = f"| {result['member']} {result['size']} | {' '.join(result['settings'])} | {result['parameters']:,} "
    start += f"| {result['planned'] / 2**20:,.0f} "
    if "measured" not in result:
        return f"{start}| does not fit: {result['changes']} | | | |"
    mib = {name: f"{result[name] / 2**20:,.0f}" for name in ("measured", "process", "resident")}
    ratio = result["planned"] / result["measured"]
    return f"{start}| {mib['measured']} | {ratio:.3f} | {mib['process']} | {mib['resident']} |"


if __name__ == "__main__":
    main()
