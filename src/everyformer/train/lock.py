"""The lock of a run's folder: one process writes there at a time.

The operating system releases the lock of a process that ends, however it ends. The file `lock` says who holds it, for the error
message, and for file systems on which one machine does not see the locks of another.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from everyformer.train.checksums import FILE
from everyformer.train.distributed import World
from everyformer.train.record import report_write_errors

LOCK = "lock"


def is_in_use(folder: Path) -> bool:
    """Returns whether a process writes to a folder, without taking its lock. One on another machine counts until its file is deleted."""
    with suppress(OSError):
        handle = os.open(folder / LOCK, os.O_RDONLY)
        try:
            owner = _read(handle)
        finally:
            os.close(handle)
        return owner is None or not _was_here(owner) or _is_alive(owner["process"])
    return False


class InUse(ValueError):
    """Another process writes to the folder."""


@contextmanager
def only_writer(folder: Path | None, world: World | None = None) -> Iterator[bool]:
    """Create a run's folder if needed, and lock it (in the main process). Yields whether a new run can be written there.

    It can if the folder is empty, or has only what a dead process left that started a run and had not yet written its recipe.
    Raises InUse if another process holds the lock. At the end the lock is removed, and the folder too if it is empty.
    """
    world = world or World()
    with ExitStack() as stack:
        with world.main_first():
            is_new = folder is not None and world.is_main and stack.enter_context(_locked(folder))
        yield is_new


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    folder.mkdir(parents=True, exist_ok=True)
    handle, is_new = _acquire(folder)
    try:
        yield is_new
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        os.close(handle)
        with suppress(OSError):  # it has files
            folder.rmdir()


def _acquire(folder: Path) -> tuple[int, bool]:
    """Returns the handle of the locked file, and whether a new run can be written to the folder."""
    path = folder / LOCK
    while True:
        with report_write_errors(folder):
            handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        visible = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _read(handle) or {}
            os.close(handle)
            raise InUse(
                f"{folder} is in use: process {owner.get('process', '?')} on {owner.get('host', '?')} writes there since "
                f"{owner.get('since', '?')}; wait until it ends, or stop it, or use another folder"
            ) from None
        except OSError:  # a file system without locks: only the content of the file counts
            visible = False
        if _is_same(handle, path):  # else its owner has just removed it
            break
        os.close(handle)
    previous = _read(handle)
    if previous is not None and not (visible and _was_here(previous)):
        os.close(handle)
        raise InUse(
            f"{folder} is locked by process {previous['process']} on {previous['host']} since {previous['since']}, which cannot be "
            f"seen from here; if it has ended, delete {path}"
        )
    with report_write_errors(folder):
        if previous and previous.get("new") and not (folder / "recipe.json").exists():
            for path in folder.iterdir():
                if path.suffix in (".json", ".part") or path.name == FILE:
                    path.unlink()  # of the dead process: the folder was empty before it
        is_new = not any(path.name != LOCK for path in folder.iterdir())
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(_owner() | {"new": is_new}).encode(), 0)
    return handle, is_new


def _owner() -> dict[str, Any]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    boot_id = boot.read_text().strip() if boot.is_file() else ""
    return {"process": os.getpid(), "host": platform.node(), "boot": boot_id, "since": since}


def _was_here(previous: dict[str, Any]) -> bool:
    """Whether a process that left its name in the file ran on this machine. Then it has ended, because the lock is free."""
    here = _owner()
    return previous.get("host") == here["host"] or (previous.get("boot") == here["boot"] != "")


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # that of another user
        pass
    return True


def _read(handle: int) -> dict[str, Any] | None:
    with suppress(ValueError):
        owner = json.loads(os.pread(handle, 4096, 0))
        if isinstance(owner, dict) and {"process", "host", "since"} <= owner.keys() and type(owner["process"]) is int:
            return owner
    return None


def _is_same(handle: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), path.stat())
    return False
