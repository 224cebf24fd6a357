"""The progress of a run, from its records: a live bar on a terminal, lines of text elsewhere."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.text import Text

from everyformer.train.provenance import header

if TYPE_CHECKING:
    from everyformer.train.record import Callback

EVERY = 10.0  # seconds between lines of text
DECAY = 0.95  # of the moving averages
MIN_BAR = 8  # columns; a narrower bar is not drawn
GAP = "  "
COMPILED = {"no": "not compiled", "yes": "compiled", "graphs": "compiled, in CUDA graphs"}


@contextmanager
def show_progress(screen: Console) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yields a callback for the records of a run."""
    state = Progress()
    if screen.is_terminal and not screen.is_dumb_terminal:
        with Live(state, console=screen, refresh_per_second=8):
            yield _Printer(screen, state, live=True)
    else:
        yield _Printer(screen, state, live=False)


@contextmanager
def show_if(shown: bool) -> Iterator[tuple[Callback, ...]]:
    """Yields a callback that shows the progress on standard output, or none. Of several processes only the first shows it."""
    if not shown or os.environ.get("RANK", "0") != "0":
        yield ()
        return
    with show_progress(Console(highlight=False, markup=False, emoji=False)) as callback:
        yield (callback,)


class _Printer:
    def __init__(self, screen: Console, state: Progress, live: bool):
        self.screen, self.state, self.live, self.last = screen, state, live, 0.0
        self.printed = ""  # the last metrics

    def __call__(self, line: dict[str, Any]) -> None:
        kind = line["kind"]
        is_long = kind == "evaluating" and self.state.evaluating is None
        self.state.take(line)
        if kind == "begin":
            if not self.live and "provenance" in line:  # the output may become a log
                self.screen.print(header(line["provenance"]))
            left = line["steps"] - line["step"]
            text = f"{left:,} step{'s' * (left > 1)} left" if left > 0 else "no steps left; extend the run with --steps"
            for note in line.get("notes", ()):
                self.screen.print(note, style="yellow")
            self.screen.print(f"{line['parameters']:,} parameters, {text}{_tokens(line)}")
            if chosen := line.get("compilation"):
                self.screen.print(f"{COMPILED[chosen['mode']]}: {chosen['reason']}", style="dim")
            if line.get("changed"):
                self.screen.print(
                    f"the data differ from those before this step: {', '.join(line['changed'])}", style="yellow"
                )
        elif kind == "step":
            for text in line.get("kernels", ()):
                self.screen.print(text, style="yellow" if "mask" in text else "dim")
            if line["step"] == self.state.total:
                self.last = -math.inf
            self._print_state()
        elif kind == "evaluating":
            if is_long and line["final"]:
                self.screen.print(f"evaluating on {line['of']:,} held-out targets; Ctrl-C skips it", style="dim")
            self._print_state()
        elif kind in ("evaluate", "final"):
            self._print_metrics(line)
        elif kind == "skip":
            self.screen.print(f"step {line['step']} skipped: {line['reason']}", style="yellow")
        elif kind == "stop":
            self.screen.print(f"{line['reason']}: saving after this step; Ctrl-C again stops at once", style="yellow")
        elif kind == "end":
            for reason in (line.get("stopped"), line.get("early_stop")):
                if reason:
                    self.screen.print(f"stopped at step {line['step']}: {reason}", style="yellow")

    def _print_state(self) -> None:
        """In a pipe, print a line now and then."""
        if not self.live and time.monotonic() - self.last > EVERY:
            self.last = time.monotonic()
            self.screen.print(f"step {self.state}")

    def _print_metrics(self, line: dict[str, Any]) -> None:
        """Print the metrics and the sample, unless they have just been printed."""
        final, text = line["kind"] == "final", f"step {line['step']}  {metrics(line)}"
        if text != self.printed:
            self.screen.print(f"final, {text}" if final else text, style="bold" if final else None)
            self.printed = text
        if line.get("sample"):
            self.screen.print(_short(line["sample"]), style="dim", no_wrap=True, overflow="ellipsis")


