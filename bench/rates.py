"""Trains a member at several peak learning rates and prints what each reaches on held-out data.

    python -m bench.rates gpt2 --size tiny --data FILE --rates 1e-3,3e-3,1e-2 run.steps=1000
    python -m bench.rates byte-classifier --size tiny --task classify --data FOLDER --split test run.steps=800

The default learning rates and warm-ups of `everyformer train` rest on these numbers. Without --rates the default is trained. Prints the
head of a log, then one JSON line for each rate and seed; a run that diverges has the reason in it.
"""

from __future__ import annotations

import argparse
import json
import time

from everyformer.train.gradient_watch import Unstable
from everyformer.train.loop import train
from everyformer.train.provenance import start_log
from everyformer.train.recipe import Recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("member")
    parser.add_argument("--size")
    parser.add_argument("--task")
    parser.add_argument("--data")
    parser.add_argument("--split", default="valid")
    parser.add_argument(
        "--rates", help="numbers with commas between them; default: the rate that a recipe has by default"
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("settings", nargs="*", help="settings of every run, for example run.steps=500")
    options = parser.parse_intermixed_args()
    start_log(seed=range(options.seeds))
    for rate in options.rates.split(",") if options.rates else [None]:
        for seed in range(options.seeds):
            settings = [*options.settings, "run.evaluate=0", f"run.seed={seed}"]
            settings += [] if rate is None else [f"optim.lr={rate}"]
            start = time.perf_counter()
            recipe = Recipe.of(options.member, *settings, size=options.size, task=options.task, data=options.data)
            line = {
                "member": options.member,
                "settings": " ".join(options.settings),
                "lr": recipe.optim.lr,
                "seed": seed,
            }
            try:
                run = train(recipe)
            except Unstable as error:
                print(json.dumps(line | {"diverged": str(error)}), flush=True)
                continue
            seconds, metric = time.perf_counter() - start, run.task.objective.metric
            metrics = run.metrics if options.split == "valid" else run.evaluate(options.split)
            line |= {
                "size": options.size,
                "task": type(run.recipe.task).__name__.lower(),
                "split": options.split,
                metric: round(metrics[metric], 4),
                "skipped_steps": run.skipped_steps,
                "seconds": round(seconds, 1),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
