"""Which runs a comparison has, and which come next: a function of what is frozen and of the outcomes so far.

The trials of an entry train for a quarter of the steps; the better half goes on to half of them, and again to the end, where at
least two are left (successive halving). A trial that goes on is the same run, resumed. If the best rate is the largest or the smallest
that was tried, a trial beyond it follows. The final runs have the settings of the best trial and new seeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from everyformer.study.compare.frozen import Entry, Frozen, Row, Settings

Outcome = Mapping[str, Any]  # of a job; see run_job.py
Outcomes = Mapping[str, Outcome]  # by the name of the job
RATES = ("optim.lr", "optim.muon_lr")


@dataclass(frozen=True)
class Job:
    """A run, up to a step."""

    row: str
    entry: str
    run: str  # trial-1 or seed-1
    until: int
    settings: Settings

    @property
    def path(self) -> str:
        """Of the run, under the folder of the comparison."""
        return f"runs/{self.row}/{self.entry}/{self.run}"

    @property
    def name(self) -> str:
        return f"{self.row}.{self.entry}.{self.run}.{self.until}"

    @property
    def is_final(self) -> bool:
        return self.run.startswith("seed-")


@dataclass(frozen=True)
class State:
    """Where the runs of an entry stand."""

    trials: tuple[Settings, ...]  # with those beyond the range
    open: tuple[Job, ...]  # can run now
    chosen: int | None  # the number of the best trial, once the search has ended
    failed: bool = False  # no trial came to its end

    @property
    def is_done(self) -> bool:
        return not self.open and (self.failed or self.chosen is not None)


def state(frozen: Frozen, row: Row, entry: Entry, outcomes: Outcomes) -> State:
    """Returns where an entry stands."""
    trials, open_jobs, best = _search(frozen, row, entry, outcomes)
    if open_jobs or best is None:
        return State(trials, open_jobs, None, failed=not open_jobs)
    jobs = final_jobs(frozen, row, entry, trials[best])
    return State(trials, tuple(job for job in jobs if job.name not in outcomes), best)


def final_jobs(frozen: Frozen, row: Row, entry: Entry, settings: Settings) -> list[Job]:
    """Returns the runs with new seeds."""
    return [
        Job(row.name, entry.name, f"seed-{seed}", entry.steps, (*settings, f"run.seed={seed}")) for seed in frozen.seeds
    ]


def open_jobs(frozen: Frozen, outcomes: Outcomes) -> Iterator[Job]:
    """Yields the jobs that can run now."""
    for row in frozen.rows:
        for entry in row.entries:
            yield from state(frozen, row, entry, outcomes).open


def _search(
    frozen: Frozen, row: Row, entry: Entry, outcomes: Outcomes
) -> tuple[tuple[Settings, ...], tuple[Job, ...], int | None]:
    """The trials, those that can run now, and the best one if none can."""
    trials, alive = list(entry.trials), list(range(len(entry.trials)))
    if len(trials) == 1:
        return tuple(trials), (), 0

    def job(number: int, until: int) -> Job:
        settings = (*trials[number], f"run.seed={frozen.search_seed}")
        return Job(row.name, entry.name, f"trial-{number + 1}", until, settings)

    for share in frozen.shares:
        jobs = [job(number, entry.until(share)) for number in alive]
        if missing := tuple(one for one in jobs if one.name not in outcomes):
            return tuple(trials), missing, None
        scores = {number: score(row, outcomes[one.name]) for number, one in zip(alive, jobs, strict=True)}
        alive = sorted((number for number in alive if scores[number] < math.inf), key=lambda one: (scores[one], one))
        if share < frozen.shares[-1]:
            alive = alive[: max(frozen.least, math.ceil(len(alive) / 2))]
    if not alive:
        return tuple(trials), (), None
    best = alive[0]
    for _ in range(frozen.wider):
        wider = _beyond(trials, best)
        if wider is None:
            break
        trials.append(wider)
        one = job(len(trials) - 1, entry.until(frozen.shares[-1]))
        if one.name not in outcomes:
            return tuple(trials), (one,), None
        scores[len(trials) - 1] = score(row, outcomes[one.name])
        best = min((best, len(trials) - 1), key=lambda number: scores[number])
    return tuple(trials), (), best


def score(row: Row, outcome: Outcome) -> float:
    """The metric of a run, lower is better; infinite if it diverged or failed."""
    if outcome["status"] != "done" or outcome["metric"] is None:
        return math.inf
    return float(-outcome["metric"] if row.higher_is_better else outcome["metric"])


def rate(settings: Settings) -> tuple[str, float]:
    """The path and the value of the rate of a trial."""
    values = dict(setting.split("=", 1) for setting in settings)
    path = next(path for path in reversed(RATES) if path in values)
    return path, float(values[path])


def _beyond(trials: list[Settings], best: int) -> Settings | None:
    """The settings of the best trial with a rate beyond those of all, if its own is the smallest or the largest of them."""
    path, value = rate(trials[best])
    others = sorted({rate(settings)[1] for settings in trials})
    place = others.index(value)
    if len(others) == 1 or 0 < place < len(others) - 1:
        return None
    neighbour = others[1] if place == 0 else others[-2]
    wider = f"{path}={value * value / neighbour:.3g}"
    return tuple(wider if setting.startswith(f"{path}=") else setting for setting in trials[best])


def search_runs(trials: int, shares: tuple[float, ...], least: int) -> float:
    """The cost of a search, in whole runs, without trials beyond the range."""
    if trials == 1:
        return 0.0
    total, alive, before = 0.0, trials, 0.0
    for share in shares:
        total, before = total + alive * (share - before), share
        alive = min(alive, max(least, math.ceil(alive / 2)))
    return total
