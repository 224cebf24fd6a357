"""Trains tiny members whose weights are normal with and without the larger std of narrow models (everyformer.network.initial).

    python -m bench.initial gpt2 llama transformer-xl byte-language bert --steps 300 --seeds 2
    python -m bench.initial --table docs/results/logs/initial.txt

Each member trains on the embedded data of its task with its default rate. Prints the head of a log, then a JSON line per run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from msgspec.structs import replace

from bench.results import Rows, json_lines, mean, render
from everyformer.family.table import find
from everyformer.network.initial import Normal
from everyformer.network.model import Model
from everyformer.task.table import task_for
from everyformer.train.loop import train
from everyformer.train.provenance import start_log
from everyformer.train.recipe import Recipe

NAMES = {"std 0.02": None, "std 0.02 sqrt(768 / width)": Normal().reference}


def run(member: str, reference: int | None, steps: int, seed: int) -> dict[str, object]:
    """Trains a member of width 64 and returns its metric."""
    settings = [f"run.steps={steps}", f"run.seed={seed}", "run.evaluate=0", "run.save=0", "run.device=cpu"]
    model = find(member).value("tiny", **task_for(member, "tiny").open(None).member_settings())
    assert isinstance(model, Model) and isinstance(model.initial, Normal)
    recipe = Recipe.of(replace(model, initial=replace(model.initial, reference=reference)), *settings)
    with tempfile.TemporaryDirectory() as folder:
        trained = train(recipe, Path(folder) / "run")
    metric = trained.task.objective.metric
    return {"metric": metric, "value": round(trained.metrics[metric], 4), "lr": recipe.optim.lr}


def rows(log: str) -> Rows:
    found = list(json_lines(log))
    head = ["member", "metric", *NAMES]
    table = [head]
    for member in dict.fromkeys(row["member"] for row in found):
        cells = []
        for name in NAMES:
            values = [row["value"] for row in found if (row["member"], row["initial"]) == (member, name)]
            cells.append(f"{mean(values):.3f} ({', '.join(f'{value:.3f}' for value in values)})")
        metric = next(row["metric"] for row in found if row["member"] == member)
        table.append([f"`{member}`", metric.replace("_", " "), *cells])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", nargs="*")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--table", type=Path)
    options = parser.parse_args()
    if options.table:
        print("\n".join(render(rows(options.table.read_text()))))
        return
    start_log(seed=range(options.seeds))
    for member in options.members:
        for seed in range(options.seeds):
            for name, reference in NAMES.items():
                line = {"member": member, "initial": name, "seed": seed, "steps": options.steps}
                print(json.dumps(line | run(member, reference, options.steps, seed)), flush=True)


if __name__ == "__main__":
    main()
