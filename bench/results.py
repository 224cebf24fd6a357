"""Reads logs for the tables of docs/results (tables.py)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Rows = Sequence[Sequence[str]]  # the first is the head
Table = Callable[[str], Rows]
TABLES: dict[str, Table] = {}  # by name: from the text of a log


def table(name: str) -> Callable[[Table], Table]:
    def add(function: Table) -> Table:
        TABLES[name] = function
        return function

    return add


def json_lines(text: str) -> Iterator[dict[str, Any]]:
    yield from (json.loads(line) for line in text.splitlines() if line.startswith("{"))


def sections(text: str, mark: str = "== ") -> dict[str, str]:
    """The parts of a log that begin with a line of the mark and a name."""
    parts = re.split(rf"^{re.escape(mark)}(.*)$", text, flags=re.MULTILINE)
    return {
        name.partition(",")[0] if "commit" in name else name: body
        for name, body in zip(parts[1::2], parts[2::2], strict=True)
    }


def metric(text: str, name: str, *words: str) -> float:
    """The last value of a metric in the lines that have these words."""
    lines = [line for line in text.splitlines() if all(word in line for word in words)]
    return float(re.findall(rf"{name} (-?[\d.]+)", "\n".join(lines))[-1])


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def mean_range(numbers: Sequence[float], digits: int = 2) -> str:
    """The mean, with the smallest and the largest."""
    return f"{mean(numbers):.{digits}f} ({min(numbers):.{digits}f}-{max(numbers):.{digits}f})"


def render(rows: Rows) -> list[str]:
    head, *rest = rows
    return [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in (head, ["---"] * len(head), *rest)]
