"""The progress of a comparison: a live table on a terminal, lines of text elsewhere."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from everyformer.study.compare.engine import Watcher
from everyformer.study.compare.freeze import EVALUATING, FINAL, START
from everyformer.study.compare.frozen import Entry, Frozen, Row
from everyformer.study.compare.jobs import Outcomes, score, search_runs, state
from everyformer.train.progress import duration

EVERY = 10.0  # seconds between lines of text
TAIL = 4096  # bytes at the end of records.jsonl


def whole_runs(frozen: Frozen) -> float:
    """The cost of an entry in whole runs, without trials beyond its range."""
    return search_runs(frozen.request.trials, frozen.shares, frozen.least) + len(frozen.seeds)


def entry_seconds(frozen: Frozen, entry: Entry) -> float:
    """The seconds that the runs of an entry take, as estimated before the first one."""
    jobs = len(frozen.seeds) + (len(frozen.shares) * frozen.request.trials * 0.6 if frozen.request.trials > 1 else 0)
    return whole_runs(frozen) * entry.steps * entry.seconds * (1 + EVALUATING + 2 * FINAL) + jobs * START


class Watch:
    """Follows the outcomes and the runs."""

    def __init__(self, frozen: Frozen, folder: Path, workers: int, screen: Console, live: Live | None):
        self.frozen, self.folder, self.workers, self.screen, self.live = frozen, folder, max(1, workers), screen, live
        self.begin, self.last = time.monotonic(), 0.0
        self.first: float | None = None  # the seconds that were done before
        self.told: set[str] = set()

    def __call__(self, outcomes: Outcomes, running: Sequence[str]) -> None:
        left = self.seconds_left(outcomes, running)
        for name in sorted(set(outcomes) - self.told):
            self.told.add(name)
            if outcomes[name]["status"] != "done":
                self.screen.print(
                    f"{name} {outcomes[name]['status']}: {outcomes[name]['reason']}", style="yellow", soft_wrap=True
                )
        if self.live is not None:
            self.live.update(self.table(outcomes, running, left))
        elif time.monotonic() - self.last > EVERY:
            self.last = time.monotonic()
            done = len(outcomes)
            runs = ", ".join(f"{name} {self._step(name)}" for name in running)
            self.screen.print(
                f"{done} run{'s' * (done != 1)} done; about {duration(left)} left; now {runs or 'waiting'}",
                soft_wrap=True,
            )

    def seconds_left(self, outcomes: Outcomes, running: Sequence[str]) -> float:
        """The time left, at the speed so far."""
        total, done = 0.0, 0.0
        for row in self.frozen.rows:
            for entry in row.entries:
                whole = entry_seconds(self.frozen, entry)
                total += whole
                share = self._share(row, entry, outcomes, running) / whole_runs(self.frozen)
                done += whole * min(1.0, share) if not state(self.frozen, row, entry, outcomes).is_done else whole
        self.first = done if self.first is None else self.first
        elapsed, progressed = time.monotonic() - self.begin, done - self.first
        rate = progressed / elapsed if progressed > 0.05 * total and elapsed > 0 else self.workers
        return max(0.0, total - done) / rate

    def _share(self, row: Row, entry: Entry, outcomes: Outcomes, running: Sequence[str]) -> float:
        """The steps that are done, in whole runs."""
        begin, furthest = f"{row.name}.{entry.name}.", dict[str, int]()
        for name in outcomes:
            if name.startswith(begin):
                run, until = name.removeprefix(begin).rsplit(".", 1)
                furthest[run] = max(furthest.get(run, 0), int(until))
        for name in running:
            if name.startswith(begin):
                run = name.removeprefix(begin).rsplit(".", 1)[0]
                furthest[run] = max(furthest.get(run, 0), self._last(name)[0])
        return sum(furthest.values()) / entry.steps

    def table(self, outcomes: Outcomes, running: Sequence[str], left: float) -> Group:
        """What each entry has reached."""
        table = Table(box=None, pad_edge=False)
        for title in ("data", "entry", "trials", "rate", "seeds", "now") if len(self.frozen.rows) > 1 else (
            "entry", "trials", "rate", "seeds", "now"
        ):  # fmt: skip
            table.add_column(
                title, no_wrap=True, overflow="ellipsis", min_width=0 if title in ("entry", "now") else len(title)
            )
        for row in self.frozen.rows:
            for entry in row.entries:
                now = state(self.frozen, row, entry, outcomes)
                begin = f"{row.name}.{entry.name}."
                some = {name.removeprefix(begin): one for name, one in outcomes.items() if name.startswith(begin)}
                seen = {name.split(".")[0] for name in some}
                runs = "  ".join(
                    f"{name.removeprefix(begin)} {self._step(name)}" for name in running if name.startswith(begin)
                )
                best = "" if now.chosen is None else now.trials[now.chosen][0].partition("=")[2]
                finals = [
                    one for name, one in some.items() if name.startswith("seed-") and score(row, one) < float("inf")
                ]
                cells = [entry.name, f"{sum(name.startswith('trial-') for name in seen)}/{len(now.trials)}", best]
                cells += [f"{len(finals)}/{len(self.frozen.seeds)}", "done" if now.is_done else runs]
                table.add_row(*([row.name] if len(self.frozen.rows) > 1 else []), *cells)
        return Group(table, Text(f"about {duration(left)} left; Ctrl-C stops, the same command goes on", style="dim"))

    def _step(self, name: str) -> str:
        step, loss = self._last(name)
        return f"{step}/{name.rsplit('.', 1)[1]}" + (f" loss {loss:.2f}" if loss is not None else "")

    def _last(self, name: str) -> tuple[int, float | None]:
        """The last step of a run, and its loss."""
        row, entry, run, _ = name.rsplit(".", 3)
        path = self.folder / "runs" / row / entry / run / "records.jsonl"
        try:
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - TAIL))
                lines = file.read().splitlines()
        except OSError:
            return 0, None
        for line in reversed(lines):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record["kind"] == "step":
                return record["step"], record["loss"]
        return 0, None


@contextmanager
def shown(frozen: Frozen, folder: Path, workers: int, progress: bool) -> Iterator[Watcher | None]:
    """Yields what is called with the outcomes; nothing without progress."""
    if not progress:
        yield None
        return
    screen = Console(highlight=False, markup=False, emoji=False, stderr=False)
    if screen.is_terminal and not screen.is_dumb_terminal:
        with Live(console=screen, refresh_per_second=4) as live:
            yield Watch(frozen, folder, workers, screen, live)
    else:
        yield Watch(frozen, folder, workers, screen, None)
