"""Compares the Universal Transformer with the Transformer on copy, reverse and addition, at lengths beyond training.

    OMP_NUM_THREADS=1 python -m bench.algorithms run.steps=1000 --data copy --trials 3 --seeds 3 --out runs/copy

As in Dehghani et al. 2019, models are trained on up to 40 characters and tested on 40 to 400. In training the positions start at a random
one, so that those of 400 characters are trained:
    universal   universal-transformer with four steps       transformer    transformer of four layers: equal steps
Takes the settings and options of bench.compare, which chooses the rate of each by the accuracy on validation, and prints its log. Then a
JSON line for each final run with its accuracy at the lengths of training and at each longer one.
"""

from __future__ import annotations

import json
import sys

from bench import compare
from bench.results import Rows, json_lines, mean_range, table

DEPTH = 4
MODELS = (
    "universal=universal-transformer", "transformer",
    "universal:size=tiny-pair", f"universal:model.steps={DEPTH}", "universal:model.halting=none",
    "transformer:size=tiny", f"transformer:model.layers={DEPTH}",
    "model.dropout=0", "task.shift=360",
)  # fmt: skip
LENGTHS = (40, 80, 120, 200, 400)
EXAMPLES = 50  # of each length


def main() -> None:
    sys.argv[1:] = [*MODELS, *sys.argv[1:], "--match", "none"]
    for entry, seed, run in compare.final_runs(compare.printed()):
        trained, tested = run.evaluate("valid"), run.evaluate("test", EXAMPLES)
        right = {"trained": trained["character_accuracy"]}
        right |= {str(length): tested[f"character_accuracy_{length}"] for length in LENGTHS}
        found = {name: round(value, 4) for name, value in right.items()}
        print(json.dumps({"data": run.recipe.data, "model": entry, "seed": seed, "right": found}), flush=True)


@table("copy, reverse and addition")
def algorithms(log: str) -> Rows:
    found = [one for one in json_lines(log) if "right" in one]
    rows = [["task", "model", "rate", "up to 40", *map(str, LENGTHS)]]
    for model in dict.fromkeys(one["model"] for one in found):
        some = [one["right"] for one in found if one["model"] == model]
        (chosen,) = (one["chosen"] for one in json_lines(log) if one.get("entry") == model)
        rate = next(setting.removeprefix("optim.lr=") for setting in chosen if setting.startswith("optim.lr="))
        cells = (mean_range([one[name] for one in some]) for name in ("trained", *map(str, LENGTHS)))
        rows.append([found[0]["data"], f"`{model}`", rate, *cells])
    return rows


if __name__ == "__main__":
    main()
