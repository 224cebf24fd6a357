"""The curves of runs: training and validation in one unit, on one axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyformer.train.record import read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Point = tuple[int, float]  # step and value
NATS = "loss in nats per target"
OVER = "lines: training (moving average); circles: validation; diamonds: final validation"  # several runs
SMOOTHED = 50  # the moving average reaches a fiftieth of the run to each side


@dataclass
class Curves:
    """Points of a run in one unit.

    `valid` are the evaluations during training, all on the same examples, `final` those at the end of training, on more. Each
    evaluation has a confidence interval where its metric is the unit.
    """

    unit: str
    training: str = "training (moving average)"  # what the training curve is
    train: list[Point] = field(default_factory=list)
    valid: list[Point] = field(default_factory=list)
    final: list[Point] = field(default_factory=list)
    intervals: dict[Point, tuple[float, float]] = field(default_factory=dict)


def curves(records: Iterable[dict[str, Any]]) -> Curves:
    """Read the curves from the records of a run.

    The unit is the first that both training and validation have: the task's metric if steps record it too (an agent's return),
    bits per byte, bits per dimension, else nats per target. Before the first evaluation it is the one that evaluations will have.
    """
    lines = list(records)
    begin: dict[str, Any] = next((line for line in lines if line["kind"] == "begin"), {})
    steps = [line for line in lines if line["kind"] == "step"]
    evaluations = [line for line in lines if line["kind"] in ("evaluate", "final")]
    unit, of_step, of_evaluation = _unit(begin, steps, evaluations)
    result, metric = Curves(unit), begin.get("metric", "")
    if unit == NATS and begin.get("includes"):
        result.training = f"training, with {begin['includes']} (moving average)"
    points = {
        "step": (result.train, of_step),
        "evaluate": (result.valid, of_evaluation),
        "final": (result.final, of_evaluation),
    }
    for line in lines:
        if line["kind"] in points:
            some, reader = points[line["kind"]]
            value = reader(line)
            if value is not None and math.isfinite(value):
                some.append((line["step"], value))
                if value == line.get(metric) and math.isfinite(line.get("low", math.nan)):
                    result.intervals[some[-1]] = line["low"], line["high"]
    return result


Reader = Callable[[dict[str, Any]], float | None]


def _unit(
    begin: dict[str, Any], steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> tuple[str, Reader, Reader]:
    """The unit, and how to read it from a step and from an evaluation."""

    metric = begin.get("metric", "")

    def evaluated(name: str) -> bool:
        return any(name in line for line in evaluations) if evaluations else name == metric

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
    return NATS, lambda line: line["loss"], _loss


def _loss(evaluation: dict[str, Any]) -> float | None:
    """The loss of an evaluation as it is in training, from the perplexity if it is not recorded itself."""
    if "loss" in evaluation:
        return float(evaluation.get("smoothed_loss", evaluation["loss"]))
    perplexity = evaluation.get("perplexity", evaluation.get("masked_perplexity"))
    return math.log(perplexity) if perplexity else None


def smooth(points: list[Point]) -> list[Point]:
    """The moving average over the points around each one, which does not lag behind."""
    radius = len(points) // SMOOTHED
    sums = [0.0, *accumulate(value for _, value in points)]
    result = list[Point]()
    for index, (step, _) in enumerate(points):
        start, end = max(0, index - radius), min(len(points), index + radius + 1)
        result.append((step, (sums[end] - sums[start]) / (end - start)))
    return result


def curves_of(folders: Sequence[Path]) -> list[Curves]:
    """The curves of several runs. Raises ValueError if a folder is no run, or if their units differ."""
    for folder in folders:
        if not (folder / "records.jsonl").is_file():
            raise ValueError(f"{folder} has no records of a training; give the folder of a run that train has written")
    found = [curves(read(folder / "records.jsonl")) for folder in folders]
    for folder, one in zip(folders, found, strict=True):
        if one.unit != found[0].unit:
            raise ValueError(
                f"the curves of {folders[0]} are in the unit {found[0].unit!r}, those of {folder} in {one.unit!r}, which share no axis; "
                "draw them one by one"
            )
    return found


def draw(folder: Path) -> Path:
    """Draw `curves.png` from the records of a run and return its path."""
    path = folder / "curves.png"
    figure_of([folder]).savefig(path, dpi=120)
    return path


def figure_of(folders: Sequence[Path]) -> Figure:
    """Draw the curves of one run with its intervals, or those of several runs over each other, a colour for each."""
    from matplotlib.figure import Figure

    found = curves_of(folders)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    if len(found) == 1:
        _draw_one(axes, found[0])
    else:
        for index, (name, run) in enumerate(zip(short_names(folders), found, strict=True)):
            _draw_over(axes, run, name, f"C{index % 10}")
    title = folders[0].resolve().name if len(found) == 1 else OVER
    axes.set(xlabel="step", ylabel=found[0].unit)
    axes.set_title(title, fontsize=10)
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
    return figure


def short_names(folders: Sequence[Path]) -> list[str]:
    """The names of folders, with as many of the folders around them as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts))):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(folder) for folder in folders]


def _draw_one(axes: Axes, run: Curves) -> None:
    if run.train:
        axes.plot(*zip(*run.train, strict=True), "-", color="#9db7d1", lw=0.8, alpha=0.6)
        axes.plot(*zip(*smooth(run.train), strict=True), "-", color="#1f5a96", lw=1.5, label=run.training)
    for points, style, color, label in (
        (run.valid, "o-", "#e07a2f", "validation, the same examples each time"),
        (run.final, "D", "#b23a48", "final validation, on more examples"),
    ):
        if points:
            _draw_points(axes, run, points, fmt=style, color=color, label=label)


def _draw_over(axes: Axes, run: Curves, name: str, color: str) -> None:
    """The curves of one of several runs."""
    smoothed = smooth(run.train) or [(0, math.nan)]
    axes.plot(*zip(*smoothed, strict=True), "-", color=color, lw=1.2, label=name)
    for points, style in ((run.valid, "o--"), (run.final, "D")):
        if points:
            _draw_points(axes, run, points, fmt=style, color=color, lw=0.8)


def _draw_points(axes: Axes, run: Curves, points: list[Point], **style: Any) -> None:
    steps, values = zip(*points, strict=True)
    bounds = [run.intervals.get(point, (point[1], point[1])) for point in points]
    bars = [[abs(value - bound[side]) for value, bound in zip(values, bounds, strict=True)] for side in (0, 1)]
    axes.errorbar(steps, values, bars, ms=4, capsize=2, elinewidth=1, **style)
