"""Draws the tables of `everyformer bench` as bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

OURS, PEER = "#4c78a8", "#b8bec6"


class Bar(NamedTuple):
    """One bar: its value with the least and the most that were measured."""

    panel: str
    label: str
    value: float
    least: float
    most: float
    is_ours: bool = True


def draw(bars: Sequence[Bar], unit: str, path: Path) -> Path:
    """Draw bars, one panel below another, and return the path. Bars of peers are grey."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    panels = list(dict.fromkeys(bar.panel for bar in bars))
    counts = [sum(bar.panel == panel for bar in bars) for panel in panels]
    figure = Figure(figsize=(8, 0.7 * len(panels) + 0.32 * len(bars) + 0.4), layout="constrained")
    plots = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 0.6 for count in counts])[:, 0]
    for plot, panel in zip(plots, panels, strict=True):
        shown = [bar for bar in bars if bar.panel == panel]
        errors = [[bar.value - bar.least for bar in shown], [bar.most - bar.value for bar in shown]]
        colors = [OURS if bar.is_ours else PEER for bar in shown]
        drawn = plot.barh(
            range(len(shown)), [bar.value for bar in shown], xerr=errors, color=colors, ecolor="#444444",
            error_kw={"elinewidth": 0.8},
        )  # fmt: skip
        plot.bar_label(
            drawn,
            [f"{bar.value:,.3g}" if bar.value < 1000 else f"{bar.value:,.0f}" for bar in shown],
            padding=4,
            fontsize=8,
        )
        plot.set_yticks(range(len(shown)), [bar.label for bar in shown], fontsize=9)
        plot.set_ylim(len(shown) - 0.4, -0.6)
        plot.set_xlim(0, 1.15 * max(bar.most for bar in shown))
        plot.xaxis.set_major_formatter(EngFormatter())
        plot.set_title(panel, fontsize=10, fontweight="bold", loc="left")
        plot.spines[["top", "right"]].set_visible(False)
    plots[-1].set_xlabel(unit)
    figure.savefig(path, dpi=120)
    return path
