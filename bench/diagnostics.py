"""What members can and cannot do on the generated problems: the profile of `everyformer.study.suite`, a line per test.

python -m bench.diagnostics gpt2 lstm --seeds 1
python -m bench.diagnostics gpt2 lstm --problems parity --steps 20
python -m bench.diagnostics --draw docs/results/logs/diagnostics.txt --out docs/results/diagnostics.png
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from bench.results import Rows, json_lines, mean, render
from everyformer.data.problems import PROBLEMS
from everyformer.study.suite import STEPS, Score, draw, profile
from everyformer.train.provenance import start_log


def read_scores(log: str) -> list[Score]:
    return [(row["member"], row["problem"], row["length"], row["accuracy"]) for row in json_lines(log)]


def rows(scores: list[Score]) -> Rows:
    """A row for each problem: chance, and for each member the accuracies at each length, means over seeds."""
    members, names = (list(dict.fromkeys(score[index] for score in scores)) for index in (0, 1))
    found = [["problem", "lengths", "chance", *members]]
    for name in map(str, names):
        lengths = sorted({length for _, one, length, _ in scores if one == name})
        cells = [
            " / ".join(
                f"{mean([one[3] for one in scores if one[:3] == (member, name, length)]):.2f}" for length in lengths
            )
            for member in members
        ]
        found.append([name, " / ".join(map(str, lengths)), f"{PROBLEMS[name].chance:.2f}", *cells])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("members", nargs="*")
    parser.add_argument("--problems", default="", help="names with commas; default: all of the suite")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--table", type=Path)
    parser.add_argument("--draw", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.table:
        print("\n".join(render(rows(read_scores(options.table.read_text())))))
        return
    if options.draw:
        draw(read_scores(options.draw.read_text())).savefig(options.out, dpi=110)
        return
    start_log(seed=range(options.seeds))
    problems, started = [name for name in options.problems.split(",") if name], time.process_time()
    for seed in range(options.seeds):
        for member, problem, length, accuracy in profile(options.members, problems, steps=options.steps, seed=seed):
            row = {"member": member, "problem": problem, "length": length, "seed": seed, "accuracy": round(accuracy, 4)}
            print(json.dumps(row | {"cpu_seconds": round(time.process_time() - started)}), flush=True)


if __name__ == "__main__":
    main()
