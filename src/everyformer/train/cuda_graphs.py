"""CUDA graphs of a training step: the kernels of a step are captured once and then launched as one graph.

A step of a small model is mostly launches: the byte model of Bloem 2019 (source B) computes for 3.5 of the 7.9 ms that its
gradients take. The capture covers the whole step, from the batch to the EMA of the weights: whether the step is skipped is decided on
the device. A graph always uses the same memory: each batch is copied into the captured one, and the learning rates are tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from everyformer.network.model import EncoderDecoder, Model
from everyformer.task.batch import Batch
from everyformer.train.recipe import Run

WARMUP_STEPS = 3  # before the capture, in which libraries choose algorithms and allocate workspaces
MAX_SHAPES = 8  # of a batch; each has its own graph and memory

Step = Callable[[Batch, Tensor | int], Tensor]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]


def unsupported_reason(run: Run, model: Model | EncoderDecoder, processes: int) -> str | None:
    """Returns why the steps of this run cannot be captured, or None."""
    if run.precision == "fp16":
        return "run.precision=fp16 keeps the state of its gradient scale on the host"
    if isinstance(model, Model) and model.memory:
        return "a segment memory carries a cache from step to step"
    if isinstance(model, Model) and model.auxiliary is not None and model.auxiliary.every_layer:
        return "the auxiliary losses of lower layers end during training"
    return f"the {processes} processes communicate in each step" if processes > 1 else None


@dataclass(frozen=True)
class CapturedGraph:
    """One graph with its inputs and its output."""

    graph: torch.cuda.CUDAGraph
    batch: Batch
    count: Tensor
    output: Tensor


class CudaGraphs:
    """A function that takes a training step, captured once for each shape of its batch."""

    def __init__(self, step: Step, device: torch.device):
        self.step, self.device = step, device
        self.graphs: dict[Shapes, CapturedGraph] = {}
        self.calls: dict[Shapes, int] = {}

    def __call__(self, batch: Batch, count: int) -> Tensor:
        shapes = tuple((name, tuple(x.shape)) for name, x in batch.tensors.items())
        self.calls[shapes] = self.calls.get(shapes, 0) + 1
        if len(self.calls) > MAX_SHAPES:
            raise ValueError(
                f"run.compile=graphs captures one graph for each shape of the batches, but there are more than {MAX_SHAPES}, the "
                f"last {dict(shapes)}; use run.compile=yes"
            )
        if self.calls[shapes] <= WARMUP_STEPS:
            return self._on_side_stream(batch.to(self.device), count)
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(batch, count)
        captured = self.graphs[shapes]
        for name, x in batch.to(self.device).tensors.items():
            captured.batch[name].copy_(x)
        captured.count.fill_(count)
        captured.graph.replay()
        return captured.output

    def _on_side_stream(self, batch: Batch, count: int) -> Tensor:
        """Run without a graph on a side stream, as the capture does."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            output = self.step(batch, count)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return output

    def _capture(self, batch: Batch, count: int) -> CapturedGraph:
        graph, batch = torch.cuda.CUDAGraph(), batch.to(self.device)
        static = Batch({name: x.clone() for name, x in batch.tensors.items()}, batch.shared)
        static_count = torch.tensor(count, device=self.device)
        try:
            # Another thread may copy the next batch meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                output = self.step(static, static_count)
        except RuntimeError as error:  # such as a synchronization with the CPU
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"run.compile=graphs could not capture a step ({reason}); use run.compile=yes, in a new process: a failed capture "
                "leaves PyTorch's CUDA random generator unusable"
            ) from error
        return CapturedGraph(graph, static, static_count, output)
