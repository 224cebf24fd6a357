"""The data of a run: found again, moved, or changed since it began.

A checkpoint has a checksum of each split. Other data to evaluate on are fine, and said; training goes on with other training data
only if they are given explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from everyformer.data.files import read_json
from everyformer.task.task import TaskData
from everyformer.train.folder import resolve
from everyformer.train.recipe import Recipe
from everyformer.value import nearest


def with_data(recipe: Recipe, data: str | Path | None) -> Recipe:
    """Returns the recipe with other data, if they are given."""
    return recipe if data is None else resolve(replace(recipe, data=str(data)))


def check_classes(data: TaskData, folder: Path) -> None:
    """Raises ValueError if other data have a class that the run does not have: its outputs have no place for it."""
    saved = (read_json(folder / "classes.json") or {}).get("classes", ())
    for name in getattr(data, "classes", ()) if saved else ():
        if name not in saved:
            raise ValueError(
                f"the data have the class {name!r}, but {folder} was trained on others: {nearest(name, saved)}; leave these "
                "examples out, or start a new run with --init-from"
            )


def changed_splits(state: Mapping[str, Any], data: TaskData) -> tuple[str, ...]:
    """Returns the names of the splits that differ from those of a checkpoint; "data" if there are no splits."""
    if state["data"] == data.fingerprint:
        return ()
    saved, now = state.get("splits", {}), data.fingerprints
    return tuple(name for name in saved | now if saved.get(name) != now.get(name))


def describe_change(changed: tuple[str, ...]) -> str:
    """Says what differs, and what follows from it for an evaluation."""
    if not changed:
        return ""
    if "train" in changed or "data" in changed:
        what = "the data" if "data" in changed else f"the splits {', '.join(changed)}"
        return f"{what} differ from those that the run was trained on, so the held-out part may contain training data"
    return f"the split{'s' * (len(changed) > 1)} {', '.join(changed)} changed since the run began; train did not"
