"""Runs the jobs of a comparison in processes of their own, several at a time.

A server process imports the library once and forks a child for each job, so that a run starts at once, a crash ends only itself, and
the peak of its memory is its own. The server ends, and its children stop after a checkpoint, when its standard input is closed, which
the system does too if this process is killed.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from everyformer.study.compare.frozen import read
from everyformer.study.compare.jobs import Job, open_jobs
from everyformer.study.compare.run_job import read_outcomes, run_job
from everyformer.train.lock import InUse

LOG = "workers.log"
UNFINISHED = 3  # exit code of a child whose job was stopped, or runs in another process
WAIT = 0.2  # seconds between looks at the children


@dataclass
class Pool:
    """The server, and the jobs that its children run."""

    server: subprocess.Popen[bytes]
    devices: Sequence[str]  # one for each worker: the number of a GPU, or empty
    running: dict[str, str] = field(default_factory=dict)  # the device of each job
    unread: bytes = b""  # the start of an answer

    def start(self, job: Job) -> None:
        used = list(self.running.values())
        device = next(one for one in self.devices if self.devices.count(one) > used.count(one))
        self.running[job.name] = device
        self._send({"job": job.name, "device": device})

    @property
    def has_room(self) -> bool:
        return len(self.running) < len(self.devices)

    def ended(self) -> list[tuple[str, int]]:
        """The jobs that have ended since the last call, and the exit codes of their processes. Waits a moment."""
        assert self.server.stdout is not None
        ended = list[tuple[str, int]]()
        # Not by `readline`, which may take several answers from the pipe, where `select` then finds none.
        while select.select([self.server.stdout], [], [], WAIT if not ended else 0)[0]:
            piece = os.read(self.server.stdout.fileno(), 1 << 16)
            if not piece:
                raise ValueError(
                    f"the process that starts the runs ended with code {self.server.wait()}; give the same command again to go on, "
                    f"and see {LOG} for the reason"
                )
            *lines, self.unread = (self.unread + piece).split(b"\n")
            for reply in map(json.loads, lines):
                del self.running[reply["job"]]
                ended.append((reply["job"], reply["code"]))
        return ended

    def _send(self, message: dict[str, str]) -> None:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(message).encode() + b"\n")
        self.server.stdin.flush()


@contextmanager
def pool(folder: Path, devices: Sequence[str], imports: Sequence[str]) -> Iterator[Pool]:
    """A pool with one worker for each device. At the end its runs are saved and its processes have ended."""
    words = [sys.executable, "-m", "everyformer", "work", str(folder)]
    words += [word for name in imports for word in ("--import", name)]
    paths = [str(Path(__file__).parents[3]), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
    with (folder / LOG).open("ab") as log:
        server = subprocess.Popen(
            words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True
        )
    try:
        yield Pool(server, devices)
    finally:
        assert server.stdin is not None and server.stdout is not None
        with suppress(OSError):
            server.stdin.close()
        server.wait()
        server.stdout.close()


def serve(folder: Path) -> int:
    """The server process: forks a child for each line of standard input, and answers with its exit code."""
    frozen, replies = read(folder), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    children: dict[int, str] = {}
    unread, is_open = b"", True
    while is_open or children:
        if is_open and select.select([0], [], [], WAIT / 4)[0]:
            piece = os.read(0, 1 << 16)
            is_open, unread = bool(piece), unread + piece
            while b"\n" in unread:
                line, unread = unread.split(b"\n", 1)
                message = json.loads(line)
                known = read_outcomes(folder, {})
                job = next((one for one in open_jobs(frozen, known) if one.name == message["job"]), None)
                child = os.fork()
                if child == 0:
                    _child(folder, job, message["device"])
                children[child] = message["job"]
            if not is_open:
                for child in children:
                    with suppress(ProcessLookupError):
                        os.kill(child, signal.SIGTERM)
        elif not is_open:
            time.sleep(WAIT / 4)
        for child in list(children):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                reply = {"job": children.pop(child), "code": os.waitstatus_to_exitcode(status)}
                with suppress(BrokenPipeError):
                    replies.write(json.dumps(reply).encode() + b"\n")
    return 0


def _child(folder: Path, job: Job | None, device: str) -> None:
    """Run a job and end this process."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if device:
            os.environ["CUDA_VISIBLE_DEVICES"] = device
        code = 0 if job is None or run_job(read(folder), folder, job) else UNFINISHED
    except InUse:
        code = UNFINISHED
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
