"""Suites of `everyformer compare --suite NAME`: data and settings, one row each; and the profile of members on generated problems.

    from everyformer.study.suite import draw, profile

    scores = profile(["gpt2", "lstm"], steps=1000, seed=0)         # by member, problem and length: shares of right characters
    draw(scores).savefig("profile.png")                            # members x problems, from chance (0) to all right (1)

The sizes and steps of `diagnostics` are those at which a tiny member learns what it can in about a minute on two cores. Each problem is
tested at the longest length of training and at twice that.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from everyformer.data.problems import PROBLEMS
from everyformer.train.loop import train
from everyformer.train.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTHS = {
    "induction": 16, "mqar": 16, "selective-copy": 24, "copy": 12, "parity": 12, "even-pairs": 12, "cycle-navigation": 12,
    "modular-arithmetic": 12, "sorting": 12, "dyck": 16, "reverse": 12, "noisy-recall": 24, "listops": 12, "addition": 12,
    "needle": 96, "pathfinder": 144,
}  # fmt: skip
STEPS = 1000
Score = tuple[str, str, int, float]  # member, problem, length, share of right characters


def _test_lengths(name: str) -> tuple[int, ...]:
    length = LENGTHS[name]
    return (length,) if PROBLEMS[name].fixed else (length, 2 * length)


DIAGNOSTICS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (
        name,
        (f"task.length={length}", f"task.test_length={','.join(map(str, _test_lengths(name)))}", f"run.steps={STEPS}"),
    )
    for name, length in LENGTHS.items()
)
SUITES = {"diagnostics": DIAGNOSTICS}


def profile(
    members: Sequence[str], problems: Sequence[str] = (), size: str = "tiny", steps: int = STEPS, seed: int = 0
) -> Iterator[Score]:
    """Trains each member on each problem, one after the other, and yields its test scores."""
    for name, settings in DIAGNOSTICS:
        for member in members if not problems or name in problems else ():
            quiet = ("run.evaluate=0", "run.save=0", "run.device=cpu")
            recipe = Recipe.of(
                member, *settings, f"run.steps={steps}", f"run.seed={seed}", *quiet, size=size, data=name
            )
            with tempfile.TemporaryDirectory() as folder:
                run = train(recipe, Path(folder) / "run")
                metrics = run.evaluate("test", limit=200)
            for length in _test_lengths(name):
                yield member, name, length, metrics[f"character_accuracy_{length}"]


def scaled(name: str, score: float) -> float:
    """Returns a score from 0, chance or below, to 1."""
    chance = PROBLEMS[name].chance
    return max(0.0, (score - chance) / (1 - chance))


def table(scores: Sequence[Score]) -> dict[str, dict[tuple[str, bool], float]]:
    """Returns the mean scaled scores by member, and by problem and whether its questions are longer than in training."""
    found: dict[str, dict[tuple[str, bool], list[float]]] = {}
    for member, name, length, score in scores:
        cells = found.setdefault(member, {})
        cells.setdefault((name, length > LENGTHS[name]), []).append(scaled(name, score))
    return {member: {cell: sum(some) / len(some) for cell, some in cells.items()} for member, cells in found.items()}


def draw(scores: Sequence[Score]) -> Figure:
    """Returns a heat map of members and problems: at the lengths of training above, at twice those below."""
    from matplotlib.figure import Figure

    cells = table(scores)
    names = [name for name in LENGTHS if any(name == cell for row in cells.values() for cell, _ in row)]
    figure = Figure(figsize=(2.4 + 0.62 * len(names), 1.9 + 0.62 * len(cells)), layout="constrained")
    panels: Any = figure.subplots(2, 1, sharex=True)
    for axes, longer in zip(panels, (False, True), strict=True):
        value_MN = [[row.get((name, longer), float("nan")) for name in names] for row in cells.values()]
        image = axes.imshow(value_MN, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_yticks(range(len(cells)), list(cells))
        axes.set_title("twice as long as in training" if longer else "as long as in training", fontsize=10)
        for y, row in enumerate(value_MN):
            for x, value in enumerate(row):
                text, color = ("–", "gray") if value != value else (f"{value:.2f}", "black" if value > 0.6 else "white")
                axes.text(x, y, text, ha="center", va="center", color=color, fontsize=8)
    panels[1].set_xticks(range(len(names)), names, rotation=45, ha="right")
    figure.colorbar(image, ax=list(panels), label="from chance (0) to all characters right (1)")
    return figure
