"""Loggers of a run's curves: TensorBoard (event files in the run's folder) and Weights & Biases.

They log the numbers of `records.jsonl`: those of a step as train/NAME, of an evaluation as valid/NAME, and of the final one,
which is on more examples, as final/NAME. A resumed run continues its curves: TensorBoard hides the events after the step that
it resumes from; wandb keeps them, so they are not logged again.
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
from everyformer.train.record import Callback, read

PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}


def check_loggers(names: Sequence[str], folder: Path | None) -> None:
    """Raises ValueError, before anything is written, if a logger cannot be used."""
    for name in names:
        if folder is None:
            raise ValueError(f"run.loggers={name} writes to the run's folder, but the run has none; give one")
        try:
            import_module(PACKAGES[name])
        except ImportError as error:
            raise ValueError(
                f"run.loggers={name} needs {PACKAGES[name]}, which cannot be imported ({error}); pip install "
                f"'everyformer[{name}]', or leave run.loggers out"
            ) from None


def make_loggers(recipe: Recipe, folder: Path, step: int) -> tuple[Callback, ...]:
    """Returns the loggers of a recipe. `step` is the step that the run resumes from."""
    kinds: dict[str, Callable[[Recipe, Path, int], Callback]] = {"tensorboard": TensorBoard, "wandb": Wandb}
    return tuple(kinds[name](recipe, folder, step) for name in recipe.run.loggers)


class TensorBoard:
    """Event files in `tensorboard/`, flushed after each record: a killed run loses none of them."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        target = folder / "tensorboard"
        target.mkdir(exist_ok=True)
        # TensorBoard reads files in the order of their names, which begin with the time in seconds.
        self.file = EventsWriter(str(target / "events"), f".{step:08d}")
        start = SessionLog(status=SessionLog.START)  # hides the events of earlier sessions after this step
        self.file.write_event(Event(step=step + 1, wall_time=time.time(), session_log=start))

    def __call__(self, record: dict[str, Any]) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.summary import scalar, text

        summaries = [scalar(name, number) for name, number in _numbers(record)]
        if record.get("sample"):
            summaries.append(text("sample", record["sample"].replace("\n", "  \n")))  # a line break in Markdown
        for summary in summaries:
            self.file.write_event(Event(step=record["step"], wall_time=time.time(), summary=summary))
        if record["kind"] == "end":
            self.file.close()
        else:
            self.file.flush()


class Wandb:
    """A run of the project $WANDB_PROJECT, or everyformer; its id is in `wandb.txt`. With WANDB_MODE=offline it stays local."""

    def __init__(self, recipe: Recipe, folder: Path, step: int):
        import wandb

        path, records = folder / "wandb.txt", folder / "records.jsonl"
        if not path.exists():
            path.write_text(uuid.uuid4().hex[:12] + "\n")
        self.logged = {(record["kind"], record["step"]) for record in read(records)} if records.exists() else set()
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
                f"run.loggers=wandb: wandb cannot start ({error}); log in with `wandb login`, or set WANDB_MODE=offline"
            ) from error

    def __call__(self, record: dict[str, Any]) -> None:
        numbers: dict[str, Any] = dict(_numbers(record))
        if record.get("sample"):
            numbers["sample"] = record["sample"]
        if numbers and (record["kind"], record["step"]) not in self.logged:
            self.run.log(numbers, step=record["step"])
        if record["kind"] == "end":
            self.run.finish()


def _numbers(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the numbers of a step, or the metrics of an evaluation, whose integers only describe how it was computed."""
    kind = record["kind"]
    prefix, types = {
        "step": ("train", (int, float)), "evaluate": ("valid", (float,)), "final": ("final", (float,)),
    }.get(kind, ("", ()))  # fmt: skip
    for name, value in record.items():
        if name not in ("step", "seconds") and isinstance(value, types):
            yield f"{prefix}/{name}", value
