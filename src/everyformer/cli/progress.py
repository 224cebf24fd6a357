"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

EVERY = 10.0  # seconds between plain lines


@contextmanager
def watching(screen: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A listener of a run's records."""
    if screen.is_terminal:
        columns = (
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=screen) as bars:
            yield _Teller(screen, bars)
    else:
        yield _Teller(screen, None)


class _Teller:
    def __init__(self, screen: Console, bars: Progress | None):
        self.screen, self.bars, self.last, self.total = screen, bars, 0.0, 0
        self.bar: Any = None

    def __call__(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        if kind == "begin":
            self.total = line["steps"]
            self.screen.print(f"{line['parameters']:,} parameters, {line['steps'] - line['step']:,} steps to go")
            if self.bars:
                self.bar = self.bars.add_task("", total=line["steps"], completed=line["step"])
        elif kind == "step":
            text = f"loss {line['loss']:.3f}  {line['rate']:,.0f} targets/s  {line['memory'] / 2**20:,.0f} MiB"
            if self.bars:
                self.bars.update(self.bar, completed=line["step"], description=text)
            elif time.monotonic() - self.last > EVERY or line["step"] == self.total:
                self.last = time.monotonic()
                self.screen.print(f"step {line['step']}/{self.total}  {text}")
        elif kind == "evaluate":
            self.screen.print(f"step {line['step']}  {metrics(line)}")
            if line.get("sample"):
                self.screen.print(_short(line["sample"]), style="dim")
        elif kind == "skip":
            self.screen.print(f"step {line['step']} skipped: {line['reason']}", style="yellow")
        elif kind == "end" and line.get("stopped"):
            self.screen.print(f"stopped at step {line['step']}: {line['stopped']}", style="yellow")


def metrics(found: dict[str, Any]) -> str:
    """The numbers of an evaluation, and how they were computed, on one line."""
    hidden = {"kind", "step", "seconds", "sample"}
    shown = [
        f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in found.items()
        if name not in hidden
    ]
    return "  ".join(shown)


def _short(sample: str, lines: int = 6) -> str:
    rows = sample.strip().splitlines()
    return "\n".join(f"  | {row}" for row in rows[:lines]) + ("\n  | ..." if len(rows) > lines else "")
