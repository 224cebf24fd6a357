"""Masked pretraining (Devlin et al. 2018) against training from scratch: a small BERT that classifies film reviews from few labels.

    OMP_NUM_THREADS=1 python -m bench.pretraining --pretraining 800 --steps 150 > docs/results/logs/claim_pretraining.txt
    python -m bench.pretraining --labels all --pretraining 3000 --steps 1100 --rates 2e-4,4e-4,8e-4 model.layers=6 run.precision=bf16

Both sides train on the same labelled reviews of IMDb for the same steps, by default 1,500; 500 others choose the rates, and 2,000 of
the test half give the figures. The pretrained side begins with weights that filled in masked words of 10,000 other reviews of the
training half. With `--labels all`, 2,500 reviews of the training half choose the rates, both sides train on all others, whose text is
also what pretraining reads, and the whole test half gives the figures. Seed 0 chooses three rates, each from a range that grows while
the best is at its edge: of pretraining by its perplexity, and of the two classifiers by their accuracy. Every final seed has a
pretraining of its own. The settings are those of all runs. Prints a JSON line for each run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.results import Rows, json_lines, mean, table
from everyformer.data.datasets import dataset_files
from everyformer.data.imdb import read_reviews
from everyformer.train.loop import train
from everyformer.train.provenance import start_log
from everyformer.train.recipe import Recipe

FOLDER = Path("runs/pretraining")
COUNTS = {"train": 1500, "valid": 500, "test": 2000}
VALID = 2500  # reviews that choose the rates, if all have labels
TEXTS = 10_000
STEP, WIDER = 2.0, 3
SETTINGS = ("task.context=64", "run.batch=32", "run.evaluate=0", "run.save=0", "run.sample=false")
WORDS = "task.vocabulary=4000"  # of the tokenizer


def chosen(rates: Sequence[float], score: Callable[[float], float]) -> float:
    """The rate with the best score; while it is the largest or the smallest, the next one beyond is tried, up to WIDER times."""
    found = {rate: score(rate) for rate in rates}
    for _ in range(WIDER):
        best = max(found, key=lambda rate: found[rate])
        if min(found) < best < max(found):
            break
        beyond = best * STEP if best == max(found) else best / STEP
        found[beyond] = score(beyond)
    return max(found, key=lambda rate: found[rate])


def write_reviews(all_labels: bool) -> None:
    """The labelled reviews by split, and the texts without labels."""
    reviews = read_reviews(dataset_files("imdb"))
    train_rows, test_rows = reviews["train"], reviews["test"]
    if all_labels:
        splits = {"train": train_rows[VALID:], "valid": train_rows[:VALID], "test": test_rows}
        unlabelled = splits["train"]
    else:
        first, second = COUNTS["train"], COUNTS["train"] + COUNTS["valid"]
        splits = {"train": train_rows[:first], "valid": train_rows[first:second], "test": test_rows[: COUNTS["test"]]}
        unlabelled = train_rows[second:][:TEXTS]
    (FOLDER / "labelled").mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
        (FOLDER / "labelled" / f"{name}.jsonl").write_text("\n".join(lines))
    texts = (json.dumps({"text": text}) for text, _ in unlabelled)
    (FOLDER / "texts.jsonl").write_text("\n".join(texts))


def run(
    kind: str, rate: float, seed: int, steps: int, more: Sequence[str], body: Path | None = None
) -> tuple[dict[str, Any], Path]:
    """Trains and prints one run; `kind` is pretraining, pretrained or from scratch. Returns its line and its folder."""
    is_pretraining = kind == "pretraining"
    folder = FOLDER / f"{kind.replace(' ', '-')}-{seed}-{rate:g}"
    settings = [
        *SETTINGS,
        *([WORDS] if body is None else []),
        f"run.steps={steps}",
        f"run.seed={seed}",
        f"optim.lr={rate}",
    ]
    settings += [one for one in more if body is None or not one.startswith("task.vocabulary=")]
    settings += ["task.next_sentence=false"] if is_pretraining else []
    task, data = ("masked", "texts.jsonl") if is_pretraining else ("classify", "labelled")
    recipe = Recipe.of("bert", *settings, size="tiny", task=task, data=FOLDER / data, init_from=body)
    trained = train(recipe, folder)
    metric = "masked_perplexity" if is_pretraining else "accuracy"
    line: dict[str, Any] = {"kind": kind, "rate": rate, "seed": seed, "steps": steps}
    line["valid"] = round(trained.metrics[metric], 4)
    if seed and not is_pretraining:
        line["test"] = round(trained.evaluate("test", None)[metric], 4)
    print(json.dumps(line), flush=True)
    return line, folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretraining", type=int, default=800, help="steps of pretraining")
    parser.add_argument("--steps", type=int, default=150, help="steps of the classifiers")
    parser.add_argument("--seeds", type=int, default=3, help="final seeds")
    parser.add_argument("--labels", choices=("few", "all"), default="few", help="reviews that the classifiers train on")
    parser.add_argument("--rates", default="5e-4,1e-3,2e-3", help="rates to begin with")
    parser.add_argument("settings", nargs="*", help="settings of all runs")
    options = parser.parse_args()
    rates, more = [float(rate) for rate in options.rates.split(",")], options.settings
    start_log(seed=range(1 + options.seeds))
    write_reviews(options.labels == "all")
    body_rate = chosen(rates, lambda rate: -run("pretraining", rate, 0, options.pretraining, more)[0]["valid"])
    body = FOLDER / f"pretraining-0-{body_rate:g}"
    tuned = chosen(rates, lambda rate: run("pretrained", rate, 0, options.steps, more, body)[0]["valid"])
    scratch = chosen(rates, lambda rate: run("from scratch", rate, 0, options.steps, more)[0]["valid"])
    for seed in range(1, 1 + options.seeds):
        _, body = run("pretraining", body_rate, seed, options.pretraining, more)
        run("pretrained", tuned, seed, options.steps, more, body)
        run("from scratch", scratch, seed, options.steps, more)


@table("pretraining and from scratch")
def pretraining(log: str) -> Rows:
    finals = [one for one in json_lines(log) if "test" in one]
    seeds = list(dict.fromkeys(one["seed"] for one in finals))
    rows = [["side", "rate", *(f"seed {seed}" for seed in seeds), "mean"]]
    for kind in dict.fromkeys(one["kind"] for one in finals):
        some = [one for one in finals if one["kind"] == kind]
        cells = (f"{100 * one['test']:.1f} %" for one in some)
        rows.append([kind, f"{some[0]['rate']:g}", *cells, f"{100 * mean([one['test'] for one in some]):.1f} %"])
    return rows


if __name__ == "__main__":
    main()
