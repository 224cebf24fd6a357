"""Interrupts training runs a thousand times, and compares what they resume to with runs that were not interrupted.

    OMP_NUM_THREADS=1 python -m bench.kills --kills 1000 --processes 16 --log docs/results/logs/kills.txt

A trial trains a tiny model of some kind (plain, with a segment memory, reversible, halting, recurrent, an agent) in one process or in
two (DDP, FSDP2; gloo), interrupts it one to three times, and then lets it end. An interruption is

    kill       SIGKILL while the data are opened, during a step, a save or an evaluation, after some lines of Python or some
               milliseconds; of two processes one is killed, and the other one ends or is killed too
    term       SIGTERM at such a moment
    full       a full disk: a limit on the size of files, or an fsync that fails
    readonly   a folder that the process may not write to
    two        a second training and a second resume in the same folder while the first is at such a moment; then SIGKILL

After each interruption every checkpoint is verified and compared with that of the uninterrupted run, and so are the last checkpoint
and all losses and metrics at the end: to the last bit in one process, with two to the rounding that is stated. Each line of the log
is a trial. The parent imports torch once and forks every run, so a trial takes about a second on one core.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from bench.forked_run import FAILED, KINDS, MOMENTS, REFUSED, TIMEOUT, WAYS, Place, Started, Trap
from everyformer.train import checkpoint
from everyformer.train.checksums import read_checksums
from everyformer.train.provenance import COMMIT, header, provenance
from everyformer.train.record import read

EVENTS = {"kill": 75, "term": 8, "full": 6, "readonly": 3, "two": 8}  # with weights
MODULES = (
    "torch._dynamo",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.device_mesh",
    "tokenizers",
    "gymnasium",
)
RTOL, ATOL = 1e-4, 1e-5  # of two processes, as in tests/train/test_distributed.py
STATE = ("model.safetensors", "optimizer.safetensors", "ema.safetensors", "cache.safetensors", "data.safetensors")


@dataclass
class Reference:
    """An uninterrupted run: its folder, and the seconds and lines of Python of each moment."""

    folder: Path
    seconds: dict[str, float]
    lines: dict[str, float]


def reference(kind: str, way: str, folder: Path, port: Iterator[int]) -> Reference:
    place = Place(folder / f"reference-{kind}-{way}", kind, way, port, keep=100, save=1)
    run = Started(place, Trap())
    if codes := [code for code in run.end() if code]:
        raise RuntimeError(f"the uninterrupted run {kind} {way} ended with {codes}:\n{place.output.read_text()}")
    seconds, lines = np.frombuffer(run.shared[16 : 16 + 16 * len(MOMENTS)], dtype=np.float64).reshape(-1, 2).T.tolist()
    return Reference(place.run, dict(zip(MOMENTS, seconds, strict=True)), dict(zip(MOMENTS, lines, strict=True)))


class Different(Exception):
    """What a run resumed to is not what it should be."""


def compare(place: Place, whole: Reference, steps: list[int]) -> str:
    """Verify and compare checkpoints. Returns equal or rounding. Raises Different if the difference is larger."""
    result = "equal"
    for step in steps:
        checkpoint.verify(place.run, step)
        mine, theirs = (checkpoint.path_of(folder, step) for folder in (place.run, whole.folder))
        sums, expected = read_checksums(mine), read_checksums(theirs)
        for name in (*STATE, "state.json"):
            if sums.get(name) == expected.get(name):
                continue
            if name == "state.json" and _same_state(mine / name, theirs / name):
                continue
            if place.way == "one" or name not in STATE:
                raise Different(f"{name} of step {step} differs")
            a, b = load_file(mine / name), load_file(theirs / name)
            if a.keys() != b.keys() or not all(np.allclose(a[key], b[key], rtol=RTOL, atol=ATOL) for key in a):
                raise Different(f"{name} of step {step} differs by more than rounding")
            result = "rounding"
    return result


def _same_state(mine: Path, theirs: Path) -> bool:
    """Whether two states are equal.

    A state whose evaluation SIGTERM aborted is left to the last checkpoint, before which the evaluation is made up for.
    """
    one, two = (json.loads(path.read_bytes()) for path in (mine, theirs))
    return one["unevaluated"] or one == two


def compare_records(place: Place, whole: Reference) -> None:
    """Compare the losses and metrics of all steps; each is there once."""
    mine, theirs = (
        [line for line in read(folder / "records.jsonl") if line["kind"] in ("step", "evaluate", "final")]
        for folder in (place.run, whole.folder)
    )
    if [(line["kind"], line["step"]) for line in mine] != [(line["kind"], line["step"]) for line in theirs]:
        raise Different("records.jsonl has other steps")
    for a, b in zip(mine, theirs, strict=True):
        for name in ("loss", "norm", "bits_per_byte", "return"):
            x, y = float(a.get(name, 0)), float(b.get(name, 0))
            if x != y and (place.way == "one" or abs(x - y) > ATOL + RTOL * abs(y)):
                raise Different(f"records.jsonl has another {name} in step {a['step']}: {x}, not {y}")


def interrupt(event: str, place: Place, whole: Reference, dice: random.Random) -> str:
    """Start or resume a run and interrupt it. Returns what happened."""
    if event in ("full", "readonly"):
        return _cannot_write(event, place, dice)
    moment = dice.choice(MOMENTS)
    count = 1 if moment == "data" else dice.randint(1, 2 if moment in ("save", "evaluate") else 4)
    lines = dice.randrange(1 + int(whole.lines[moment])) if event == "kill" and dice.random() < 0.6 else None
    trap = Trap(moment, count, dice.randrange(WAYS[place.way]), lines)
    run = Started(place, trap)
    if lines is None and run.wait_for_trap():
        time.sleep(dice.random() * whole.seconds[moment])
        if event == "term":
            return _terminate(run, place)
        victim = run.children[trap.rank]
        if event == "two":
            os.kill(victim, signal.SIGSTOP)
            trains = (place.run / "lock").is_file()  # else it has just ended
            event = event if trains else "kill"
            for verb in ("train", "resume") if trains else ():
                if verb == "train" or (place.run / "recipe.json").is_file():
                    _check_refused(Started(place, Trap(), verb=verb).end(), place, "is in use")
        where = run.moment
        for child in run.children:  # the other process waits for the killed one: it ends, or is ended
            if child == victim or dice.random() < 0.5:
                os.kill(child, signal.SIGKILL)
        _check_codes(run.end(5), place, {0, -signal.SIGKILL, FAILED, REFUSED})
        return f"{event}@{where}"
    codes = run.end(TIMEOUT if len(run.children) == 1 else 20)
    _check_codes(codes, place, {0, -signal.SIGKILL} | ({FAILED, REFUSED} if len(codes) > 1 else set()))
    return f"{event}@{moment if -signal.SIGKILL in codes else 'ended'}"


def _terminate(run: Started, place: Place) -> str:
    """SIGTERM to all processes, as torchrun sends it. A run in one process ends with a checkpoint once it trains."""
    where = run.moment
    for child in run.children:
        os.kill(child, signal.SIGTERM)
    several = len(run.children) > 1
    codes = run.end(20 if several else TIMEOUT)
    _check_codes(codes, place, {0, -signal.SIGTERM} | ({-signal.SIGKILL, FAILED, REFUSED} if several else set()))
    return f"term@{where}"


def _cannot_write(event: str, place: Place, dice: random.Random) -> str:
    if event == "readonly":
        with _read_only(place.run) as prepare:
            codes = Started(place, Trap(), prepare).end()
        _check_refused(codes, place, "make it writable")
        return "readonly@refused"
    limit, call = int(200 * 300 ** dice.random()), dice.randint(1, 40)
    codes = Started(place, Trap(), dice.choice((lambda: _limit_files(limit), lambda: _fail_fsync(call)))).end(20)
    if any(codes):
        _check_refused(codes, place, "cannot write to")
    return f"full@{'refused' if any(codes) else 'ended'}"


def _limit_files(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _fail_fsync(number: int) -> None:
    original, calls = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(handle)

    os.fsync = fsync  # type: ignore[assignment]


@contextmanager
def _read_only(folder: Path) -> Iterator[Callable[[], None] | None]:
    """Root may write anywhere, so it becomes another user; any other user takes the permission away."""
    if os.getuid() == 0:
        yield lambda: os.setuid(65534)
        return
    folders = [folder, *(path for path in folder.rglob("*") if path.is_dir())]
    for path in folders:
        path.chmod(0o555)
    try:
        yield None
    finally:
        for path in folders:
            path.chmod(0o755)


def _check_codes(codes: list[int], place: Place, allowed: set[int]) -> str:
    if not set(codes) <= allowed:
        raise Different(f"exit codes {codes}:\n{place.output.read_text()[-3000:]}")
    return ",".join(map(str, codes))


def _check_refused(codes: list[int], place: Place, reason: str) -> None:
    _check_codes(codes[:1], place, {REFUSED})
    if reason not in place.output.read_text():
        raise Different(f"the error does not say {reason!r}:\n{place.output.read_text()[-3000:]}")


def trial(
    number: int, cell: tuple[str, str], seed: int, whole: Reference, folder: Path, port: Iterator[int]
) -> dict[str, Any]:
    """Returns the line of the log."""
    dice, start = random.Random(f"{seed} {number}"), time.monotonic()
    place = Place(folder / f"trial-{number}", *cell, port)
    events, result, problem = list[str](), "equal", ""
    try:
        for _ in range(dice.randint(1, 3)):
            event = dice.choices(list(EVENTS), list(EVENTS.values()))[0]
            has_recipe = (place.run / "recipe.json").is_file()
            events.append(interrupt("kill" if event == "readonly" and not has_recipe else event, place, whole, dice))
            if compare(place, whole, checkpoint.steps(place.run)) == "rounding":
                result = "rounding"
            place.output.write_text("")
            if events[-1].endswith("@ended"):
                break
        _check_codes(Started(place, Trap()).end(), place, {0})
        if compare(place, whole, [checkpoint.find_step(place.run, None)]) == "rounding":
            result = "rounding"
        compare_records(place, whole)
        if left := [path.name for path in place.run.rglob("*") if path.name == "lock" or ".part" in path.name]:
            raise Different(f"left over: {left}")
        shutil.rmtree(place.root)
    except Exception as error:
        result, problem = "FAILED", f"{type(error).__name__}: {error}"
    line = {"trial": number, "kind": cell[0], "way": cell[1], "events": events, "result": result}
    return line | {"seconds": round(time.monotonic() - start, 2)} | ({"problem": problem} if problem else {})


def work(index: int, jobs: int, results: int, wholes: dict[tuple[str, str], Reference], cells: list[tuple[str, str]], seed: int,
         folder: Path) -> None:  # fmt: skip
    """A worker: read the numbers of trials from a pipe, and write their lines to another."""
    port = ports(index)
    while number := os.read(jobs, 4):
        cell = cells[int.from_bytes(number) % len(cells)]
        line = trial(int.from_bytes(number), cell, seed, wholes[cell], folder, port)
        os.write(results, json.dumps(line | {"problem": line.get("problem", "")[:3000]}).encode() + b"\n")


def ports(index: int) -> Iterator[int]:
    while True:
        yield from range(20000 + 500 * index, 20500 + 500 * index)


def kills(line: dict[str, Any]) -> int:
    return sum(event.startswith(("kill@", "two@")) and not event.endswith("@ended") for event in line["events"])


def campaign(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the lines of the trials, until enough runs have been killed."""
    (folder / "text.txt").write_text(
        "the quick brown fox jumps over the lazy dog; pack my box with five dozen jugs.\n" * 40
    )
    kinds = [kind for kind in options.kinds.split(",") if kind != "agent" or find_spec("gymnasium")]
    cells = [
        (kind, way) for way in options.ways.split(",") for kind in kinds if (kind, way) != ("agent", "fsdp")
    ]  # an agent is not sharded
    cells += [(kind, "one") for kind in kinds] * 2
    random.Random(options.seed).shuffle(cells)
    wholes = {cell: reference(*cell, folder, ports(options.processes)) for cell in dict.fromkeys(cells)}
    (take, jobs), (results, write) = os.pipe(), os.pipe()
    workers = list[int]()
    for index in range(options.processes):
        if (worker := os.fork()) == 0:
            os.close(jobs)
            with suppress(KeyboardInterrupt):
                work(index, take, write, wholes, cells, options.seed, folder)
            os._exit(0)
        workers.append(worker)
    done, number = 0, 0
    lines = os.fdopen(results)
    for _ in workers:
        os.write(jobs, number.to_bytes(4))
        number += 1
    for _ in iter(int, 1):
        line = json.loads(lines.readline())
        done += kills(line)
        yield line
        if done >= options.kills:
            break
        os.write(jobs, number.to_bytes(4))
        number += 1
    for _ in workers[1:]:  # the trials that are still running
        yield json.loads(lines.readline())
    os.close(jobs)
    for worker in workers:
        os.waitpid(worker, 0)


