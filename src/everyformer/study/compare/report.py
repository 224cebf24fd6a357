"""The report of a comparison: report.html (one file, without scripts), report.md and records.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from everyformer.study.compare.chart import COLORS, Series, chart, legend
from everyformer.study.compare.frozen import Entry, Frozen, Row
from everyformer.study.compare.jobs import rate
from everyformer.study.compare.table import Line, cells, head, plus_minus, records
from everyformer.train.checksums import write_file

STYLE = """
:root { color-scheme: light dark; --text: #1c1c1c; --back: #fff; --soft: #6b6b6b; --edge: #8884; }
@media (prefers-color-scheme: dark) { :root { --text: #e6e6e6; --back: #161616; --soft: #a0a0a0; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); }
body { max-width: 1320px; margin: 0 auto; padding: 16px; }
h1 { font-size: 1.5em; } h2 { font-size: 1.2em; margin-top: 2em; } h3 { font-size: 1em; margin-bottom: 0; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: 14px; white-space: nowrap; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--edge); text-align: right; } th:first-child, td:first-child { text-align: left; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 360px), 1fr)); gap: 16px; }
figure { margin: 0; } figcaption { color: var(--soft); font-size: 13px; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--edge); stroke-width: 0.7; } .line { fill: none; stroke-width: 2; }
.faint { fill: none; stroke-width: 1; opacity: 0.4; }
.legend span { margin-right: 14px; white-space: nowrap; } .legend i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: 8px; font-size: 13px; }
.better { color: #2c8a3d; } .worse { color: #c0433a; }
.note { color: var(--soft); }
"""


def write_report(frozen: Frozen, found: Sequence[Line], folder: Path) -> None:
    """Write the three files."""
    text = "".join(json.dumps(record) + "\n" for record in records(found))
    write_file(folder / "records.jsonl", text.encode())
    write_file(folder / "report.md", markdown(frozen, found).encode())
    write_file(folder / "report.html", html(frozen, found).encode())


def facts(frozen: Frozen) -> list[str]:
    """How the table was made, as sentences."""
    request = frozen.request
    budget = "" if request.budget is None else f" in a budget of {request.budget:g} s"
    shares = " and ".join(f"{share:g}" for share in frozen.shares[:-1])
    search = (
        f"Each entry has {request.trials} trials of its settings; the worse half ends after {shares} of the steps, while more than "
        f"{frozen.least} are left."
        if request.trials > 1
        else "No settings were searched over."
    )
    finals = [f"The figures are means over {len(frozen.seeds)} seeds with 95 % intervals."] if frozen.seeds else []
    matched = " and ".join(request.match)
    return [
        "" if matched == "none" else f"Equal in {matched} to {frozen.baseline}{budget}.",
        search,
        *finals,
        f"Machine: {frozen.machine}. Versions: {frozen.versions}. Commit {frozen.commit}, code {frozen.code}.",
    ]


def markdown(frozen: Frozen, found: Sequence[Line]) -> str:
    """The report as Markdown: tables, commands and what went wrong."""
    parts = ["# Comparison", "", " ".join(filter(None, facts(frozen))), ""]
    if len(frozen.rows) > 1:
        parts += [*_table_lines(profile(frozen, found)), ""]
    for row in frozen.rows:
        own = [line for line in found if line.row.name == row.name]
        parts += [f"## {row.name}", "", *row.notes]
        if frozen.seeds:
            parts += [*_table_lines([head(row), *map(cells, own)]), ""]
        for line in own:
            parts += [f"Trials of {line.entry.name}:", "", *_table_lines(sweep_cells(line)), ""]
            parts += [*(f"- {reason}" for reason in line.reasons), *([""] if line.reasons else [])]
        parts += ["```sh", *(line.command for line in own), "```", ""]
    return "\n".join(parts)


def _table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    first, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return [first, "| --- " * len(rows[0]) + "|", *rest]


def profile(frozen: Frozen, found: Sequence[Line]) -> list[list[str]]:
    """A line for each data set, a column for each entry."""
    names = [entry.name for entry in frozen.rows[0].entries]
    table = [["data", "metric", *names]]
    for row in frozen.rows:
        own = {line.entry.name: line for line in found if line.row.name == row.name}
        table.append([row.name, row.metric.replace("_", " "), *(plus_minus(own[name].result) for name in names)])
    return table


def sweep_cells(line: Line) -> list[list[str]]:
    """A table of the trials."""
    rows = [["trial", "settings", "steps", line.row.metric.replace("_", " "), ""]]
    for number, (settings, outcomes) in enumerate(line.trials, 1):
        last = outcomes[-1] if outcomes else None
        metric = "" if last is None or last["metric"] is None else f"{last['metric']:.4f}"
        state = "" if last is None or last["status"] == "done" else last["status"]
        steps = "" if last is None else f"{last['steps']:,}"
        rows.append([str(number), " ".join(settings), steps, metric, "chosen" if settings == line.chosen else state])
    return rows


def html(frozen: Frozen, found: Sequence[Line]) -> str:
    """The report as one page."""
    names = [entry.name for entry in frozen.rows[0].entries]
    title = f"Comparison of {', '.join(names)}" if len(names) > 1 else f"Search for {names[0]}"
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style><h1>{escape(title)}</h1>",
        *(f"<p>{escape(sentence)}</p>" for sentence in facts(frozen) if sentence),
    ]
    if len(frozen.rows) > 1:
        parts += ["<h2>Profile</h2>", _profile_html(frozen, found)]
    for row in frozen.rows:
        parts += _row_html(frozen, row, [line for line in found if line.row.name == row.name])
    return "\n".join(parts) + "\n"


def _row_html(frozen: Frozen, row: Row, own: list[Line]) -> list[str]:
    metric, names = row.metric.replace("_", " "), [line.entry.name for line in own]
    parts = [f"<h2>{escape(row.name)}</h2>", *(f'<p class="note">{escape(note)}.</p>' for note in row.notes)]
    if frozen.seeds:
        parts.append(_table_html([head(row), *map(cells, own)]))
    parts += [legend(names), '<div class="charts">']
    charts: list[tuple[str, str]] = []
    if frozen.seeds:
        charts += [
            (chart(curves(own, x_of), label, f"{metric}, valid"), f"Validation against {label}; faint: single seeds.")
            for label, x_of in (("tokens", _tokens), ("training FLOPs", _flops), ("seconds of training", None))
        ]
        charts += [
            (
                chart(pareto(own, cost), label, f"{metric}, {row.split}"),
                f"Quality against {label}; bars: 95 % intervals over seeds; the line: nothing is both cheaper and better.",
            )
            for label, cost in (("training FLOPs", "flops"), ("seconds of training", "seconds"))
        ]
    if frozen.request.trials > 1:
        caption = "The search: the metric of each trial at its last step; rings: ended early."
        charts.append((chart(sweep(own), "rate", f"{metric}, valid", log_x=True), caption))
    parts += [f"<figure>{svg}<figcaption>{escape(text)}</figcaption></figure>" for svg, text in charts]
    parts += ["</div>"]
    for line in own:
        parts.append(f"<h3>{escape(line.entry.name)}</h3>")
        parts += [f'<p class="note">{escape(reason)}</p>' for reason in line.reasons]
        parts += [_table_html(sweep_cells(line))] if frozen.request.trials > 1 else []
        parts.append(f"<pre>{escape(line.command)}</pre>")
    return parts


def _table_html(rows: Sequence[Sequence[str]]) -> str:
    def cell(text: str) -> str:
        return f'<td class="{text}">{text}</td>' if text in ("better", "worse") else f"<td>{escape(text)}</td>"

    first, *rest = rows
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rest)
    return (
        f'<div class="wide"><table><tr>{"".join(f"<th>{escape(name)}</th>" for name in first)}</tr>{body}</table></div>'
    )


def _profile_html(frozen: Frozen, found: Sequence[Line]) -> str:
    """The profile, with the best entry of each line in green and the others the paler the worse they are."""
    rows = profile(frozen, found)
    parts = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in rows[0])}</tr>"]
    for row, texts in zip(frozen.rows, rows[1:], strict=True):
        own = [line for line in found if line.row.name == row.name]
        values = [math.nan if line.result is None else line.result.mean for line in own]
        known = [value for value in values if math.isfinite(value)]
        worst = min if row.higher_is_better else max
        shades = [
            abs(value - worst(known)) / (max(known) - min(known))
            if math.isfinite(value) and max(known) > min(known)
            else 0.0
            for value in values
        ]
        shaded = [
            f'<td style="background:rgb(60 160 90 / {0.5 * shade:.2f})">{escape(text)}</td>'
            for shade, text in zip(shades, texts[2:], strict=True)
        ]
        parts.append(f"<tr><td>{escape(texts[0])}</td><td>{escape(texts[1])}</td>{''.join(shaded)}</tr>")
    return f'<div class="wide"><table>{"".join(parts)}</table></div>'


def _tokens(entry: Entry) -> float:
    return entry.tokens


def _flops(entry: Entry) -> float:
    return entry.flops


def curves(own: Sequence[Line], x_of: Callable[[Entry], float] | None) -> list[Series]:
    """The curve of each final run, and their mean. Without `x_of`, what a step costs, they are against seconds."""
    found: list[Series] = []
    for number, line in enumerate(own):
        each = [outcome["curve"] for outcome in line.finals.values() if outcome["status"] == "done"]
        runs = [
            [(step * x_of(line.entry) if x_of else seconds, value) for step, value, seconds in curve] for curve in each
        ]
        if len(runs) > 1:
            found += [Series(line.entry.name, run, number, faint=True) for run in runs]
        if runs:
            mean = [
                tuple(sum(axis) / len(runs) for axis in zip(*points, strict=True))
                for points in zip(*runs, strict=False)
            ]
            found.append(Series(line.entry.name, [(x, y) for x, y in mean], number))
    return found


def pareto(own: Sequence[Line], cost: str) -> list[Series]:
    """A point for each entry: what a run costs, and how good it is."""
    found = []
    for number, line in enumerate(own):
        x = line.mean("seconds") if cost == "seconds" else float(line.entry.flops * line.entry.steps)
        if line.result is not None and x is not None:
            bar = (line.result.low, line.result.high)
            found.append(Series(line.entry.name, [(x, line.result.mean)], number, bars=[bar]))
    sign = -1 if own[0].row.higher_is_better else 1
    front, best = list[tuple[float, float]](), math.inf
    for x, y in sorted(one.points[0] for one in found):
        if sign * y < best:
            best = sign * y
            front.append((x, y))
    return [Series("none is better and cheaper", front, len(COLORS) - 1, faint=True), *found]


def sweep(own: Sequence[Line]) -> list[Series]:
    """The trials of each entry by their rate."""
    found = []
    for number, line in enumerate(own):
        ended = [
            (rate(settings)[1], some[-1]) for settings, some in line.trials if some and some[-1]["metric"] is not None
        ]
        ended.sort(key=lambda pair: pair[0])
        hollow = frozenset(n for n, (_, one) in enumerate(ended) if one["steps"] < line.entry.steps)
        points = [(value, float(one["metric"])) for value, one in ended]
        found.append(Series(line.entry.name, points, number, line=False, hollow=hollow))
    return found