class Progress:
    """The state of a run. It is drawn on one line if that fits with a bar, else on two."""

    def __init__(self) -> None:
        self.total = self.step = self.memory = self.seen = 0
        self.loss = self.targets = self.busy = 0.0  # moving averages: nats, targets per step, seconds per step
        self.first: tuple[int, float] | None = None  # the first step and its time
        self.seconds = 0.0
        self.metric, self.bytes = "", None
        self.valid: float | None = None
        self.evaluating: tuple[int, int] | None = None  # targets scored, and in all, while an evaluation runs
        self.now: float | None = None  # the training metric, if steps report it

    def take(self, line: dict[str, Any]) -> None:
        self.evaluating = (line["done"], line["of"]) if line["kind"] == "evaluating" else None
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
                decay = min(DECAY, 1 - 1 / self.seen)
                self.loss += (1 - decay) * (line["loss"] - self.loss)
                self.targets += (1 - decay) * (line["targets"] - self.targets)
                self.busy += (1 - decay) * (line["targets"] / line["rate"] - self.busy)

    @property
    def steps(self) -> str:
        return f"{self.step:,}/{self.total:,}"

    @property
    def numbers(self) -> list[str]:
        """Loss, metric and speed, as far as they are known; during an evaluation its progress."""
        if self.evaluating is not None:
            done, of = self.evaluating
            return [f"evaluating: {done:,}/{of:,} targets"]
        name = self.metric.replace("_per_", "/").replace("_", " ")
        valid = None if self.valid is None else f"{self.valid:.3f}"
        texts = []
        if self.seen:
            texts.append(f"loss {self.loss:.3f}")
        if self.seen and self.bytes:
            bits = self.loss / math.log(2) / self.bytes
            texts.append(f"{name} {bits:.3f}" + (f" (valid {valid})" if valid else ""))
        elif self.now is not None:
            texts.append(f"{name} {self.now:.3f}" + (f" (valid {valid})" if valid else ""))
        elif valid:
            texts.append(f"valid {name} {valid}")
        if self.seen:
            texts.append(f"{_many(self.targets / self.busy)} targets/s")
        return texts

    @property
    def memory_and_time(self) -> list[str]:
        """Memory, and the time left at the speed since the first step, which itself is slow."""
        texts = [_bytes(self.memory)] if self.seen else []
        if self.first is not None and self.first[0] < self.step < self.total:
            each = (self.seconds - self.first[1]) / (self.step - self.first[0])
            texts.append(f"{duration(each * (self.total - self.step))} left")
        return texts

    def __str__(self) -> str:
        return GAP.join([self.steps, *self.numbers, *self.memory_and_time])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if not self.total:
            return
        width, numbers = options.max_width, self.numbers
        if len(str(self)) + len(GAP) + MIN_BAR <= width:
            yield self._bar(str(self), options)
            return
        yield self._bar(GAP.join([self.steps, *self.memory_and_time]), options)
        while len(numbers) > 1 and len(GAP.join(numbers)) > width:
            numbers.pop()
        yield Text(GAP.join(numbers), no_wrap=True, overflow="ellipsis")

    def _bar(self, words: str, options: ConsoleOptions) -> Text:
        room = min(40, options.max_width - len(GAP) - len(words))
        if room < MIN_BAR:
            return Text(words, no_wrap=True, overflow="ellipsis")
        done = room * self.step // self.total
        full, empty = ("#", "-") if options.ascii_only else ("━", "━")
        return Text.assemble((full * done, "green"), (empty * (room - done), "bright_black"), GAP, words, no_wrap=True)


@contextmanager
def show_evaluation(screen: Console) -> Iterator[Callable[[int, int], None]]:
    """Yields a callback for the progress of one evaluation: a live line on a terminal, lines of text elsewhere."""
    live = screen.is_terminal and not screen.is_dumb_terminal
    status, started, last = screen.status("evaluating"), time.monotonic(), time.monotonic()

    def report(done: int, of: int) -> None:
        nonlocal last
        left = duration((time.monotonic() - started) * (of - done) / max(1, done))
        text = f"evaluating: {done:,}/{of:,} targets, {left} left"
        if live:
            status.update(text)
        elif time.monotonic() - last > EVERY:
            last = time.monotonic()
            screen.print(text)

    if live:
        with status:
            yield report
    else:
        yield report


def metrics(result: dict[str, Any]) -> str:
    """The metrics of an evaluation, and how they were computed, on one line: the split, the first metric with its interval, ..."""
    hidden = {"kind", "step", "seconds", "sample", "split", "low", "high", "targets_in_split"}
    shown: list[str] = []
    for name, value in result.items():
        if name in hidden or isinstance(value, list):
            continue
        text = f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
        if not shown and math.isfinite(result.get("low", math.nan)):
            text += f" (95% interval {result['low']:.4g} to {result['high']:.4g})"
        if name == "targets" and value < result.get("targets_in_split", value):
            text += f" of {result['targets_in_split']:,}"
        shown.append(f"{name.replace('_', ' ')} {text}")
    return (f"{result['split']}: " if "split" in result else "") + "  ".join(shown)


def _tokens(begin: dict[str, Any]) -> str:
    """The tokens of a step, by the settings that decide them; empty if the rows of a batch are no tokens."""
    batch, context = begin.get("batch"), begin.get("context")
    if batch is None or context is None:
        return ""
    most = "at most " if begin["pads"] else ""
    return f"; run.batch {batch} x task.context {context} = {most}{batch * context:,} tokens a step"


def _short(sample: str, lines: int = 6) -> str:
    """The first lines, with control characters replaced by dots."""
    rows = ["".join(c if c.isprintable() else "·" for c in row.expandtabs()) for row in sample.strip().splitlines()]
    return "\n".join(f"  | {row}" for row in rows[:lines]) + ("\n  | ..." if len(rows) > lines else "")


def _many(number: float) -> str:
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def _bytes(number: int) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def duration(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    if hours >= 48:
        return f"{hours / 24:.1f} days"
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"
