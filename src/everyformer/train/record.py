"""Records: `records.jsonl` in the run's folder is the truth; the terminal, TensorBoard and wandb show it.

One JSON object a line: {"kind": "begin" | "step" | "evaluate" | "save" | "skip" | "stop" | "end", "step": ..., ...}.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

Listener = Callable[[dict[str, Any]], None]


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """What cannot be written to a run's folder is said with the remedy."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        kept = any(one.name.isdigit() for one in (folder / "checkpoints").glob("*"))
        remedy = (
            "go on from the last checkpoint, which is kept, with resume" if kept else "begin anew: it has no checkpoint"
        )
        first = "make it writable" if isinstance(error, PermissionError) else "make room there"
        raise ValueError(f"cannot write to {folder} ({error}); {first}, then {remedy}") from error


class Records:
    """Writes lines and tells the listeners. A run that goes on drops the lines after the step it goes on from."""

    def __init__(self, path: Path | None, listeners: tuple[Listener, ...] = (), after: int = 0):
        self.path, self.listeners, self.begun = path, listeners, time.time()
        if path is not None and path.exists():
            kept = [line for line in read(path) if line.get("step", 0) <= after]
            part = path.with_suffix(".part")
            with writing(path.parent):
                part.write_text("".join(json.dumps(line) + "\n" for line in kept))
                part.rename(path)

    def write(self, kind: str, step: int, **facts: Any) -> None:
        line = {"kind": kind, "step": step, "seconds": round(time.time() - self.begun, 3), **facts}
        if self.path is not None:
            with writing(self.path.parent), self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")
        for listener in self.listeners:
            listener(line)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a run; a last line cut off by a crash is left out."""
    for line in path.read_text().splitlines():
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return
