"""Runs a comparison and prints it as a log: the facts, then one JSON line for each entry, with the figure of each seed and the trials.

    python -m bench.compare gpt2 transformer-xl lstm run.steps=500 --size tiny --data enwik8 --trials 3 --out runs/small

The table of a log is computed anew from the figures of the seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import everyformer
from bench.results import Rows, json_lines, table
from everyformer.attention.span import SpanModule
from everyformer.study.compare import Comparison, compare
from everyformer.study.compare.statistics import Interval, holm, interval, paired_p
from everyformer.study.compare.table import plus_minus, records
from everyformer.study.spans import spans_of
from everyformer.train.provenance import start_log

LEVEL = 0.05


def printed() -> Comparison:
    """Runs the comparison of the command line and prints its log."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+")
    for name in ("size", "data", "match", "baseline", "budget", "out"):
        parser.add_argument(f"--{name}")
    for name in ("trials", "seeds", "workers"):
        parser.add_argument(f"--{name}", type=int)
    options = vars(parser.parse_args())
    words = options.pop("words")
    seeds = range(1 + (options["seeds"] or 3))
    start_log(seed=list(seeds))  # 0 of the trials, the others of the final runs
    found = compare(*words, **{name: value for name, value in options.items() if value is not None})
    for record in records(found.lines):
        line = json.dumps({name: value for name, value in record.items() if name != "curves"})
        print(line.replace(f"{Path.cwd()}/", ""), flush=True)  # commands of this folder, not of this machine
    return found


def final_runs(found: Comparison) -> Iterator[tuple[str, str, everyformer.TrainedRun]]:
    """The entry and the seed of each final run, and the run."""
    for folder in sorted((found.folder / "runs").glob("*/*/seed-*")):
        yield folder.parent.name, folder.name.removeprefix("seed-"), everyformer.load(folder)


def main() -> None:
    for entry, seed, run in final_runs(printed()):
        if any(isinstance(module, SpanModule) for module in run.network.modules()):
            spans = spans_of(run.network, run.task.data)
            print(json.dumps({"spans_of": entry, "seed": f"seed-{seed}", "mean_span": round(spans.mean, 2),
                              "keys": round(spans.keys, 2), "most": spans.most}), flush=True)  # fmt: skip


@table("comparison")
def comparison(text: str) -> Rows:
    lines = [line for line in json_lines(text) if "entry" in line]
    base = lines[0]["values"]
    pairs = {line["entry"]: [line["values"][seed] - base[seed] for seed in base] for line in lines[1:]}
    p = holm({name: paired_p(difference) for name, difference in pairs.items()})
    head = (
        "entry",
        "parameters",
        "FLOPs a token",
        "tokens",
        "seconds",
        "MiB",
        "rate",
        "diverged",
        "bits per byte, test",
        "difference",
    )
    rows = [(*head, "p", "verdict")]
    for line in lines:
        name, mean = line["entry"], interval(list(line["values"].values()))
        difference = interval(pairs.get(name, []))
        rate = next(setting.partition("=")[2] for setting in line["chosen"] if setting.startswith("optim.lr="))
        facts = (
            f"`{name}`", f"{line['parameters']:,}", f"{line['flops_a_token']:.3g}", f"{line['tokens']:,}", f"{line['seconds']:.0f}",
            f"{line['peak_memory'] / 2**20:.0f}", rate, f"{line['diverged']} of {line['runs']}", plus_minus(mean),
        )  # fmt: skip
        rows.append((*facts, plus_minus(difference, sign="+"), *_verdict(difference, p.get(name))))
    return rows


def _verdict(difference: Interval | None, p: float | None) -> Sequence[str]:
    """The corrected p, and what it allows to say; fewer bits are better."""
    if difference is None or p is None:
        return ("", "baseline")
    verdict = "inconclusive" if not p < LEVEL else "better" if difference.mean < 0 else "worse"
    return (f"{p:.2g}", verdict)


if __name__ == "__main__":
    main()
