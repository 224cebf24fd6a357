"""Charts as SVG: lines and points over two axes, readable on a phone and in the dark."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

COLORS = ("#3b76af", "#d9772b", "#4c9a4c", "#b5485d", "#7b62a3", "#8a6d4f", "#c973a8", "#6f7f8f")
WIDTH, HEIGHT = 420, 280
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 12, 44  # margins
TICKS = 4

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """Points of one colour."""

    name: str
    points: Sequence[Point]
    color: int  # number of the colour
    line: bool = True
    faint: bool = False  # one of several that make a mean
    hollow: frozenset[int] = frozenset()  # points that are drawn as rings
    bars: Sequence[tuple[float, float]] = ()  # the interval of each point


def chart(series: Sequence[Series], x_label: str, y_label: str, log_x: bool = False) -> str:
    """Returns the SVG of a chart; a sentence if there is nothing to draw."""
    series = [one for one in series if one.points]
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for y in [*(y for _, y in one.points), *(end for bar in one.bars for end in bar)]]
    ys = [y for y in ys if math.isfinite(y)]
    if not xs or not ys:
        return "<p>There is nothing to draw yet.</p>"
    to_x, x_ticks = _axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, log_x)
    to_y, y_ticks = _axis(min(ys), max(ys), HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} against {escape(x_label)}">'
    ]
    for tick in y_ticks:
        y = to_y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(tick, y_ticks)}</text>')
    for tick in x_ticks:
        x = to_x(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_number(tick, x_ticks)}</text>'
        )
    for one in series:
        parts += _drawn(one, to_x, to_y)
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(12 {middle}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text></svg>'
    )
    return "\n".join(parts)


def legend(names: Sequence[str]) -> str:
    """The names in their colours, as HTML."""
    marks = [
        f'<span><i style="background:{COLORS[n % len(COLORS)]}"></i>{escape(name)}</span>'
        for n, name in enumerate(names)
    ]
    return f'<p class="legend">{" ".join(marks)}</p>'


Scale = Callable[[float], float]


def _drawn(one: Series, to_x: Scale, to_y: Scale) -> list[str]:
    color, parts = COLORS[one.color % len(COLORS)], list[str]()
    places = [(to_x(x), to_y(y)) for x, y in one.points if math.isfinite(y)]
    if one.line and len(places) > 1:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" stroke="{color}" class="{"faint" if one.faint else "line"}"/>')
    for (x, _), (low, high) in zip(one.points, one.bars, strict=False):
        if math.isfinite(low) and math.isfinite(high):
            place = f'{to_x(x):.1f}" x2="{to_x(x):.1f}'
            parts.append(
                f'<line x1="{place}" y1="{to_y(low):.1f}" y2="{to_y(high):.1f}" stroke="{color}" class="line"/>'
            )
    if not one.faint and (one.hollow or one.bars or len(places) < 2 or not one.line):
        for number, (x, y) in enumerate(places):
            fill = "none" if number in one.hollow else color
            parts.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{color}"><title>{escape(one.name)}</title></circle>'
            )
    return parts


def _axis(low: float, high: float, start: float, end: float, log: bool = False) -> tuple[Scale, list[float]]:
    """A map from values to places, and the ticks."""
    if log:
        power = math.log10

        def to_log(value: float) -> float:
            return start + (end - start) * (
                0.5 if high == low else 0.04 + 0.92 * power(value / low) / power(high / low)
            )

        count = max(1, round(math.log2(high / low) / TICKS))
        return to_log, [low * 2**n for n in range(0, round(math.log2(high / low)) + 1, count)]
    if high == low:
        low, high = low - abs(low or 1) * 0.05, high + abs(high or 1) * 0.05
    margin = 0.05 * (high - low)
    first, last = low - margin, high + margin
    step = _nice((last - first) / TICKS)
    ticks = [n * step for n in range(math.ceil(first / step), math.floor(last / step) + 1)]
    return lambda value: start + (end - start) * (value - first) / (last - first), ticks


def _nice(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return power * next(one for one in (1, 2, 2.5, 5, 10) if one * power >= step * 0.999)


def _number(value: float, ticks: Sequence[float]) -> str:
    """A tick as text, with as many digits as tell the ticks apart."""
    largest = max(map(abs, ticks))
    for size, unit in ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (2e3, "k")):
        if largest >= size:
            return f"{value / (1e3 if unit == 'k' else size):.3g}{unit}" if value else "0"
    return f"{value:.{3 if ticks[0] and ticks[-1] / ticks[0] > 2 else 4}g}"
