"""A training run in forked processes that can be interrupted at a chosen moment; see bench/kills.py."""

from __future__ import annotations

import mmap
import os
import select
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everyformer.task.language_inference import LanguageInference
from everyformer.train import checkpoint, loop
from everyformer.train.recipe import Recipe

COMMON = (
    "run.steps=8",
    "run.batch=4",
    "run.evaluate=4",
    "run.save=2",
    "run.examples=2",
    "run.device=cpu",
    "optim.ema=0.5",
)
SMALL = ("model.width=16", "model.heads=2", "model.layers=2", "model.dropout=0.1")
KINDS: dict[str, tuple[str, str | None, tuple[str, ...]]] = {  # member, task, settings
    "plain": ("byte-language", None, (*SMALL, "task.context=8", "task.tokenizer=bpe", "task.vocabulary=300")),
    "memory": ("transformer-xl", None, (*SMALL, "model.memory=8", "task.context=8")),
    "reversible": ("reformer", None, (*SMALL, "task.context=64", "model.axial_columns=8")),
    "halting": ("universal-transformer", None, ("model.width=16", "model.heads=2", "model.steps=3")),
    "recurrent": ("lstm", None, ("model.width=16", "task.context=8", "model.memory=1")),
    "agent": ("gtrxl", "recall", ("model.width=16", "model.heads=2", "model.layers=1", "model.memory=8",
                                  "task.copies=4", "task.segment=4", "task.epochs=2", "task.episodes=2")),
}  # fmt: skip
WAYS = {"one": 1, "ddp": 2, "fsdp": 2}  # processes
MOMENTS = ("data", "step", "save", "evaluate")
TIMEOUT = 120.0  # seconds after which a run counts as hanging
REFUSED, FAILED = 3, 4  # exit codes of a run: an error that the command line shows in one line, and any other


@dataclass(frozen=True)
class Trap:
    """Where a run is to be interrupted: in the n-th moment of a kind, in the process of this rank.

    With `lines`, the process kills itself after so many lines of Python, which hits the shortest moments too. Else it tells the
    parent, which waits for some time.
    """

    moment: str = ""
    count: int = 1
    rank: int = 0
    lines: int | None = None


@dataclass
class Place:
    """The folder of a trial, and what its runs have in common."""

    root: Path
    kind: str
    way: str
    port: Iterator[int]
    keep: int = 2
    save: int = 2
    output: Path = field(init=False)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True)
        self.root.chmod(0o755)
        (self.root / "cache").mkdir()
        (self.root / "cache").chmod(0o777)
        self.output = self.root / "output.txt"
        self.output.touch()
        self.output.chmod(0o666)

    @property
    def run(self) -> Path:
        return self.root / "run"


class Started:
    """The processes of a run. `moment` is what the trapped one is doing."""

    def __init__(self, place: Place, trap: Trap, prepare: Callable[[], None] | None = None, verb: str | None = None):
        self.shared = mmap.mmap(-1, 128)
        self.reached, write = os.pipe()
        world, port = WAYS[place.way], next(place.port)
        self.children = [self._fork(place, trap, rank, world, port, write, prepare, verb) for rank in range(world)]
        os.close(write)

    def _fork(self, place: Place, trap: Trap, rank: int, world: int, port: int, write: int, *rest: Any) -> int:
        child = os.fork()
        if child:
            return child
        code = FAILED
        try:
            os.close(self.reached)
            _child(place, trap, rank, world, port, write, self.shared, *rest)
            code = 0
        except (ValueError, OSError) as error:
            code = REFUSED
            print(f"error: {error}", flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    @property
    def moment(self) -> str:
        return self.shared[:16].rstrip(b"\0").decode() or "other"

    def wait_for_trap(self) -> bool:
        """Returns False if the run ended before it came to the trap."""
        ready, _, _ = select.select([self.reached], [], [], TIMEOUT)
        return bool(ready) and os.read(self.reached, 1) == b"x"

    def end(self, seconds: float = TIMEOUT) -> list[int]:
        """Wait for the processes, and kill them after some time. Returns their exit codes."""
        limit, codes = time.monotonic() + seconds, dict[int, int]()
        while len(codes) < len(self.children):
            for child in set(self.children) - codes.keys():
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > limit:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.002)
        os.close(self.reached)
        return [codes[child] for child in self.children]


def _child(
    place: Place, trap: Trap, rank: int, world: int, port: int, write: int, shared: mmap.mmap,
    prepare: Callable[[], None] | None, verb: str | None,
) -> None:  # fmt: skip
    """What a forked process does: train, or resume a run that has a recipe."""
    handle = os.open(place.output, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ["EVERYFORMER_CACHE"] = str(place.root / "cache")
    if world > 1:
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
        }
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    LanguageInference.sample = lambda *_: None  # type: ignore[method-assign]  # it takes most of the time
    if rank == trap.rank:
        _watch(trap, write, shared)
    os.close(write)
    if prepare is not None:
        prepare()
    verb = verb or ("resume" if (place.run / "recipe.json").is_file() else "train")
    loop.resume(place.run) if verb == "resume" else loop.train(recipe(place), place.run)


def _watch(trap: Trap, write: int, shared: mmap.mmap) -> None:
    """Note in shared memory what the process is doing, and the seconds and lines of each moment; stop at the trap."""
    write, counts = os.dup(write), Counter[str]()

    def watched(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            before, start = bytes(shared[:16]), time.perf_counter()
            shared[:16] = moment.encode().ljust(16, b"\0")
            counts[moment] += 1
            limit = None if trap.moment or counts[moment] > 1 else 1 << 60  # an uninterrupted run counts lines
            if (moment, counts[moment]) == (trap.moment, trap.count):
                limit = trap.lines
                if limit is None:
                    os.write(write, b"x")
            lines = _trace(limit)
            try:
                return function(*args, **options)
            finally:
                sys.settrace(None)
                shared[:16] = before
                offset = 16 + 16 * MOMENTS.index(moment)
                shared[offset : offset + 8] = np.float64(time.perf_counter() - start).tobytes()
                if counts[moment] == 1:
                    shared[offset + 8 : offset + 16] = np.float64(lines[0]).tobytes()

        return call

    loop._open = watched("data", loop._open)
    loop.Loop._step = watched("step", loop.Loop._step)  # type: ignore[method-assign]
    loop.Loop._evaluate = watched("evaluate", loop.Loop._evaluate)  # type: ignore[method-assign]
    checkpoint.save = watched("save", checkpoint.save)


def _trace(limit: int | None) -> list[int]:
    """Count the lines of Python from now on, and kill this process after so many. Returns the counter."""
    lines = [0]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        if event == "line":
            lines[0] += 1
            if limit is not None and lines[0] > limit:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    if limit is not None:
        sys.settrace(trace)
    return lines


def recipe(place: Place) -> Recipe:
    member, task, settings = KINDS[place.kind]
    shard = f"run.shard={str(place.way == 'fsdp').lower()}"
    data = None if task else place.root.parent / "text.txt"
    return Recipe.of(
        member,
        *COMMON,
        *settings,
        shard,
        f"run.keep={place.keep}",
        f"run.save={place.save}",
        size="tiny",
        task=task,
        data=data,
    )
