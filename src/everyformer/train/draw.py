"""The batches of a run, drawn ahead: a thread draws them and copies them to the device while the steps before are computed.

A batch is a function of (seed, step), so when it is drawn changes nothing. Data with a state, such as an agent's episodes, are drawn
when they are needed.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from everyformer.task.batch import Batch
from everyformer.task.task import TaskData
from everyformer.train.distributed import World
from everyformer.train.recipe import Run
from everyformer.train.schedule import batch_size


@dataclass(frozen=True)
class Drawn:
    """The rows of a batch that a process computes, and the number of targets of the whole batch."""

    rows: Batch
    size: int  # of the whole batch
    count: int
    copied: torch.cuda.Event | None = None


class Batches:
    """Draws the batches of a run, up to `ahead` steps before they are taken."""

    def __init__(self, data: TaskData, run: Run, world: World, ahead: int):
        self.data, self.run, self.world, self.ahead = data, run, world, ahead
        self.thread = ThreadPoolExecutor(1, "batches")  # starts with the first batch that is drawn ahead
        self.drawn: dict[int, Future[Drawn]] = {}
        self.stream = torch.cuda.Stream(world.device) if ahead and world.device.type == "cuda" else None

    def take(self, step: int) -> Drawn:
        """Returns the batch of a step, and begins to draw those of the next ones."""
        if not self.ahead:
            return self._draw(step)
        wanted = range(step, max(step + 1, min(step + 1 + self.ahead, self.run.steps)))
        self.drawn = {
            one: self.drawn[one] if one in self.drawn else self.thread.submit(self._draw, one) for one in wanted
        }
        drawn = self.drawn.pop(step).result()
        if drawn.copied is not None:
            stream = torch.cuda.current_stream(self.world.device)
            stream.wait_event(drawn.copied)
            for x in (*drawn.rows.tensors.values(), *(drawn.rows.shared or {}).values()):
                x.record_stream(stream)  # its memory is used again only when the step is done
        return drawn

    def close(self) -> None:
        """Stop drawing."""
        self.thread.shutdown(wait=False, cancel_futures=True)
        self.drawn = {}

    def _draw(self, step: int) -> Drawn:
        size = batch_size(self.run, step)
        batch = self.data.batch(step, size, self.run.seed)
        rows, count = self.world.local_rows(batch), self.data.count(batch)
        if self.stream is None:
            return Drawn(rows, size, count)
        with torch.cuda.stream(self.stream):
            return Drawn(rows.to(self.world.device), size, count, self.stream.record_event())
