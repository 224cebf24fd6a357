"""Measures what `run.compile=yes` costs and gains: processor seconds of the first step, and of a step after it.

    python -m bench.compile

For each row three new processes take the same steps: without compilation; compiled with an empty cache on disk; and compiled again
with the cache that the second one left. Seconds are processor time over all threads and the compiler's processes, which varies
less than the clock on a shared machine. `earned back` is the number of steps after which the compiled run is ahead, with an empty cache.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
from typing import Any

Row = tuple[str, str, list[str]]
ROWS: list[Row] = [
    ("gpt2", "tiny", []),
    ("byte-language", "paper", ["run.batch=2"]),
]


def busy() -> float:
    """The processor seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def steps(row: Row, compile_mode: str, cache: str, count: int) -> dict[str, float]:
    """Processor seconds of the first step, and the median of those after the second."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in this process, whose time is counted
    from everyformer.train.distributed import World
    from everyformer.train.learner import Learner
    from everyformer.train.recipe import Recipe

    member, size, settings = row
    fixed = ("run.device=cpu", "run.evaluate=0", f"run.compile={compile_mode}")
    recipe = Recipe.of(member, *fixed, *settings, size=size)
    data = recipe.task.open(recipe.data)
    learner = Learner(recipe, data, data.adapt(recipe.value(data.member_settings())), World())
    seconds = []
    for step in range(count):
        batch = data.batch(step, recipe.run.batch, recipe.run.seed)
        start = busy()
        learner.step(batch, data.count(batch), 0.0)
        seconds.append(busy() - start)
    return {"first": seconds[0], "step": statistics.median(seconds[2:])}


def in_new_process(*arguments: Any) -> dict[str, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(steps, arguments)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compile", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="steps of each process, 4 or more")
    parser.add_argument("--only", help="members, separated by commas")
    options = parser.parse_args()
    from everyformer.train.provenance import start_log

    start_log(seed=0)
    print(
        "| model | settings | first step: not compiled, s | compiled, empty cache, s | compiled, full cache, s | "
        "step: not compiled, ms | compiled, ms | earned back after steps |"
    )
    print("| --- " * 8 + "|")
    for row in ROWS:
        if options.only and row[0] not in options.only.split(","):
            continue
        with tempfile.TemporaryDirectory() as cache:
            plain = in_new_process(row, "no", cache, options.steps)
            cold, warm = (in_new_process(row, "yes", cache, options.steps) for _ in range(2))
        gain = plain["step"] - statistics.mean((cold["step"], warm["step"]))
        earned = f"{(cold['first'] - plain['first']) / gain:,.0f}" if gain > 0 else "never"
        firsts = " | ".join(f"{one['first']:.1f}" for one in (plain, cold, warm))
        each = f"{1e3 * plain['step']:.1f} | {1e3 * (plain['step'] - gain):.1f}"
        print(f"| {row[0]} {row[1]} | {' '.join(row[2])} | {firsts} | {each} | {earned} |", flush=True)


if __name__ == "__main__":
    main()