def summary(lines: list[dict[str, Any]]) -> list[str]:
    """The tables of docs/results/kills.md."""
    events = Counter(event for line in lines for event in line["events"])
    columns = (*MOMENTS, "other", "refused", "ended")
    table = ["| interruption | " + " | ".join(columns) + " |", "| --- " * (len(columns) + 1) + "|"]
    table += [
        f"| {event} | " + " | ".join(str(events[f"{event}@{name}"]) for name in columns) + " |" for event in EVENTS
    ]
    table += [
        "",
        "| kind | way | trials | killed | equal to the last bit | equal to rounding | failed |",
        "| --- " * 7 + "|",
    ]
    for kind, way in sorted({(line["kind"], line["way"]) for line in lines}):
        mine = [line for line in lines if (line["kind"], line["way"]) == (kind, way)]
        results = Counter(line["result"] for line in mine)
        counts = [len(mine), sum(map(kills, mine)), results["equal"], results["rounding"], results["FAILED"]]
        table.append(f"| {kind} | {way} | " + " | ".join(map(str, counts)) + " |")
    total = Counter(line["result"] for line in lines)
    killed = sum(map(kills, lines))
    return [*table, "", f"{len(lines)} trials, {killed} kills, {total['FAILED']} failures"]


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="runs to kill; the other interruptions come on top")
    parser.add_argument("--processes", type=int, default=1, help="trials at a time")
    parser.add_argument("--kinds", default=",".join(KINDS), help="agent needs gymnasium, and is left out without it")
    parser.add_argument("--ways", default=",".join(WAYS), help="one process, or two with DDP or FSDP2")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="a file for the lines that are printed")
    parser.add_argument("--folder", type=Path, help="where the runs are written; default: a new temporary folder")
    parser.add_argument(
        "--only-table", type=Path, metavar="LOG", help="print the tables of a log, for docs/results/kills.md"
    )
    options = parser.parse_args()
    if options.only_table:
        print("\n".join(summary(read_log(options.only_table))))
        return 0
    torch.set_num_threads(1)
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}  # neither survives a fork
    for name in MODULES:  # once, for all processes to come
        with suppress(ImportError):
            import_module(name)
    facts = provenance(options.seed)
    os.environ[COMMIT] = facts["commit"]
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kills-"))
    folder.chmod(0o755)
    log = options.log.open("w") if options.log else None

    def show(text: str) -> None:
        print(text, flush=True)
        if log:
            print(text, file=log, flush=True)

    show(header(facts))
    lines = []
    for line in campaign(options, folder):
        lines.append(line)
        show(json.dumps(line))
    show("\n".join(summary(lines)))
    failed = any(line["result"] == "FAILED" for line in lines)
    if not failed and options.folder is None:
        shutil.rmtree(folder)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
