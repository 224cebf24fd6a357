"""Compares the default recipe of members with random ones, on pieces of three texts.

    python -m bench.defaults gpt2 lstm --data shakespeare,enwik8,multi30k --steps 200 --seed 1 > docs/results/logs/defaults.txt

Each member is trained with its default recipe and with `--trials` random ones: the learning rate from a tenth to ten times the default,
and warm-up, weight decay, dropout, beta2 and the end of the schedule. All runs of a member on a text have the same weights at the
start, batches, steps and evaluation. Prints the head of a log, then one JSON line for each run; trial 0 is the default.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from bench.results import Rows, json_lines, table
from everyformer.data.datasets import dataset_files
from everyformer.data.synthetic import shakespeare
from everyformer.family.table import find
from everyformer.train.gradient_watch import Unstable
from everyformer.train.loop import train
from everyformer.train.provenance import start_log
from everyformer.train.recipe import Recipe

PIECE = 1_000_000  # bytes of a text
MIDDLE = 50_000_000  # of enwik8
DECADES = 1.0  # of the learning rate, to each side of the default
WARMUPS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.3)  # shares of the steps
WEIGHT_DECAYS = (0.0, 0.001, 0.01, 0.1, 0.3)
DROPOUTS = (0.0, 0.05, 0.1, 0.2)
BETAS2 = (0.9, 0.95, 0.98, 0.99, 0.999)
MIN_LRS = (0.0, 0.1, 0.3, 1.0)
CLOSE = 1.03  # of the best: what a default may need


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", nargs="+")
    parser.add_argument("--data", default="shakespeare,enwik8,multi30k")
    parser.add_argument("--size", default="tiny")
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_log(seed=options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.data.split(","):
            path = Path(folder) / f"{name}.txt"
            path.write_bytes(text_of(name))
            for member in options.members:
                for line in runs(member, path, options):
                    print(json.dumps(line), flush=True)


def text_of(name: str) -> bytes:
    """A piece of a text: the embedded Shakespeare, the middle of enwik8, the German captions of Multi30k."""
    if name == "shakespeare":
        return shakespeare().encode()[:PIECE]
    start, file = {"enwik8": (MIDDLE, "enwik8"), "multi30k": (0, "train.de")}[name]
    with dataset_files(name)[file].open("rb") as opened:
        opened.seek(start)
        return opened.read(PIECE)


def runs(member: str, data: Path, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each recipe of a member, the default first."""
    common = (
        f"run.steps={options.steps}", f"run.batch={options.batch}", f"task.context={options.context}", f"run.seed={options.seed}",
        "run.device=cpu", "run.evaluate=0", "run.save=0", "run.sample=false", "run.final_examples=200",
    )  # fmt: skip
    default = Recipe.of(member, *common, size=options.size, data=data)
    random = Random(f"{member} {data.stem} {options.seed}")
    for trial in range(options.trials + 1):
        settings = drawn(random, default) if trial else ()
        start = time.process_time()
        found: dict[str, Any] = {"bits_per_byte": None}
        try:
            run = train(Recipe.of(member, *common, *settings, size=options.size, data=data))
            found = {"bits_per_byte": round(run.metrics["bits_per_byte"], 4), "skipped_steps": run.skipped_steps}
        except Unstable as error:
            found["diverged"] = str(error)
        yield {
            "member": member, "data": data.stem, "trial": trial, "lr": default.optim.lr, "settings": settings, **found,
            "processor_seconds": round(time.process_time() - start, 2),
        }  # fmt: skip


def drawn(random: Random, default: Recipe) -> tuple[str, ...]:
    """Random settings of a recipe."""
    rate = default.optim.lr * 10 ** random.uniform(-DECADES, DECADES)
    settings = [
        f"optim.lr={rate:.4g}",
        f"optim.warmup={round(random.choice(WARMUPS) * default.run.steps)}",
        f"optim.weight_decay={random.choice(WEIGHT_DECAYS)}",
        f"optim.beta2={random.choice(BETAS2)}",
        f"optim.min_lr={random.choice(MIN_LRS)}",
    ]
    dropout = random.choice(DROPOUTS)  # drawn for every member, so that the other numbers do not depend on it
    return (*settings, f"model.dropout={dropout}") if "dropout" in find(default.member).settings() else (*settings,)


@table("defaults")
def defaults(log: str) -> Rows:
    rows = [["member", "text", "default rate", "default", "best of the trials", "ratio", "within 3 %", "diverged"]]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in json_lines(log):
        found.setdefault((line["member"], line["data"]), []).append(line)
    for (member, data), (default, *trials) in found.items():
        best = min(trials, key=_bits)
        ratio = _bits(default) / _bits(best)
        diverged = sum(one["bits_per_byte"] is None for one in trials)
        rows.append([
            f"`{member}`", data, f"{default['lr']:.2g}", f"{_bits(default):.3f}", f"{_bits(best):.3f} of {len(trials)}", f"{ratio:.3f}",
            "yes" if ratio <= CLOSE else "no", str(diverged),
        ])  # fmt: skip
    return rows


def _bits(line: dict[str, Any]) -> float:
    return math.inf if line["bits_per_byte"] is None else float(line["bits_per_byte"])


if __name__ == "__main__":
    main()
