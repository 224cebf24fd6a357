"""Copy, reverse and addition: the Universal Transformer against the Transformer on sequences longer than those trained on.

    python -m bench.algorithms --data copy --steps 6000 --jobs 12 --out runs/copy
    python -m bench.algorithms --data copy --steps 2 --width 16 --depth 2 --batch 4 --seeds 1 --limit 2 --out runs/try

Dehghani et al. 2019: trained on up to 40 characters, tested at 40 to 400. Each is a run of `everyformer train` in a folder of
its own under --out (one that is there is gone on with), `--jobs` at a time, then `everyformer evaluate --split test`:
    fixed    universal-transformer, `--depth` steps                          act      the same, each position halts by itself
    equal    transformer of one layer: as many parameters                    deep     transformer of `--depth` layers: as many steps
One JSON line for each run, then one for each model: the means over the seeds with the smallest and the largest.
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
    """What a command prints; its last words are the error where it fails."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    done = subprocess.run(
        [sys.executable, "-m", "everyformer", *words], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"everyformer {' '.join(words)}: {done.stderr.strip()[-500:]}")
    return done.stdout


def run(given: argparse.Namespace, name: str, words: Sequence[str], seed: int) -> dict[str, Any]:
    folder = given.out / f"{name}-{seed}"
    if folder.exists():
        everyformer("resume", str(folder))
    else:
        settings = [
            f"model.width={given.width}",
            f"model.heads={given.heads}",
            "model.dropout=0.0",
            "task.smoothing=0.0",
            f"task.shift={given.shift}",
            f"run.steps={given.steps}",
            f"run.batch={given.batch}",
            f"run.seed={seed}",
            f"run.evaluate={max(1, given.steps // 4)}",
            f"run.save={max(1, given.steps // 4)}",
            f"run.device={given.device}",
            f"optim.lr={given.lr}",
        ]
        everyformer("train", *words, *settings, "--data", given.data, "--out", str(folder))
    limit = ["--limit", str(given.limit)] if given.limit else []
    told = json.loads(
        everyformer("evaluate", str(folder), "--split", "test", "--json", "--device", given.device, *limit)
    )
    found = {key: round(value, 4) for key, value in told.items() if "accuracy" in key or "steps" in key}
    print(json.dumps({"data": given.data, "model": name, "seed": seed} | found), flush=True)
    return found


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
    given = parser.parse_args()
    chosen = {name: words for name, words in models(given.depth).items() if name in given.models.split(",")}
    with ThreadPoolExecutor(given.jobs) as pool:
        waiting = {
            (name, seed): pool.submit(run, given, name, words, seed)
            for seed in range(given.seeds)
            for name, words in chosen.items()
        }
    found = {key: one.result() for key, one in waiting.items()}
    for name in chosen:
        rows = [found[name, seed] for seed in range(given.seeds)]
        spread = {key: [round(sum(row[key] for row in rows) / len(rows), 4), min(row[key] for row in rows),
                        max(row[key] for row in rows)] for key in rows[0]}  # fmt: skip
        print(json.dumps({"data": given.data, "model": name, "seeds": given.seeds} | spread), flush=True)


if __name__ == "__main__":
    main()
