"""Listeners that draw a run's curves elsewhere: TensorBoard (event files in the run's folder) and Weights & Biases.

They show what `records.jsonl` says, each number of a step as train/NAME and of an evaluation as valid/NAME. A run that goes
on goes on with its curves: TensorBoard is told to drop what came after the step, wandb keeps it and is not told it twice.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from everyformer.train.recipe import Recipe
from everyformer.train.record import Listener, read

NEEDS = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check(names: Sequence[str], folder: Path | None) -> None:
    """Refuse, before anything is written, what cannot be served."""
    for name in names:
        if folder is None:
            raise ValueError(f"run.loggers={name} writes into the run's folder, but there is none; give one")
        try:
            import_module(NEEDS[name])
        except ImportError as error:
            raise ValueError(
                f"run.loggers={name} needs {NEEDS[name]}, which cannot be imported ({error}); pip install "
                f"'everyformer[{name}]', or leave run.loggers out"
            ) from None


def listen(recipe: Recipe, folder: Path, step: int) -> tuple[Listener, ...]:
    """The listeners that a recipe names. `step` is the one that the run goes on from."""
    kinds: dict[str, Callable[[Recipe, Path, int], Listener]] = {"tensorboard": TensorBoard, "wandb": Wandb}
    return tuple(kinds[name](recipe, folder, step) for name in recipe.run.loggers)


class TensorBoard:
    """Event files in `tensorboard/`, written at once: a killed run has lost none of them."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        target = folder / "tensorboard"
        target.mkdir(exist_ok=True)
        # Files are read in the order of their names, which begin with the second.
        self.file = EventsWriter(str(target / "events"), f".{step:08d}")
        begin = SessionLog(status=SessionLog.START)  # hides what an earlier session had from this step on
        self.file.write_event(Event(step=step + 1, wall_time=time.time(), session_log=begin))

    def __call__(self, line: dict[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar, text

        found = [scalar(name, number) for name, number in _numbers(line)]
        if line.get("sample"):
            found.append(text("sample", line["sample"].replace("\n", "  \n")))  # Markdown's line end
        for summary in found:
            self.file.write_event(Event(step=line["step"], wall_time=time.time(), summary=summary))
        if line["kind"] == "end":
            self.file.close()
        else:
            self.file.flush()


class Wandb:
    """A run of the project $WANDB_PROJECT, or everyformer; its id is in `wandb.txt`. WANDB_MODE=offline keeps it here."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        import wandb

        path, records = folder / "wandb.txt", folder / "records.jsonl"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:12] + "\n")
        self.told = {(line["kind"], line["step"]) for line in read(records)} if records.exists() else set()
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "everyformer"),
                id=path.read_text().strip(),
                resume="allow",
                name=folder.name,
                dir=str(folder),
                config=msgspec.to_builtins(recipe),
            )
        except Exception as error:
            raise ValueError(
                f"run.loggers=wandb: wandb does not begin ({error}); log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def __call__(self, line: dict[str, Any]) -> None:
        found: dict[str, Any] = dict(_numbers(line))
        if line.get("sample"):
            found["sample"] = line["sample"]
        if found and (line["kind"], line["step"]) not in self.told:
            self.run.log(found, step=line["step"])
        if line["kind"] == "end":
            self.run.finish()


def _numbers(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a step, and the metrics of an evaluation: whole numbers only say how it was computed."""
    side, kinds = {"step": ("train", (int, float)), "evaluate": ("valid", (float,))}.get(line["kind"], ("", ()))
    for name, value in line.items():
        if name not in ("step", "seconds") and isinstance(value, kinds):
            yield f"{side}/{name}", value
