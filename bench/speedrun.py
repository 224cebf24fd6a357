"""Trains variants of a recipe one after another on one device and prints what each reaches.

    python -m bench.speedrun --data enwik8 --try "" --try "optim.muon_lr=0.05" --try "model.width=384 run.steps=1100" run.precision=bf16
    python -m bench.speedrun --data enwik8 --seconds 15 --try "model.layers=6" --try "model.layers=10"
    python -m bench.speedrun --data enwik8 --seeds 3 --bytes all

Each --try has the settings of a variant, after those of all variants. With --seconds the number of steps is what a variant takes in
this time at the speed of its own steps, which a short run of 60 steps measures. Validation is on the first so many bytes, spread over
the split, or on all. Prints the head of a log, then a JSON line for each run: its settings, parameters, steps, tokens a second,
seconds of training without compilation, seconds of compilation, bits per byte, and the seconds from the first line to the last.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch

from bench.results import Rows, json_lines, table
from everyformer.train.loop import train
from everyformer.train.provenance import start_log
from everyformer.train.recipe import Recipe

WARMUP = 20  # steps of a run that are not timed: they compile and allocate
PROBE = 60  # steps of the short run that measures the speed


class Clock:
    """The records of a run, with the time of each step."""

    def __init__(self) -> None:
        self.begin: dict[str, Any] = {}
        self.times, self.targets, self.losses = [time.perf_counter()], list[int](), list[float]()
        self.memory = self.evaluating = 0.0

    def __call__(self, record: dict[str, Any]) -> None:
        if record["kind"] == "begin":
            self.begin, self.times = record, [time.perf_counter()]
        if record["kind"] == "step":
            self.times.append(time.perf_counter())
            self.targets.append(record["targets"])
            self.losses.append(record["loss"])
            self.memory = record["memory"] or 0
        if record["kind"] == "final":
            self.evaluating = time.perf_counter() - self.times[-1]

    def speed(self) -> float:
        """Tokens a second after the first steps."""
        first = min(WARMUP, len(self.targets) // 2)
        return sum(self.targets[first:]) / (self.times[-1] - self.times[first])

    def training(self) -> float:
        """Seconds of all steps, those that were not timed at the speed of the others."""
        return sum(self.targets) / self.speed()

    def compiling(self) -> float:
        """Seconds of the first steps beyond those of training."""
        return max(0.0, self.times[-1] - self.times[0] - self.training())


def run(
    options: argparse.Namespace, variant: str, seed: int, more: tuple[str, ...] = ()
) -> tuple[dict[str, Any], Clock]:
    """Trains and evaluates a variant. Returns its line."""
    settings = [*options.settings, *variant.split(), f"run.seed={seed}", *more]
    recipe = Recipe.of(options.member, *settings, size=options.size, data=options.data)
    context = getattr(recipe.task, "context", None) or 256
    examples = 10**9 if options.bytes == "all" else max(1, int(options.bytes) // context)
    if not any(setting.startswith("run.final_examples=") for setting in (*options.settings, *variant.split(), *more)):
        recipe = Recipe.of(
            options.member, *settings, f"run.final_examples={examples}", size=options.size, data=options.data
        )
    clock, start = Clock(), time.perf_counter()
    trained = train(recipe, callbacks=(clock,))
    tail = clock.losses[-max(1, len(clock.losses) // 20) :]
    line = {
        "member": options.member,
        "size": options.size,
        "settings": " ".join(options.settings),
        "variant": variant,
        "seed": seed,
        "parameters": clock.begin["parameters"],
        "compiled": clock.begin["compilation"]["mode"],
        "steps": recipe.run.steps,
        "tokens": sum(clock.targets),
        "tokens_a_second": round(clock.speed()),
        "training": round(clock.training(), 2),
        "compiling": round(clock.compiling(), 1),
        "evaluating": round(clock.evaluating, 2),
        "seconds": round(time.perf_counter() - start, 1),
        "memory_MiB": round(clock.memory / 2**20),
        "train_loss_bits": round(median(tail) / 0.6931471805599453, 4),
        "skipped": trained.skipped_steps,
        **{name: trained.metrics.get(name) for name in ("bits_per_byte", "low", "high", "window", "stride", "targets")},
    }
    return line, clock


def steps_of(options: argparse.Namespace, variant: str) -> tuple[str, ...]:
    """The setting of the number of steps that a variant takes in the given time."""
    if options.seconds is None:
        return ()
    _, clock = run(options, variant, 0, (f"run.steps={PROBE}", "run.final_examples=1"))
    each = sum(clock.targets) / PROBE
    return (f"run.steps={max(PROBE, int(options.seconds * clock.speed() / each))}",)


@table("runs of speedrun")
def runs(log: str) -> Rows:
    head = ["settings", "seed", "parameters", "steps", "tokens/s", "training, s", "bits per byte", "low", "high"]
    rows = [head]
    for one in json_lines(log):
        settings = " ".join(filter(None, (one["settings"], one["variant"])))
        rows.append(
            [
                f"`{settings}`" if settings else "the recipe of the commit",
                f"{one['seed']}",
                f"{one['parameters'] / 1e6:.1f}M",
                f"{one['steps']:,}",
                f"{one['tokens_a_second'] / 1e6:.2f}M",
                f"{one['training']:.1f}",
                *(f"{one[name]:.4f}" for name in ("bits_per_byte", "low", "high")),
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--member", default="speedrun", help="a member, or a .json file with a model of your own")
    parser.add_argument("--size")
    parser.add_argument("--data", default="enwik8")
    parser.add_argument(
        "--try", dest="variants", action="append", help="settings of one variant; may be given several times"
    )
    parser.add_argument("--seconds", type=float, help="of training: sets run.steps of each variant")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--bytes", default="500000", help="of the validation split that are scored, or all")
    parser.add_argument("settings", nargs="*", help="settings of all variants, for example run.batch=32")
    options = parser.parse_intermixed_args()
    start_log(seed=range(options.seeds))
    for variant in options.variants or [""]:
        torch.compiler.reset()  # else the variants share the limit of compiled shapes
        try:
            steps = steps_of(options, variant)
            for seed in range(options.seeds):
                print(json.dumps(run(options, variant, seed, steps)[0]), flush=True)
        except (ValueError, RuntimeError) as error:  # the others still run
            print(f"# {variant or 'the recipe'}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()
