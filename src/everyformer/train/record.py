"""Records: `records.jsonl` in a run's folder is the complete log; the terminal, TensorBoard and wandb show parts of it.

One JSON object per line: {"kind": "begin" | "step" | "skip" | "evaluate" | "final" | "save" | "stop" | "end", "step": ..., ...}.
"step" lines are written in order, on a GPU up to two steps late. The first "step" line after a start has the kernel of each layer.
A "skip" line has the reason why the step was skipped and the number of steps skipped so far; the "end" line has the final number.
All "evaluate" lines of a run are on the same examples, so that they make a curve; the "final" line, at the end, is on more.

Callbacks also get {"kind": "evaluating", "step": ..., "done": ..., "of": ...} during an evaluation, which is not written.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from everyformer.data.files import decode_utf8

Callback = Callable[[dict[str, Any]], None]  # called with each record


@contextmanager
def report_write_errors(folder: Path) -> Iterator[None]:
    """Raises ValueError with the remedy if a file cannot be written to a run's folder."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        saved = any(path.name.isdigit() for path in (folder / "checkpoints").glob("*"))
        remedy = "resume the run: its last checkpoint is intact" if saved else "start again: it has no checkpoint"
        refused = isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
        first = "make it writable" if refused else "free some space there"
        raise ValueError(f"cannot write to {folder} ({error}); {first}, then {remedy}") from error


class Records:
    """Writes records and calls the callbacks. A resumed run removes the records after the step that it resumes from.

    It also removes the records of this step of the kinds `again`, which it will write again.
    """

    def __init__(
        self, path: Path | None, callbacks: tuple[Callback, ...] = (), after: int = 0, again: tuple[str, ...] = ()
    ):
        self.path, self.callbacks, self.start_time = path, callbacks, time.time()
        if path is not None and path.exists():
            lines = [line for line in read(path) if line.get("step", 0) <= after - (line["kind"] in again)]
            part = path.with_suffix(".part")
            with report_write_errors(path.parent):
                part.write_text("".join(json.dumps(line) + "\n" for line in lines))
                part.rename(path)

    def write(self, kind: str, step: int, **fields: Any) -> None:
        """Write a record, and call the callbacks with it."""
        self.log(kind, step, **fields)
        self.tell(kind, step, **fields)

    def log(self, kind: str, step: int, **fields: Any) -> None:
        """Write a record that the callbacks do not get."""
        if self.path is not None:
            with report_write_errors(self.path.parent), self.path.open("a") as file:
                file.write(json.dumps(self._record(kind, step, fields)) + "\n")

    def tell(self, kind: str, step: int, **fields: Any) -> None:
        """Call the callbacks with a record that is not written."""
        for callback in self.callbacks:
            callback(self._record(kind, step, fields))

    def _record(self, kind: str, step: int, fields: dict[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "step": step, "seconds": round(time.time() - self.start_time, 3), **fields}


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a run, without a last line that a crash cut off."""
    for line in decode_utf8(path.read_bytes(), str(path), remedy="restore the file that train wrote").splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
