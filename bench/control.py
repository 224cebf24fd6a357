"""Trains and tests agents with different memories on tasks that need one, several at a time.

    python -m bench.control --jobs 16 --steps 500                      # 4 agents x 3 tasks x 3 seeds
    python -m bench.control --tasks popgym:RepeatPreviousEasy --agents gtrxl,lstm --seeds 1 --steps 100
    python -m bench.control --jobs 16 --steps 2000 --tasks minigrid:MemoryS7     # it needs a million steps
    python -m bench.control --only-table                               # of the results in --out

A run is one process on one core. Started again, the command resumes unfinished runs. Agents on the same task differ only in the
member: `gtrxl`, `transformer-xl` (no gates), `lstm` (both widened to the same number of parameters) and `feed-forward`, which is
gtrxl without memory. OUT/results.jsonl has one JSON line per run: the mean return over the test episodes with its interval, and
the validation returns. The table has the mean over seeds with a 95 % interval by Student's t, and the number of runs that
diverged: stopped by the gradient watch, or with an upper end of the final interval less than half of the way from the first
return to the best.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

from everyformer.train.provenance import start_log
from everyformer.train.record import read

AGENTS = {
    "gtrxl": ("gtrxl",),
    "transformer-xl": ("transformer-xl", "model.width=88", "model.heads=4"),
    "lstm": ("lstm", "model.width=112"),
    "feed-forward": ("gtrxl", "task.use_memory=false"),
}
TASKS = ("popgym:RepeatPreviousEasy", "popgym:RepeatPreviousMedium", "popgym:RepeatFirstEasy")
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}  # 95 %, by the number of seeds


def everyformer(*words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "everyformer", *words], env=environment, capture_output=True, text=True
    )


def records(folder: Path) -> list[dict[str, Any]]:
    return list(read(folder / "records.jsonl")) if (folder / "records.jsonl").is_file() else []


def one(agent: str, task: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    folder = options.out / f"{agent}-{task.replace(':', '-')}-{seed}"
    member, *settings = AGENTS[agent]
    start, words = time.time(), ["resume", str(folder)]
    if not (folder / "recipe.json").is_file():
        words = [
            "train", member, "--size", "tiny", "--task", task, "--out", str(folder), *settings, f"run.steps={options.steps}",
            f"run.seed={seed}", f"run.evaluate={max(1, options.steps // 10)}", "run.examples=100", "run.save=50", "run.device=cpu",
            *options.settings,
        ]  # fmt: skip
    if not any(line["kind"] == "end" and "stopped" not in line for line in records(folder)):
        trained = everyformer(*words)
        if trained.returncode != 0 and "bad steps in a row" not in trained.stderr:
            raise SystemExit(f"{folder}: {trained.stderr}")
    lines = records(folder)
    curve = [line["return"] for line in lines if line["kind"] == "evaluate"]
    stopped = any("error" in line for line in lines)
    result: dict[str, Any] = {"agent": agent, "task": task, "seed": seed, "curve": curve, "stopped": stopped}
    if not stopped:
        tested = everyformer("evaluate", str(folder), "--split", "test", "--limit", str(options.episodes), "--json")
        result |= json.loads(tested.stdout)
    result["skipped"] = sum(line["kind"] == "skip" for line in lines)
    result["parameters"] = lines[0]["parameters"]
    result["acted"] = max((line.get("environment_steps", 0) for line in lines), default=0)
    result["seconds"] = round(time.time() - start)
    print(json.dumps(result), flush=True)
    return result


def diverged(run: dict[str, Any]) -> bool:
    first, best = run["curve"][0] if run["curve"] else 0.0, max(run["curve"], default=0.0)
    return bool(run["stopped"]) or run["high"] < first + (best - first) / 2


def table(results: list[dict[str, Any]]) -> str:
    rows = [
        "| task | agent | parameters | steps | return | interval | seeds | diverged |",
        "| --- " * 8 + "|",
    ]
    for task, agent in dict.fromkeys((one["task"], one["agent"]) for one in results):
        runs = [one for one in results if (one["task"], one["agent"]) == (task, agent)]
        returns = [one["return"] for one in runs if "return" in one]
        mean = statistics.mean(returns) if returns else math.nan
        half = (
            STUDENT[len(returns)] * statistics.stdev(returns) / math.sqrt(len(returns))
            if len(returns) in STUDENT
            else math.nan
        )
        cells = (
            task,
            agent,
            f"{runs[0]['parameters']:,}",
            f"{runs[0]['acted']:,}",
            f"{mean:.3f}",
            f"{mean - half:.3f} to {mean + half:.3f}",
            ", ".join(f"{one:.3f}" for one in returns),
            f"{sum(map(diverged, runs))} of {len(runs)}",
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", default=",".join(AGENTS))
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=500, help="updates; 8 for every 4,096 environment steps")
    parser.add_argument("--episodes", type=int, default=200, help="test episodes")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/control"))
    parser.add_argument("--only-table", action="store_true")
    parser.add_argument("settings", nargs="*", help="settings of every run, for example optim.lr=3e-4")
    options = parser.parse_args()
    start_log(seed=range(options.seeds), packages=("popgym", "gymnasium"))
    options.out.mkdir(parents=True, exist_ok=True)
    file_path = options.out / "results.jsonl"
    if not options.only_table:
        # Slow runs first, so that none runs alone at the end.
        order = sorted(
            product(options.agents.split(","), options.tasks.split(","), range(options.seeds)),
            key=lambda run: ("minigrid" not in run[1], run[0] == "lstm"),
        )
        with ThreadPoolExecutor(options.jobs) as pool, file_path.open("a") as file:
            for result in pool.map(lambda run: one(run[0], run[1], run[2], options), order):
                file.write(json.dumps(result) + "\n")
                file.flush()
    last = {
        (one["task"], one["agent"], one["seed"]): one for one in map(json.loads, file_path.read_text().splitlines())
    }
    print(table(sorted(last.values(), key=lambda one: (one["task"], list(AGENTS).index(one["agent"]), one["seed"]))))


if __name__ == "__main__":
    main()
