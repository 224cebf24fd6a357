"""The curves of a run: training and validation in one unit, on one axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from everyformer.train.record import read

Point = tuple[int, float]  # step and value
SMOOTHED = 50  # the moving average reaches a fiftieth of the run to each side


@dataclass
class Curves:
    """Points of a run in one unit. `final` are the evaluations on all examples, at the end of training."""

    unit: str
    train: list[Point] = field(default_factory=list)
    valid: list[Point] = field(default_factory=list)
    final: list[Point] = field(default_factory=list)


def curves(records: Iterable[dict[str, Any]]) -> Curves:
    """Read the curves from the records of a run.

    The unit is the first that both training and validation have: the task's metric if steps record it too (an agent's return),
    bits per byte, bits per dimension, else nats per target.
    """
    lines = list(records)
    begin: dict[str, Any] = next((line for line in lines if line["kind"] == "begin"), {})
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] == "evaluate"]
    unit, of_step, of_evaluation = _unit(begin, steps, evaluations)
    result, last_step = Curves(unit), None
    for line in lines:
        if line["kind"] == "begin":
            last_step = line["steps"]
        elif line["kind"] == "step":
            _add(result.train, line["step"], of_step(line))
        elif line["kind"] == "evaluate":
            _add(result.final if line["step"] == last_step else result.valid, line["step"], of_evaluation(line))
    return result


Reader = Callable[[dict[str, Any]], float | None]


def _unit(
    begin: dict[str, Any], steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> tuple[str, Reader, Reader]:
    """The unit, and how to read it from a step and from an evaluation."""

    def evaluated(name: str) -> bool:
        return any(name in line for line in evaluations)

    metric = begin.get("metric", "")
    if any(metric in line for line in steps):
        return metric.replace("_", " "), lambda line: line.get(metric), lambda line: line.get(metric)
    if begin.get("bytes") and evaluated("bits_per_byte"):
        per_byte = math.log(2) * begin["bytes"]
        return "bits per byte", lambda line: line["loss"] / per_byte, lambda line: line.get("bits_per_byte")
    if evaluated("bits_per_dimension"):
        return (
            "bits per dimension",
            lambda line: line["loss"] / math.log(2),
            lambda line: line.get("bits_per_dimension"),
        )
    return "loss in nats per target", lambda line: line["loss"], _loss


def _loss(evaluation: dict[str, Any]) -> float | None:
    """The loss of an evaluation, from the perplexity if it is not recorded itself."""
    if "loss" in evaluation:
        return float(evaluation["loss"])
    perplexity = evaluation.get("perplexity", evaluation.get("masked_perplexity"))
    return math.log(perplexity) if perplexity else None


def _add(points: list[Point], step: int, value: float | None) -> None:
    if value is not None and math.isfinite(value):
        points.append((step, value))


def smooth(points: list[Point]) -> list[Point]:
    """The moving average over the points around each one, which does not lag behind."""
    radius = len(points) // SMOOTHED
    sums = [0.0, *accumulate(value for _, value in points)]
    result = list[Point]()
    for index, (step, _) in enumerate(points):
        start, end = max(0, index - radius), min(len(points), index + radius + 1)
        result.append((step, (sums[end] - sums[start]) / (end - start)))
    return result


def draw(folder: Path) -> Path:
    """Draw `curves.png` from the records of a run and return its path."""
    from matplotlib.figure import Figure

    run = curves(read(folder / "records.jsonl"))
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    looks: tuple[tuple[list[Point], str, dict[str, Any]], ...] = (
        (run.train, "-", {"color": "#9db7d1", "lw": 0.8, "alpha": 0.6}),
        (smooth(run.train), "-", {"color": "#1f5a96", "lw": 1.5, "label": "training (moving average)"}),
        (run.valid, "o-", {"color": "#e07a2f", "ms": 4, "label": "validation"}),
        (run.final, "*", {"color": "#b23a48", "ms": 12, "label": "validation, all examples"}),
    )
    for points, style, options in looks:
        if points:
            axes.plot(*zip(*points, strict=True), style, **options)
    axes.set(xlabel="step", ylabel=run.unit, title=folder.name)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    if axes.get_lines():
        axes.legend(frameon=False)
    path = folder / "curves.png"
    figure.savefig(path, dpi=120)
    return path
