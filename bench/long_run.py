"""Trains a tiny LSTM for 100,000 steps and records memory, file handles and threads of the process.

    OMP_NUM_THREADS=1 python -m bench.long_run --log docs/results/logs/long_run.txt

A step takes some milliseconds on one core, so this is a day of training in a few minutes: the whole loop runs, with batches, records,
an evaluation and a checkpoint every 1,000 steps, and a recurrent state that is carried from step to step. A line of the log is the
process after so many steps: resident memory in MiB, open file handles, threads, and objects that Python's garbage collector tracks.
The last line compares the first quarter (without the first row) with the last one.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from everyformer.train.loop import train
from everyformer.train.memory import resident_memory
from everyformer.train.provenance import header, provenance
from everyformer.train.recipe import Recipe

SETTINGS = (
    "run.batch=2", "run.device=cpu", "run.examples=2", "model.width=8", "model.layers=1", "task.context=4", "optim.lr=1e-4",
)  # fmt: skip
NAMES = ("memory", "files", "threads", "objects")
GROWTH = 4.0  # MiB of resident memory that may come and go
OBJECTS = 1000  # Python objects that may come and go


def measure(steps: int, every: int, folder: Path) -> list[dict[str, Any]]:
    """Train in a folder. Returns a row for every so many steps."""
    rows: list[dict[str, Any]] = []
    start = time.monotonic()

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] % every == 0:
            gc.collect()
            rows.append(
                {
                    "step": record["step"],
                    "memory": round(resident_memory() / 2**20, 1),
                    "files": len(os.listdir("/proc/self/fd")),
                    "threads": len(os.listdir("/proc/self/task")),
                    "objects": len(gc.get_objects()),
                    "seconds": round(time.monotonic() - start, 1),
                }
            )

    (folder / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs.\n" * 40
    )
    moments = (f"run.steps={steps}", f"run.evaluate={every}", f"run.save={every}")
    recipe = Recipe.of("lstm", *SETTINGS, *moments, size="tiny", data=folder / "text.txt")
    train(recipe, folder / "run", callbacks=(note,))
    return rows


def growth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Returns how much larger the largest value of the last quarter is than that of the first, without its first row."""
    quarter = max(2, len(rows) // 4)
    first, last = rows[1 : quarter + 1], rows[-quarter:]
    return {name: round(max(row[name] for row in last) - max(row[name] for row in first), 1) for name in NAMES}


def is_constant(grown: dict[str, float], threads: int = 0) -> bool:
    """Whether nothing grew by more than what may come and go. `threads` is the size of a pool, which starts threads when it needs them."""
    limits = {"memory": GROWTH, "files": 0, "threads": threads, "objects": OBJECTS}
    return all(grown[name] <= limit for name, limit in limits.items())


def table(rows: list[dict[str, Any]], unit: str = "step") -> list[str]:
    """The table of docs/results/long_run.md: some rows, and the growth."""
    lines = [f"| {unit} | memory (MiB) | file handles | threads | objects |", "| --- | --- | --- | --- | --- |"]
    for row in [rows[0], *(rows[len(rows) * part // 4 - 1] for part in (1, 2, 3, 4))]:
        lines.append(f"| {row['step']:,} | " + " | ".join(f"{row[name]:,}" for name in NAMES) + " |")
    return [*lines, "| growth | " + " | ".join(f"{grown:,}" for grown in growth(rows).values()) + " |"]


def read_log(path: Path) -> list[dict[str, Any]]:
    """Returns the rows of a log."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]
    return [line for line in lines if "step" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--every", type=int, default=1000, help="steps between two rows, evaluations and checkpoints")
    parser.add_argument("--log", type=Path, help="a file for the lines that are printed")
    parser.add_argument(
        "--only-table", type=Path, metavar="LOG", help="print the table of a log, for docs/results/long_run.md"
    )
    options = parser.parse_args()
    if options.only_table:
        print("\n".join(table(read_log(options.only_table))))
        return 0
    torch.set_num_threads(1)
    lines = [header(provenance(0))]
    with tempfile.TemporaryDirectory(prefix="long-run-") as folder:
        rows = measure(options.steps, options.every, Path(folder))
    grown = growth(rows)
    lines += [json.dumps(row) for row in rows]
    lines.append(json.dumps({"growth": grown, "constant": is_constant(grown)}))
    print("\n".join(lines))
    if options.log:
        options.log.write_text("\n".join(lines) + "\n")
    return int(not is_constant(grown))


if __name__ == "__main__":
    sys.exit(main())
