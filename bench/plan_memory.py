"""The memory that `plan` tells against the memory that training then takes, and the time and operations of a step.

    python -m bench.plan_memory                      # the table below, on the device that is there
    python -m bench.plan_memory --only gpt2 --steps 5

For each row the plan is made in one process, and in others real steps of the loop are run and looked at with
torch.cuda.max_memory_allocated (on a CPU: the resident memory at its peak, which is another each time: the median counts). A
ratio of 1 is a perfect plan.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from typing import Any

# member, size, settings
Row = tuple[str, str, list[str]]
CPU: list[Row] = [
    ("gpt2", "tiny", ["run.batch=32"]),
    ("byte-language", "tiny", ["run.batch=256"]),
    ("byte-language", "tiny", ["run.batch=256", "run.accumulate=4"]),
    ("bert", "tiny", ["run.batch=64"]),
    ("byte-classifier", "tiny", ["run.batch=64"]),
    ("byte-language", "paper", ["run.batch=8"]),
    ("byte-language", "paper", ["run.batch=16", "run.checkpoint_segments=4"]),
    ("byte-language", "paper", ["run.batch=32"]),
    ("byte-language", "paper", ["run.batch=32", "run.precision=bf16"]),
    ("gpt2", "small", ["run.batch=2", "model.context=256"]),
    ("gpt2", "small", ["run.batch=4", "model.context=256", "run.checkpoint_segments=6"]),
    ("gpt2", "small", ["run.batch=4", "model.context=256", "run.accumulate=2"]),
    ("gpt2", "small", ["run.batch=2", "model.context=256", "optim.name=muon", "optim.ema=0.99"]),
    ("vit", "small", ["run.batch=256", "task.kind=images", "run.precision=bf16"]),
    ("transformer", "base", ["run.batch=64", "run.precision=bf16"]),
    (
        "transformer-xl",
        "tiny",
        ["model.width=256", "model.heads=4", "model.layers=6", "run.batch=16", "task.segment=128"],
    ),
    (
        "adaptive-span",
        "tiny",
        ["model.width=256", "model.heads=4", "model.layers=4", "model.span=256", "run.batch=8"],
    ),
    ("reformer", "tiny", ["model.width=256", "model.layers=6", "model.context=512", "model.row=16", "run.batch=8"]),
    ("universal-transformer", "tiny", ["model.width=256", "run.batch=32"]),
    ("lstm", "byte", ["run.batch=16"]),
    ("act-rnn", "wikipedia", []),
    ("gtrxl", "paper", ["run.batch=4"]),
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
        ["model.width=256", "model.heads=4", "model.layers=6", "model.span=512", "run.batch=64", "task.segment=256"],
    ),
    ("image-transformer", "tiny", ["model.width=256", "model.layers=8", "run.batch=64", "run.precision=bf16"]),
    (
        "sparse-transformer",
        "tiny",
        ["model.width=256", "model.layers=6", "model.context=1024", "run.batch=32", "run.precision=bf16"],
    ),
    (
        "reformer",
        "tiny",
        [
            "model.width=256",
            "model.layers=6",
            "model.context=1024",
            "model.row=32",
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
GPT2_VOCABULARY = 50257  # the embedded text is read as bytes, but the model keeps its size


def recipe_of(member: str, size: str, settings: list[str], steps: int, device: str) -> Any:
    from everyformer.task.table import task_for
    from everyformer.train.recipe import Recipe, Run, override

    full = [f"model.vocabulary={GPT2_VOCABULARY}"] if member == "gpt2" and size != "tiny" else []
    run = Run(device=device, steps=steps, evaluate=0, save=0)
    return override(Recipe(member=member, size=size, task=task_for(member, size), run=run), full + settings)


def planned(*row: Any) -> dict[str, Any]:
    from everyformer.study.plan import plan

    began = time.perf_counter()
    found = plan(recipe_of(*row))
    return {
        "parameters": found.parameters,
        "flops": found.flops,
        "planned": found.memory,
        "besides": found.process,
        "changes": found.changes,
        "planning_seconds": time.perf_counter() - began,
    }


def measured(*row: Any) -> dict[str, Any]:
    """Bytes at the peak of some real steps, and the median seconds of those after the first."""
    from everyformer.train.distributed import World, find_device
    from everyformer.train.loop import Loop
    from everyformer.train.memory import peak_memory
    from everyformer.train.record import Records

    recipe, seconds = recipe_of(*row), list[float]()
    device = find_device(recipe.run.device)
    data = recipe.task.open(recipe.data, recipe.model.get("context"), None)
    loop = Loop(recipe, data, data.adapt(recipe.value(data.member_settings())), None, World(device=device), ())
    for step in range(recipe.run.steps):
        began = time.perf_counter()
        loop._step(step, Records(None))  # ends with a look at the loss, so the device has done it
        seconds.append(time.perf_counter() - began)
    return {"measured": peak_memory(device), "seconds": statistics.median(seconds[1:])}


def alone(function: Callable[..., dict[str, Any]], row: tuple[Any, ...]) -> dict[str, Any]:
    """What a function answers in a new process: peaks only grow."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, row)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.plan_memory", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", help="members, with commas between them")
    parser.add_argument("--steps", type=int, default=4, help="real steps, 2 or more")
    parser.add_argument("--runs", type=int, default=3, help="processes with real steps, on a CPU")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of a table")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    import torch

    on_cuda = torch.cuda.is_available() and options.device != "cpu"
    if not options.json:
        name = torch.cuda.get_device_name() if on_cuda else f"CPU, {torch.get_num_threads()} threads"
        print(f"{name}, torch {torch.__version__}, {options.steps} steps\n")
        print(
            "| model | settings | parameters | planned MiB | measured MiB (from - to) | ratio | GFLOP a step | ms | TFLOP/s |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for member, size, settings in CUDA if on_cuda else CPU:
        if options.only and member not in options.only.split(","):
            continue
        row = (member, size, settings, options.steps, options.device)
        found = {"member": member, "size": size, "settings": settings} | alone(planned, row)
        if not found["changes"] and found["changes"] is not None:
            runs = sorted(
                (alone(measured, row) for _ in range(1 if on_cuda else max(1, options.runs))),
                key=lambda one: one["measured"],
            )
            found |= runs[len(runs) // 2] | {"from": runs[0]["measured"], "to": runs[-1]["measured"]}
        print(json.dumps(found) if options.json else line(found), flush=True)


def line(found: dict[str, Any]) -> str:
    start = f"| {found['member']} {found['size']} | {' '.join(found['settings'])} | {found['parameters']:,} "
    start += f"| {found['planned'] / 2**20:,.0f} "
    if "measured" not in found:
        return f"{start}| does not fit: {found['changes']} | | | | |"
    speed = found["flops"] / found["seconds"] / 1e12
    return (
        f"{start}| {found['measured'] / 2**20:,.0f} ({found['from'] / 2**20:,.0f} - {found['to'] / 2**20:,.0f}) "
        f"| {found['planned'] / found['measured']:.3f} "
        f"| {found['flops'] / 1e9:,.1f} | {1e3 * found['seconds']:.1f} | {speed:.2f} |"
    )


if __name__ == "__main__":
    main()
