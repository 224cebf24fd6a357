"""A step that changes tensors in place, recorded as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Recorded(Generic[T]):
    """Records `step`, which reads and changes tensors at fixed addresses; `replay` computes it again and returns what it returned.

    `state` are the tensors that a step changes and the next one reads: recording leaves them as they are. Graphs with one `pool`
    share the memory of their intermediate results.
    """

    def __init__(self, step: Callable[[], T], state: Sequence[Tensor], pool: Any = None):
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            before = [x.clone() for x in state]
            for _ in range(2):  # programs are compiled and workspaces allocated before the recording
                step()
                for x, old in zip(state, before, strict=True):
                    x.copy_(old)
        with torch.cuda.graph(self.graph, pool=pool, stream=stream):
            self.output = step()
        current.wait_stream(stream)

    def replay(self) -> T:
        self.graph.replay()
        return self.output
