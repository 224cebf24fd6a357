"""Masked pretraining (Devlin et al. 2018) against training from scratch: a small BERT that classifies film reviews from few labels.

    OMP_NUM_THREADS=1 python -m bench.pretraining --pretraining 800 --steps 150 > docs/results/logs/claim_pretraining.txt

Both sides train on the same 1,500 labelled reviews of IMDb for the same steps; 500 others choose the rates, and 2,000 of the test half
give the figures. The pretrained side begins with weights that filled in masked words of 10,000 reviews of the training half. Seed 0 chooses
three rates, each from a range that grows while the best is at its edge: of pretraining by its perplexity, and of the two classifiers by
their accuracy. Every final seed has a pretraining of its own. Prints a JSON line for each run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
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
TEXTS = 10_000
RATES, STEP, WIDER = (5e-4, 1e-3, 2e-3), 2.0, 3
SETTINGS = ("task.context=64", "run.batch=32", "run.evaluate=0", "run.save=0", "run.sample=false")
WORDS = "task.vocabulary=4000"  # of the tokenizer


def chosen(score: Callable[[float], float]) -> float:
    """The rate with the best score; while it is the largest or the smallest, the next one beyond is tried, up to WIDER times."""
    found = {rate: score(rate) for rate in RATES}
    for _ in range(WIDER):
        best = max(found, key=lambda rate: found[rate])
        if min(found) < best < max(found):
            break
        beyond = best * STEP if best == max(found) else best / STEP
        found[beyond] = score(beyond)
    return max(found, key=lambda rate: found[rate])


def write_reviews() -> None:
    """The labelled reviews by split, and the texts without labels."""
    reviews = read_reviews(dataset_files("imdb"))
    train_rows, test_rows = reviews["train"], reviews["test"]
    first, second = COUNTS["train"], COUNTS["train"] + COUNTS["valid"]
    splits = {"train": train_rows[:first], "valid": train_rows[first:second], "test": test_rows[: COUNTS["test"]]}
    (FOLDER / "labelled").mkdir(parents=True, exist_ok=True)
    for name, rows in splits.items():
        lines = (json.dumps({"text": text, "label": label}) for text, label in rows)
        (FOLDER / "labelled" / f"{name}.jsonl").write_text("\n".join(lines))
    texts = (json.dumps({"text": text}) for text, _ in train_rows[second:][:TEXTS])
    (FOLDER / "texts.jsonl").write_text("\n".join(texts))


def run(kind: str, rate: float, seed: int, steps: int, body: Path | None = None) -> tuple[dict[str, Any], Path]:
    """Trains and prints one run; `kind` is pretraining, pretrained or from scratch. Returns its line and its folder."""
    is_pretraining = kind == "pretraining"
    folder = FOLDER / f"{kind.replace(' ', '-')}-{seed}-{rate:g}"
    settings = [*SETTINGS, f"run.steps={steps}", f"run.seed={seed}", f"optim.lr={rate}"]
    settings += [WORDS] if body is None else []
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
    options = parser.parse_args()
    start_log(seed=range(1 + options.seeds))
    write_reviews()
    body_rate = chosen(lambda rate: -run("pretraining", rate, 0, options.pretraining)[0]["valid"])
    body = FOLDER / f"pretraining-0-{body_rate:g}"
    tuned = chosen(lambda rate: run("pretrained", rate, 0, options.steps, body)[0]["valid"])
    scratch = chosen(lambda rate: run("from scratch", rate, 0, options.steps)[0]["valid"])
    for seed in range(1, 1 + options.seeds):
        _, body = run("pretraining", body_rate, seed, options.pretraining)
        run("pretrained", tuned, seed, options.steps, body)
        run("from scratch", scratch, seed, options.steps)


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
