"""The runs and saved models that the page shows. The page names them by their names here, never by a path."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from everyformer.train.imported import is_published
from everyformer.train.saved_model import is_saved_model
from everyformer.train.trained import TrainedRun, load
from everyformer.value import nearest

LOADED = 3  # models that are kept in memory


@dataclass(frozen=True)
class Entry:
    """A folder with a run, a saved model, or a model of another library."""

    name: str
    folder: Path
    is_run: bool
    place: tuple[int, int]  # device and inode of the folder, which has several paths if links lead to it


class Library:
    """The runs in some folders. A folder that is no run itself stands for the runs in it, also for those that begin later."""

    def __init__(self, folders: Sequence[Path] = (), device: str = "auto"):
        self.folders, self.device, self.lock = [folder.expanduser() for folder in folders], device, threading.RLock()
        self.loaded: OrderedDict[tuple[str, int], TrainedRun] = OrderedDict()
        for folder in self.folders:
            if not folder.is_dir():
                raise ValueError(
                    f"there is no folder {folder}; give that of a run, of a saved model, or of several runs"
                )

    def check(self) -> None:
        """Raises ValueError if a folder has no run and no model."""
        for folder in self.folders:
            if not any(self._entries(folder)):
                raise ValueError(f"{folder} is neither a run nor a saved model, and has none in it; train one first")

    def entries(self) -> dict[str, Entry]:
        """The runs and models by name, as they are now."""
        found, seen = dict[str, Entry](), set[tuple[int, int]]()
        for folder in self.folders:
            for entry in self._entries(folder):
                if entry.place not in seen:
                    seen.add(entry.place)
                    found[_unused(entry.name, found)] = entry
        return found

    def entry(self, name: str) -> Entry:
        """Returns an entry. Raises ValueError if none has this name."""
        found = self.entries()
        if name not in found:
            raise ValueError(
                f"there is no run {name[:100]!r}; {nearest(name[:100], found) if found else 'none is open'}"
            )
        return found[name]

    def model(self, name: str) -> TrainedRun:
        """Returns the model of an entry at its last checkpoint, loaded at the first use. Hold `lock` while it computes."""
        with self.lock:
            folder = self.entry(name).folder
            checkpoints = folder / "checkpoints"
            key = (name, checkpoints.stat().st_mtime_ns if checkpoints.is_dir() else 0)
            if key not in self.loaded:
                self.loaded[key] = load(folder, device=self.device)
                while len(self.loaded) > LOADED:
                    self.loaded.popitem(last=False)
            self.loaded.move_to_end(key)
            return self.loaded[key]

    def _entries(self, folder: Path) -> Iterator[Entry]:
        if (entry := _read(folder)) is not None:
            yield entry
            return
        try:
            inside = [Path(one.path) for one in os.scandir(folder) if one.is_dir(follow_symlinks=False)]
        except OSError:  # deleted since the page was opened
            return
        for inner in sorted(inside):
            if (entry := _read(inner)) is not None:
                yield entry


def _read(folder: Path) -> Entry | None:
    is_run = (folder / "recipe.json").is_file()
    try:
        if not (is_run or is_saved_model(folder) or is_published(folder)):
            return None
        status = folder.stat()
    except OSError:
        return None
    name = (
        (folder.resolve() if folder.name in ("", "..") else folder)
        .name.encode("utf-8", "surrogateescape")
        .decode("utf-8", "replace")
    )
    return Entry(name, folder, is_run, (status.st_dev, status.st_ino))


def _unused(name: str, names: dict[str, Entry]) -> str:
    """The name, or with a number where another folder has it already."""
    candidates = (name if number == 1 else f"{name} ({number})" for number in range(1, len(names) + 2))
    return next(one for one in candidates if one not in names)
