"""Compares the default recipe of members with random ones: of language models on pieces of three texts, of others on whole data sets.

    python -m bench.defaults gpt2 lstm --data shakespeare,enwik8,multi30k --steps 200 --seed 1 > docs/results/logs/defaults.txt
    python -m bench.defaults vit --data mnist --steps 200 --batch 32 --examples 2000 > docs/results/logs/defaults_vit.txt

Each member is trained with its default recipe and with `--trials` random ones: the learning rate from a tenth to ten times the default,
and warm-up, weight decay, dropout, beta2 and the end of the schedule. All runs of a member on a text have the same weights at the
start, batches, steps and evaluation. Prints the head of a log, then one JSON line for each run; trial 0 is the default.
"""

from __future__ import annotations

import argparse
import json
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
from everyformer.task.language import Language
from everyformer.task.table import task_for
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
    parser.add_argument("--examples", type=int, default=200, help="of the evaluation")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start_log(seed=options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.data.split(","):
            for member in options.members:
                data = piece(name, Path(folder)) if isinstance(task_for(member, options.size), Language) else name
                for line in runs(member, data, options):
                    print(json.dumps({"member": member, "data": name} | line), flush=True)


def piece(name: str, folder: Path) -> Path:
    """A piece of a text: the embedded Shakespeare, the middle of enwik8, the German captions of Multi30k."""
    path = folder / f"{name}.txt"
    if name == "shakespeare":
        path.write_bytes(shakespeare().encode()[:PIECE])
        return path
    start, file = {"enwik8": (MIDDLE, "enwik8"), "multi30k": (0, "train.de")}[name]
    with dataset_files(name)[file].open("rb") as opened:
        opened.seek(start)
        path.write_bytes(opened.read(PIECE))
    return path


def runs(member: str, data: Path | str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each recipe of a member, the default first."""
    common = [
        f"run.steps={options.steps}", f"run.batch={options.batch}", f"run.seed={options.seed}", "run.device=cpu", "run.evaluate=0",
        "run.save=0", "run.sample=false", f"run.final_examples={options.examples}",
    ]  # fmt: skip
    if "context" in task_for(member, options.size).__struct_fields__:  # type: ignore[attr-defined]
        common.append(f"task.context={options.context}")
    default = Recipe.of(member, *common, size=options.size, data=data)
    random = Random(f"{member} {Path(data).stem} {options.seed}")
    for trial in range(options.trials + 1):
        settings = drawn(random, default) if trial else ()
        start = time.process_time()
        found: dict[str, Any] = {}
        try:
            run = train(Recipe.of(member, *common, *settings, size=options.size, data=data))
            objective = run.task.objective
            found = {"metric": objective.metric, "value": round(run.metrics[objective.metric], 4)}
            found |= {"higher_is_better": objective.higher_is_better, "skipped_steps": run.skipped_steps}
        except Unstable as error:
            found["diverged"] = str(error)
        seconds = round(time.process_time() - start, 2)
        yield {"trial": trial, "lr": default.optim.lr, "settings": settings, **found, "processor_seconds": seconds}


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
    head = ["member", "data", "default rate", "default", "best of the trials", "ratio", "within 3 %", "diverged"]
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in json_lines(log):
        found.setdefault((line["member"], line["data"]), []).append(line)
    rows = [head]
    for (member, data), (default, *trials) in found.items():
        best = (max if default.get("higher_is_better") else min)(_values(trials))
        (own,) = _values([default])
        ratio = best / own if default.get("higher_is_better") else own / best
        diverged = len(trials) - len(_values(trials))
        rows.append([
            f"`{member}`", data, f"{default['lr']:.2g}", f"{own:.3f}", f"{best:.3f} of {len(trials)}", f"{ratio:.3f}",
            "yes" if ratio <= CLOSE else "no", str(diverged),
        ])  # fmt: skip
    return rows


def _values(lines: list[dict[str, Any]]) -> list[float]:
    """The metrics of the runs that did not diverge. That of the first logs is bits_per_byte."""
    found = (one.get("value", one.get("bits_per_byte")) for one in lines)
    return [float(value) for value in found if value is not None]


if __name__ == "__main__":
    main()
