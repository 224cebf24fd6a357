"""Runs a comparison to its end, from whatever its folder holds."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from everyformer.study.compare.frozen import Frozen
from everyformer.study.compare.jobs import Job, Outcome, Outcomes, open_jobs
from everyformer.study.compare.pool import UNFINISHED, WAIT, pool
from everyformer.study.compare.run_job import OUTCOMES, read_outcomes, run_job
from everyformer.train.checksums import write_file
from everyformer.train.lock import InUse

RETRY = 5.0  # seconds until a job is tried again that another process runs
Watcher = Callable[[Outcomes, Sequence[str]], None]  # called with the outcomes and the names of the running jobs


def run_all(frozen: Frozen, folder: Path, devices: Sequence[str], watch: Watcher | None = None) -> dict[str, Any]:
    """Run every job that has no outcome, and return the outcomes. Without devices the jobs run one after the other in this process."""
    outcomes = read_outcomes(folder, {})
    if next(open_jobs(frozen, outcomes), None) is None:
        return outcomes
    if not devices:
        return _run_here(frozen, folder, watch)
    later: dict[str, float] = {}
    with _terminable(), pool(folder, devices, frozen.request.imports) as workers:
        while True:
            outcomes = read_outcomes(folder, outcomes)
            waiting = [job for job in open_jobs(frozen, outcomes) if job.name not in workers.running]
            if not waiting and not workers.running:
                return outcomes
            for job in _longest_first(frozen, waiting):
                if workers.has_room and later.get(job.name, 0.0) <= time.monotonic():
                    workers.start(job)
            if watch is not None:
                watch(outcomes, list(workers.running))
            for name, code in workers.ended():
                if code == UNFINISHED:
                    later[name] = time.monotonic() + RETRY
                elif code:
                    _record_crash(folder, name, code)


def _run_here(frozen: Frozen, folder: Path, watch: Watcher | None) -> dict[str, Any]:
    outcomes: dict[str, Any] = {}
    while True:
        outcomes = read_outcomes(folder, outcomes)
        jobs = list(open_jobs(frozen, outcomes))
        if not jobs:
            return outcomes
        for job in jobs:
            if watch is not None:
                watch(outcomes, [job.name])
            with suppress(InUse):
                if not run_job(frozen, folder, job):
                    raise KeyboardInterrupt
                break
        else:  # other processes run all of them
            time.sleep(WAIT)


def _longest_first(frozen: Frozen, jobs: list[Job]) -> list[Job]:
    """The jobs with the most left to do come first, so that the last ones to run are short."""
    seconds = {(row.name, entry.name): entry.seconds for row in frozen.rows for entry in row.entries}
    return sorted(jobs, key=lambda job: -job.until * seconds[job.row, job.entry])


def _record_crash(folder: Path, name: str, code: int) -> None:
    """A process that ended without an outcome, as one that the system killed, is a failed run."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    memory = "; perhaps the machine has too little memory for so many runs at a time: lower --workers"
    path = folder / OUTCOMES / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    empty: Outcome = {"metric": None, "curve": [], "seconds": 0.0, "steps": 0, "memory": 0, "skipped": 0, "test": None}
    reason = f"its process {how}{memory if code == -signal.SIGKILL else ''}"
    write_file(path, json.dumps({"job": name, "status": "failed", "reason": reason, **empty}).encode())


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the comparison as Ctrl-C does: the runs are saved."""

    def stop(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def default_devices(device: str, workers: int | None) -> list[str]:
    """One worker for each CPU core; with CUDA one for each GPU, or as many as are asked for, in turn on each GPU."""
    import torch

    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return [""] * (cores if workers is None else workers)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return [gpus[number % len(gpus)] for number in range(len(gpus) if workers is None else workers)]
