"""Runs one job in this process: trains to its step, from the last checkpoint if there is one, and writes the outcome.

A job is claimed by a lock that the system releases when its process ends, however it ends, so a job is never run twice at a time, on one
machine or on several that share the folder. What counts is in the folder: the outcome, or else the run with its checkpoints.

The outcome is {"status": "done" | "diverged" | "failed", "reason", "metric", "curve", "seconds", "memory", "skipped", "test"}.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from everyformer.study.compare.frozen import Frozen, Row
from everyformer.study.compare.jobs import Job
from everyformer.train import checkpoint
from everyformer.train.checksums import write_file
from everyformer.train.gradient_watch import Unstable, spike
from everyformer.train.lock import only_writer
from everyformer.train.loop import resume, train
from everyformer.train.recipe import override
from everyformer.train.record import read
from everyformer.train.trained import TrainedRun

OUTCOMES, CLAIMS = "outcomes", "claims"
LAST = 10  # the last tenth of the steps, whose loss shows whether a run has exploded


def run_job(frozen: Frozen, folder: Path, job: Job) -> bool:
    """Returns whether the job has an outcome now: it has none if it was stopped. Raises InUse if another process runs it."""
    path = folder / OUTCOMES / f"{job.name}.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # results to the last bit do not depend on how many workers there are
    try:
        with only_writer(folder / CLAIMS / job.name):
            if not path.exists():
                outcome = _outcome(frozen, folder, job)
                if outcome is None:
                    return False
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, json.dumps(outcome).encode())
    finally:
        torch.set_num_threads(threads)
    return True


def _outcome(frozen: Frozen, folder: Path, job: Job) -> dict[str, Any] | None:
    row = next(row for row in frozen.rows if row.name == job.row)
    entry, target = row.entry(job.entry), folder / job.path
    recipe = override(entry.recipe, job.settings)
    status, reason, test = "done", "", None
    try:
        if (target / "recipe.json").is_file():
            is_at_end = _step(target) >= job.until and not _is_unevaluated(target)
            run = None if is_at_end else resume(target, until=job.until)
        else:
            run = train(recipe, target, until=job.until)
        if run is not None and run.stopped is not None:
            return None
        if job.is_final:
            test = _test(run, target, row)
    except Unstable as error:
        status, reason = "diverged", str(error)
    except Exception as error:  # whatever it is, the other runs go on
        status, reason = "failed", f"{type(error).__name__}: {' '.join(str(error).split())}"
    found = measured(target, row, job.until, entry.tokens)
    if status == "done" and (exploded := found.pop("exploded", "")):
        status, reason = "diverged", exploded
    return {"job": job.name, "status": status, "reason": reason, **found, "test": test}


def _step(target: Path) -> int:
    """The last step of a run that is saved."""
    return max(checkpoint.steps(target), default=0)


def _is_unevaluated(target: Path) -> bool:
    """Whether a signal stopped the last evaluation, for which the resumed run makes up."""
    return bool(checkpoint.verify(target, _step(target)).get("unevaluated"))


def _test(run: TrainedRun | None, target: Path, row: Row) -> dict[str, Any]:
    """The metrics of the last step on the data that decided nothing."""
    if run is None:
        from everyformer.train.trained import load

        run = load(target)
    metrics = run.evaluate(row.split, run.recipe.run.final_examples)
    kept = ("low", "high", "targets", row.metric)
    return {name: metrics[name] for name in kept if name in metrics}


def measured(target: Path, row: Row, until: int, tokens: int) -> dict[str, Any]:
    """What the records of a run say about it up to a step."""
    lines = list(read(target / "records.jsonl")) if (target / "records.jsonl").is_file() else []
    lines = [line for line in lines if line.get("step", 0) <= until]
    steps = [line for line in lines if line["kind"] == "step"]
    seconds, spent = 0.0, {0: 0.0}
    for line in steps:
        seconds += line["targets"] / line["rate"]
        spent[line["step"]] = seconds
    evaluated = {line["step"]: line for line in lines if line["kind"] == "evaluate"}  # on the same examples
    curve = [
        [step, line[row.metric], spent.get(step, seconds)] for step, line in evaluated.items() if row.metric in line
    ]
    last: dict[str, Any] = next((line for line in reversed(lines) if line["kind"] in ("evaluate", "final")), {})
    metric = last.get(row.metric, math.nan) if last.get("step") == until else math.nan
    return {
        "metric": metric if math.isfinite(metric) else None,
        "curve": curve,
        "seconds": round(seconds, 3),
        "steps": steps[-1]["step"] if steps else 0,
        "memory": max((line["memory"] for line in steps), default=0),
        "skipped": next((line["skipped_steps"] for line in reversed(lines) if "skipped_steps" in line), 0),
        "exploded": _exploded(steps, metric),
    }


def _exploded(steps: Sequence[dict[str, Any]], metric: float) -> str:
    """Why a run that came to its end has diverged all the same; empty if it has not."""
    if not math.isfinite(metric):
        return "its last evaluation is not a finite number"
    losses = [line["loss"] for line in steps]
    late = statistics.mean(losses[-max(1, len(losses) // LAST) :])
    if not late <= spike(losses[0]):
        return f"its loss rose from {losses[0]:.3g} to {late:.3g}"
    return ""


def read_outcomes(folder: Path, known: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the outcomes in a folder by the name of their job; those that are known are not read again."""
    found = {path.stem: path for path in (folder / OUTCOMES).glob("*.json")}
    return {name: known.get(name) or json.loads(path.read_bytes()) for name, path in found.items()}


def forget_failures(folder: Path) -> None:
    """Remove the outcomes of failed runs, so that they are tried again."""
    for name, outcome in read_outcomes(folder, {}).items():
        if outcome["status"] == "failed":
            (folder / OUTCOMES / f"{name}.json").unlink()
