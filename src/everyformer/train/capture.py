"""CUDA graphs of a step: what the CPU would launch kernel by kernel is recorded once and then launched as one.

A small model's step is mostly launches: the byte model of source B computes for 3.5 of the 7.9 ms that its gradients take.
Recorded is all from the batch to the norm of the gradients; the change of the weights is not, because whether there is
one depends on what the watch finds. A graph reads and writes always the same memory: a batch is copied into the
first one's, and gradients stay where they are instead of being dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from everyformer.network.model import EncoderDecoder, Model
from everyformer.task.work import Batch
from everyformer.train.recipe import Run

WARM = 3  # steps before recording, in which libraries choose their algorithms and take their memory
MOST = 8  # shapes of a batch; each has a graph and memory of its own

Descend = Callable[[Batch, Tensor | int], tuple[Tensor, Tensor]]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def unsupported_reason(run: Run, value: Model | EncoderDecoder, processes: int) -> str | None:
    """Why the work of a step is not the same each time."""
    if run.precision == "fp16":
        return "of run.precision=fp16, whose scale is looked at in each"
    if isinstance(value, Model) and value.memory:
        return "that goes on from the memory of the last"
    if isinstance(value, Model) and value.auxiliary is not None and value.auxiliary.every_layer:
        return "whose lower layers stop to count one after the other"
    return f"of {processes} processes, which wait for each other in it" if processes > 1 else None


@dataclass(frozen=True)
class Recorded:
    """One graph: where it reads, and where it writes."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    count: Tensor
    found: tuple[Tensor, Tensor]
    gradients: list[Tensor | None]


class Captured:
    """A function that leaves gradients on weights, recorded for each shape of its batch."""

    def __init__(self, descend: Descend, weights: Sequence[nn.Parameter], device: torch.device):
        self.backward, self.weights, self.device = descend, weights, device
        self.graphs: dict[Shapes, Recorded] = {}
        self.seen: dict[Shapes, int] = {}

    def __call__(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        shapes = tuple((name, tuple(x.shape)) for name, x in batch.tensors.items())
        self.seen[shapes] = self.seen.get(shapes, 0) + 1
        if len(self.seen) > MOST:
            raise ValueError(
                f"run.compile=graphs records a step for each shape of its batches, but there are more than {MOST}, the "
                f"last {dict(shapes)}; use run.compile=yes"
            )
        if self.seen[shapes] <= WARM:
            self._drop()
            return self._aside(batch.to(self.device), count)
        if shapes not in self.graphs:
            self.graphs[shapes] = self._record(batch, count)
        one = self.graphs[shapes]
        for name, x in batch.to(self.device).tensors.items():
            one.batch[name].copy_(x)
        one.count.fill_(count)
        one.graph.replay()
        for weight, gradient in zip(self.weights, one.gradients, strict=True):
            weight.grad = gradient
        return one.found

    def _aside(self, batch: Batch, count: int) -> tuple[Tensor, Tensor]:
        """As it is, on a stream of its own, as recording will be."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            found = self.backward(batch, count)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return found

    def _record(self, batch: Batch, count: int) -> Recorded:
        self._drop()  # so that the graph makes gradients of its own
        graph, still = torch.cuda.CUDAGraph(), batch.to(self.device)
        counted = torch.tensor(count, device=self.device)
        try:
            with torch.cuda.graph(graph):
                found = self.backward(still, counted)
        except RuntimeError as error:  # it looked at what the GPU had computed
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"run.compile=graphs could not record a step ({reason}); use run.compile=yes, in a new process: in this one "
                "PyTorch's random numbers on the GPU are of no more use"
            ) from error
        return Recorded(graph, still, counted, found, [weight.grad for weight in self.weights])

    def _drop(self) -> None:
        for weight in self.weights:
            weight.grad = None
