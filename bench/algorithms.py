"""Compares the Universal Transformer with the Transformer on copy, reverse and addition, at lengths beyond training.

    python -m bench.algorithms --data copy --steps 6000 --jobs 12 --out runs/copy
    python -m bench.algorithms --data copy --steps 2 --width 16 --depth 2 --batch 4 --seeds 1 --limit 2 --out runs/try

As in Dehghani et al. 2019, models are trained on up to 40 characters and tested on 40 to 400. Each model is trained by `everyformer
train` in a folder under --out (an existing run is resumed), `--jobs` at a time, then evaluated with `--split test`:
    fixed    universal-transformer with `--depth` steps            act      the same, and each position halts by itself
    equal    transformer of one layer: equal parameters            deep     transformer of `--depth` layers: equal steps
Prints one JSON line per run, then one per model: mean, minimum and maximum over the seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from everyformer.train.provenance import start_log

UNIVERSAL = ["universal-transformer", "--size", "tiny-pair"]
PLAIN = ["transformer", "--size", "tiny"]


def models(depth: int) -> dict[str, list[str]]:
    return {
        "fixed": [*UNIVERSAL, f"model.steps={depth}", "model.halting=none"],
        "act": [*UNIVERSAL, f"model.steps={depth}", "model.halting=freeze", "model.bias=-2", "model.cost=0.001"],
        "equal": [*PLAIN, "model.layers=1"],
        "deep": [*PLAIN, f"model.layers={depth}"],
    }


def everyformer(*words: str) -> str:
    """Returns the output of a command. Raises RuntimeError with the end of its error output if it fails."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "everyformer", *words], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"everyformer {' '.join(words)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def run(options: argparse.Namespace, name: str, words: Sequence[str], seed: int) -> dict[str, Any]:
    folder = options.out / f"{name}-{seed}"
    if folder.exists():
        everyformer("resume", str(folder))
    else:
        settings = [
            f"model.width={options.width}",
            f"model.heads={options.heads}",
            "model.dropout=0.0",
            f"task.shift={options.shift}",
            f"run.steps={options.steps}",
            f"run.batch={options.batch}",
            f"run.seed={seed}",
            f"run.evaluate={max(1, options.steps // 4)}",
            f"run.save={max(1, options.steps // 4)}",
            f"run.device={options.device}",
            f"optim.lr={options.lr}",
        ]
        everyformer("train", *words, *settings, "--data", options.data, "--out", str(folder))
    limit = ["--limit", str(options.limit)] if options.limit else []
    metrics = json.loads(
        everyformer("evaluate", str(folder), "--split", "test", "--json", "--device", options.device, *limit)
    )
    result = {key: round(value, 4) for key, value in metrics.items() if "accuracy" in key or "steps" in key}
    print(json.dumps({"data": options.data, "model": name, "seed": seed} | result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="copy", choices=("copy", "reverse", "addition"))
    parser.add_argument("--models", default="fixed,act,equal,deep")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--shift", type=int, default=360)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    start_log(seed=range(options.seeds))
    chosen = {name: words for name, words in models(options.depth).items() if name in options.models.split(",")}
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {
            (name, seed): pool.submit(run, options, name, words, seed)
            for seed in range(options.seeds)
            for name, words in chosen.items()
        }
    results = {key: future.result() for key, future in futures.items()}
    for name in chosen:
        rows = [results[name, seed] for seed in range(options.seeds)]
        spread = {key: [round(sum(row[key] for row in rows) / len(rows), 4), min(row[key] for row in rows),
                        max(row[key] for row in rows)] for key in rows[0]}  # fmt: skip
        print(json.dumps({"data": options.data, "model": name, "seeds": options.seeds} | spread), flush=True)


if __name__ == "__main__":
    main()
