"""The runs, as far as they are: their recipes, curves and samples, also while they train."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta, Struct

from everyformer.explore.answer import Answer, Ask
from everyformer.explore.inside import Name
from everyformer.explore.library import Entry, Library
from everyformer.explore.patterns import NoRequest
from everyformer.study.curves import Point, curves, smooth
from everyformer.train.lock import is_in_use
from everyformer.train.record import read
from everyformer.value import decode_json, flatten

POINTS = 800  # of a curve, at most
MAX_RUNS = 12  # whose curves are drawn together
SERIES = {"learning rate": "lr", "gradient norm": "norm", "memory": "memory", "targets per second": "rate"}
PATHS = ("data", "init_from")  # of a recipe: where files are on this machine


class CurvesRequest(Struct, forbid_unknown_fields=True):
    runs: Annotated[list[Name], Meta(max_length=MAX_RUNS)]


@dataclass(frozen=True)
class Log:
    """The records of a run, as they were when the file had this size and time."""

    stamp: tuple[int, int]
    lines: list[dict[str, Any]]


class Runs:
    """Answers what the view of runs asks, and the list of runs that all views show."""

    def __init__(self, library: Library):
        self.library, self.logs = library, dict[Path, Log]()
        self.asks = {
            "/api/runs": Ask(NoRequest, self.overview),
            "/api/runs/curves": Ask(CurvesRequest, self.curves),
            "/api/runs/recipes": Ask(CurvesRequest, self.recipes),
        }

    def overview(self, request: NoRequest) -> Answer:
        """The runs and models, with what is known of each without loading it."""
        return Answer({"runs": [self._about(name, entry) for name, entry in self.library.entries().items()]})

    def curves(self, request: CurvesRequest) -> Answer:
        """The curves of runs, each as an array of steps and one of values."""
        data, arrays = list[Any](), list[Any]()
        for name, folder in self._folders(request.runs):
            found = dict[str, Any]()
            try:
                lines = self._lines(folder)
                drawn = curves(lines)
            except (KeyError, TypeError) as error:
                raise ValueError(f"the records of {name} cannot be read: {error}; restore records.jsonl") from None
            points = {"train": smooth(drawn.train), "valid": drawn.valid, "final": drawn.final}
            steps = [line for line in lines if line["kind"] == "step"]
            for title, field in SERIES.items():
                points[title] = [(line["step"], line[field]) for line in steps if line.get(field) is not None]
            for title, some in points.items():
                if some:
                    found[title] = len(arrays)
                    arrays += _thinned(some)
            samples = [{"step": line["step"], "text": line["sample"]} for line in lines if line.get("sample")]
            last = lines[-1]["step"] if lines else 0
            data.append(
                {
                    "name": name,
                    "unit": drawn.unit,
                    "training": drawn.training,
                    "series": found,
                    "samples": samples[-20:],
                    "step": last,
                }
            )
        return Answer({"runs": data}, arrays)

    def recipes(self, request: CurvesRequest) -> Answer:
        """The settings in which the recipes differ, by path, and how many are equal."""
        leaves = [self._recipe(folder) for _, folder in self._folders(request.runs)]
        paths = list(dict.fromkeys(path for one in leaves for path in one))
        rows = [{"path": path, "values": [one.get(path) for one in leaves]} for path in paths]
        different = [row for row in rows if len(set(row["values"])) > 1]
        return Answer({"runs": request.runs, "different": different, "equal": len(rows) - len(different)})

    def _folders(self, names: list[str]) -> list[tuple[str, Path]]:
        """The folders of some runs, with their names."""
        entries = self.library.entries()
        return [(name, entries[name].folder if name in entries else self.library.entry(name).folder) for name in names]

    def _recipe(self, folder: Path) -> dict[str, str]:
        if not (folder / "recipe.json").is_file():
            return {}
        tree = _read_recipe(folder)
        tree |= {name: Path(tree[name]).name for name in PATHS if tree.get(name)}
        return {
            path: leaf if isinstance(leaf, str) else "none" if leaf is None else json.dumps(leaf)
            for path, leaf in flatten(tree)
        }

    def _about(self, name: str, entry: Entry) -> dict[str, Any]:
        about: dict[str, Any] = {"name": name, "is_run": entry.is_run, "state": "saved model"}
        try:
            if entry.is_run:
                lines = self._lines(entry.folder)
                recipe = _read_recipe(entry.folder)
                member = recipe["member"] if isinstance(recipe["member"], str) else "a model of your own"
                last = lines[-1] if lines else {"kind": "begin", "step": 0}
                about |= {
                    "member": member, "size": recipe.get("size"), "task": recipe["task"]["type"],
                    "step": last["step"], "steps": recipe["run"]["steps"], "state": _state(entry.folder, last),
                    "changed": last_change(entry.folder),
                }  # fmt: skip
        except (KeyError, TypeError) as error:
            about |= {
                "state": "cannot be read",
                "error": f"recipe.json or records.jsonl has no valid {error}; restore it",
            }
        except (ValueError, OSError) as error:
            about |= {"state": "cannot be read", "error": " ".join(str(error).split())[:300]}
        return about

    def _lines(self, folder: Path) -> list[dict[str, Any]]:
        file = folder / "records.jsonl"
        try:
            status = file.stat()
            stamp = (status.st_size, status.st_mtime_ns)
            if file not in self.logs or self.logs[file].stamp != stamp:
                self.logs[file] = Log(stamp, list(read(file)))
        except OSError:  # it is not there yet, or no more
            return []
        return self.logs[file].lines


def last_change(folder: Path) -> float:
    """The time at which a run was last written to, in seconds."""
    files = (folder / name for name in ("records.jsonl", "recipe.json"))
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def _read_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of a run as plain data. Raises ValueError if the file is none."""
    try:
        tree = decode_json((folder / "recipe.json").read_bytes())
    except (OSError, msgspec.MsgspecError) as error:
        raise ValueError(
            f"recipe.json of {folder.name} cannot be read: {error}; restore it from a checkpoint"
        ) from None
    if not isinstance(tree, dict):
        raise ValueError(f"recipe.json of {folder.name} is no recipe; restore it from a checkpoint")
    return tree


def _state(folder: Path, last: dict[str, Any]) -> str:
    if last["kind"] == "end":
        return "failed" if "error" in last else "ended"
    return "training" if is_in_use(folder) else "stopped"


def _thinned(points: list[Point]) -> list[Any]:
    """Steps and values of at most POINTS points: of each stretch its last."""
    chosen = points[:: -max(1, -(-len(points) // POINTS))][::-1]
    return [np.array([one[axis] for one in chosen], np.float32) for axis in (0, 1)]
