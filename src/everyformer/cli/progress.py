"""What a person sees of a run: a live bar on a terminal, plain lines elsewhere. All of it comes from the records."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

EVERY = 10.0  # seconds between plain lines
MEMORY = 0.95  # of what is smoothed
NARROW = 8  # a bar is not drawn narrower on a line with the numbers
GAP = "  "


@contextmanager
def watching(screen: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """A listener of a run's records."""
    state = Progress()
    if screen.is_terminal and not screen.is_dumb_terminal:
        with Live(state, console=screen, refresh_per_second=8):
            yield _Teller(screen, state, live=True)
    else:
        yield _Teller(screen, state, live=False)


class _Teller:
    def __init__(self, screen: Console, state: Progress, live: bool):
        self.screen, self.state, self.live, self.last = screen, state, live, 0.0

    def __call__(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        self.state.take(line)
        if kind == "begin":
            left = line["steps"] - line["step"]
            to_go = (
                f"{left:,} step{'s' * (left > 1)} to go" if left > 0 else "no step left to go; --steps takes it further"
            )
            self.screen.print(f"{line['parameters']:,} parameters, {to_go}")
        elif kind == "step":
            last = line["step"] == self.state.total
            if not self.live and (last or time.monotonic() - self.last > EVERY):
                self.last = time.monotonic()
                self.screen.print(f"step {self.state}")
            if last:
                self.screen.print("evaluating on all that is held out; Ctrl-C leaves it out", style="dim")
        elif kind == "evaluate":
            self.screen.print(f"step {line['step']}  {metrics(line)}")
            if line.get("sample"):
                self.screen.print(_short(line["sample"]), style="dim", no_wrap=True, overflow="ellipsis")
        elif kind == "skip":
            self.screen.print(f"step {line['step']} skipped: {line['reason']}", style="yellow")
        elif kind == "stop":
            self.screen.print(f"{line['reason']}: saving after this step; Ctrl-C again stops at once", style="yellow")
        elif kind == "end" and line.get("stopped"):
            self.screen.print(f"stopped at step {line['step']}: {line['stopped']}", style="yellow")


class Progress:
    """Where a run stands. Drawn on one line where there is room for all and a bar, else on two."""

    def __init__(self) -> None:
        self.total = self.step = self.memory = self.seen = 0
        self.loss = self.targets = self.busy = 0.0  # smoothed: nats, targets of a step, seconds of a step
        self.first: tuple[int, float] | None = None  # the first step seen, and when
        self.seconds = 0.0
        self.metric, self.bytes = "", None
        self.valid: float | None = None
        self.now: float | None = None  # the metric while training, where steps tell it

    def take(self, line: dict[str, Any]) -> None:
        if line["kind"] == "begin":
            self.total, self.step = line["steps"], line["step"]
            self.metric, self.bytes = line["metric"], line["bytes"]
        elif line["kind"] == "evaluate":
            self.valid = line.get(self.metric)
        elif line["kind"] == "step":
            self.step, self.memory, self.seconds = line["step"], line["memory"], line["seconds"]
            self.first = self.first or (self.step, self.seconds)
            self.now = line.get(self.metric, self.now)
            if math.isfinite(line["loss"]):
                self.seen += 1
                kept = min(MEMORY, 1 - 1 / self.seen)
                self.loss += (1 - kept) * (line["loss"] - self.loss)
                self.targets += (1 - kept) * (line["targets"] - self.targets)
                self.busy += (1 - kept) * (line["targets"] / line["rate"] - self.busy)

    @property
    def steps(self) -> str:
        return f"{self.step:,}/{self.total:,}"

    @property
    def numbers(self) -> list[str]:
        """Loss, metric and speed; what is not known yet is left out."""
        name = self.metric.replace("_per_", "/").replace("_", " ")
        valid = None if self.valid is None else f"{self.valid:.3f}"
        found = []
        if self.seen:
            found.append(f"loss {self.loss:.3f}")
        if self.seen and self.bytes:
            bits = self.loss / math.log(2) / self.bytes
            found.append(f"{name} {bits:.3f}" + (f" (valid {valid})" if valid else ""))
        elif self.now is not None:
            found.append(f"{name} {self.now:.3f}" + (f" (valid {valid})" if valid else ""))
        elif valid:
            found.append(f"valid {name} {valid}")
        if self.seen:
            found.append(f"{_many(self.targets / self.busy)} targets/s")
        return found

    @property
    def rest(self) -> list[str]:
        """Memory, and the time left at the pace since the first step seen, which is slow for reasons of its own."""
        found = [_bytes(self.memory)] if self.seen else []
        if self.first is not None and self.first[0] < self.step < self.total:
            each = (self.seconds - self.first[1]) / (self.step - self.first[0])
            found.append(f"{_duration(each * (self.total - self.step))} left")
        return found

    def __str__(self) -> str:
        return GAP.join([self.steps, *self.numbers, *self.rest])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.total:
            return
        width, numbers = options.max_width, self.numbers
        if len(str(self)) + len(GAP) + NARROW <= width:
            yield self._bar(str(self), options)
            return
        yield self._bar(GAP.join([self.steps, *self.rest]), options)
        while len(numbers) > 1 and len(GAP.join(numbers)) > width:
            numbers.pop()
        yield Text(GAP.join(numbers), no_wrap=True, overflow="ellipsis")

    def _bar(self, words: str, options: ConsoleOptions) -> Text:
        room = min(40, options.max_width - len(GAP) - len(words))
        if room < NARROW:
            return Text(words, no_wrap=True, overflow="ellipsis")
        done = room * self.step // self.total
        here, there = ("#", "-") if options.ascii_only else ("━", "━")
        return Text.assemble((here * done, "green"), (there * (room - done), "bright_black"), GAP, words, no_wrap=True)


def metrics(found: dict[str, Any]) -> str:
    """The numbers of an evaluation, and how they were computed, on one line."""
    hidden = {"kind", "step", "seconds", "sample"}
    shown = [
        f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"
        for name, value in found.items()
        if name not in hidden and not isinstance(value, list)
    ]
    return "  ".join(shown)


def _short(sample: str, lines: int = 6) -> str:
    """The first lines; what a terminal would obey instead of show becomes a dot."""
    rows = ["".join(c if c.isprintable() else "·" for c in row.expandtabs()) for row in sample.strip().splitlines()]
    return "\n".join(f"  | {row}" for row in rows[:lines]) + ("\n  | ..." if len(rows) > lines else "")


def _many(number: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def _duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
