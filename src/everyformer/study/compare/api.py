"""`everyformer.compare`: from a request to the table, in a folder that holds the state."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from everyformer.study.compare import frozen as files
from everyformer.study.compare.engine import default_devices, run_all
from everyformer.study.compare.freeze import freeze
from everyformer.study.compare.frozen import Frozen
from everyformer.study.compare.report import write_report
from everyformer.study.compare.request import (
    Request,
    RowRequest,
    absolute_data,
    difference,
    read_entries,
    read_match,
    read_seconds,
)
from everyformer.study.compare.run_job import forget_failures
from everyformer.study.compare.show import shown
from everyformer.study.compare.table import Line, lines
from everyformer.study.suite import SUITES
from everyformer.value import nearest

OUT = "runs/compare"
WAIT = 0.5  # seconds between looks for compare.json, which the first process of torchrun writes
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Comparison:
    """The result of `compare`: `isinstance(everyformer.compare(out="runs/table"), Comparison)`.

    Its `lines` are those of the table; `comparison["lstm"].result.mean` is a figure of it. `folder` has its runs and reports,
    and `frozen` is what `compare.json` there recorded before the first run.
    """

    folder: Path
    frozen: Frozen
    lines: list[Line]

    def __getitem__(self, name: str) -> Line:
        """The line of an entry, on the first data."""
        return next(line for line in self.lines if line.entry.name == name)


def compare(
    *words: str,
    data: str | Path | None = None,
    size: str | None = None,
    task: str | None = None,
    match: str = "parameters",
    baseline: str | None = None,
    trials: int = 5,
    seeds: int = 3,
    budget: str | None = None,
    search: Sequence[str] = (),
    suite: str | None = None,
    imports: Sequence[str | Path] = (),
    out: str | Path = OUT,
    workers: int | None = None,
    progress: bool = False,
) -> Comparison:
    """Compare members fairly: `compare("gpt2", "lstm", "optim.warmup=20", size="tiny", budget="10m", out="runs/table")`.

    The words are members, .json files of models of your own, settings of all (run.batch=16) and of one (gpt2:model.layers=3). `data`,
    `size` and `task` are those of every entry, or `suite` names a set of problems. All get equal parameters, FLOPs a token, training
    FLOPs, memory or seconds (`match`) as the `baseline` (default: the first), the same number of `trials` of their settings, in which
    `search` tries more, and `seeds` final runs of the best of them. `budget` is the time of everything, such as 20m; without it run.steps
    decides. `imports` are files with parts of your own. Called again with the same `out`, the comparison continues; without words it
    takes them from there. `workers` run at a time, by default one on each core or GPU; with 0 the runs are in this process. With
    `progress` what happens is printed. Returns a `Comparison`, and writes its report into `out`.
    """
    request = None
    if words:
        request = make_request(
            words, data=data, size=size, task=task, match=match, baseline=baseline, trials=trials, seeds=seeds,
            budget=budget, search=search, suite=suite, imports=imports,
        )  # fmt: skip
    return run(request, Path(out), workers, progress)


def make_request(
    words: Sequence[str],
    *,
    data: str | Path | None = None,
    size: str | None = None,
    task: str | None = None,
    match: str = "parameters",
    baseline: str | None = None,
    trials: int = 5,
    seeds: int = 3,
    budget: str | None = None,
    search: Sequence[str] = (),
    suite: str | None = None,
    imports: Sequence[str | Path] = (),
) -> Request:
    """Returns the arguments of a comparison as one value. Raises ValueError if one is wrong."""
    entries = read_entries(words, size, search)
    names = [entry.name for entry in entries]
    if baseline is not None and baseline not in names:
        raise ValueError(f"the baseline {baseline!r} is no entry; {nearest(baseline, names)}")
    paths = [str(name) for name in imports]
    return Request(
        entries=entries,
        rows=(RowRequest(absolute_data(None if data is None else str(data))),)
        if suite is None
        else _suite(suite, data),
        task=task,
        match=read_match(match),
        baseline=baseline or names[0],
        trials=trials,
        seeds=seeds,
        budget=None if budget is None else read_seconds(budget),
        imports=tuple(str(Path(name).expanduser().absolute()) if name.endswith(".py") else name for name in paths),
    )


def _suite(name: str, data: str | Path | None) -> tuple[RowRequest, ...]:
    if data is not None:
        raise ValueError("a suite has its own data; give --data or --suite, not both")
    if name not in SUITES:
        raise ValueError(f"there is no suite {name!r}; {nearest(name, SUITES)}")
    return tuple(RowRequest(absolute_data(one), settings) for one, settings in SUITES[name])


def run(request: Request | None, folder: Path, workers: int | None = None, progress: bool = False) -> Comparison:
    """Start the comparison in a folder, or go on with it, and write its report."""
    rank, local_rank = _leave_launcher()
    if rank is not None and rank > 0:
        while not (folder / files.FILE).is_file():
            time.sleep(WAIT)
    frozen = start(request, folder, workers)
    device = frozen.rows[0].entries[0].recipe.run.device
    devices = default_devices(device, workers)
    if local_rank is not None and devices:
        devices = [devices[local_rank % len(devices)]]
    if not rank:
        forget_failures(folder)
    with shown(frozen, folder, len(devices), progress and not rank) as watch:
        outcomes = run_all(frozen, folder, devices, watch)
    comparison = Comparison(folder, frozen, lines(frozen, outcomes))
    if not rank:
        write_report(frozen, comparison.lines, folder)
    return comparison


def start(request: Request | None, folder: Path, workers: int | None) -> Frozen:
    """Returns what is frozen in the folder; freezes the request there if it is the first."""
    if not (folder / files.FILE).is_file():
        if request is None:
            raise ValueError(f"{folder} has no {files.FILE}; give the folder of a comparison, or members to start one")
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} is not empty and has no {files.FILE}; choose another folder with --out")
        frozen = freeze(request, planned_workers(request, workers))
        if files.write(frozen, folder):
            return frozen
    frozen = files.read(folder)
    _check_same(frozen, request, folder)
    return frozen


def planned_workers(request: Request, workers: int | None) -> int:
    """The number of workers for which runs are planned."""
    settings = dict(one.split("=", 1) for one in request.entries[0].settings)
    return max(1, len(default_devices(settings.get("run.device", "auto"), workers)))


def _check_same(frozen: Frozen, request: Request | None, folder: Path) -> None:
    """Raises ValueError with the difference if a comparison would go on as another one."""
    if request is not None and (found := difference(frozen.request, request)):
        raise ValueError(f"{folder} holds another comparison: {found}; choose another folder with --out")
    code = files.code_hash(frozen.request.imports)
    if code != frozen.code:
        raise ValueError(
            f"{folder} was frozen with other code: its hash is {code}, and was {frozen.code} (commit {frozen.commit}); go on with that "
            "code, or start in another folder with --out"
        )
    for row in frozen.rows:
        recipe = row.entries[0].recipe
        now = recipe.task.open(recipe.data).fingerprints
        changed = [split for split in {**row.fingerprints, **now} if row.fingerprints.get(split) != now.get(split)]
        if changed:
            raise ValueError(
                f"the data of {folder} have changed: {', '.join(changed)} of {row.name}; restore them, or start in another folder with "
                "--out"
            )


def _leave_launcher() -> tuple[int | None, int | None]:
    """The rank and local rank that torchrun gave, if it did. Its variables are removed: each run is one process of its own."""
    rank, local = (os.environ.get(name) for name in ("RANK", "LOCAL_RANK"))
    for name in [*LAUNCHER, *(one for one in os.environ if one.startswith("TORCHELASTIC_"))]:
        os.environ.pop(name, None)
    return (None, None) if rank is None else (int(rank), int(local or 0))
