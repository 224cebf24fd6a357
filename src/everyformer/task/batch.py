"""Batches as pure functions of (seed, step), and padding.

A resumed run, and a run on another number of processes, therefore sees exactly the batches of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from everyformer.data.tokenizer import Ids


@dataclass(frozen=True)
class Batch:
    """Named tensors with a common first axis, the rows of the batch."""

    tensors: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] | None = (
        None  # without that axis: the same for all rows, such as the edges of one graph
    )

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def rows(self, start: int, end: int) -> Batch:
        return Batch({name: x[start:end] for name, x in self.tensors.items()}, self.shared)

    def to(self, device: torch.device) -> Batch:
        def move(x: Tensor) -> Tensor:
            pinned = device.type == "cuda" and x.device.type == "cpu"
            return x.pin_memory().to(device, non_blocking=True) if pinned else x.to(device)

        return Batch(
            {name: move(x) for name, x in self.tensors.items()},
            None if self.shared is None else {name: x.to(device) for name, x in self.shared.items()},
        )


def step_generator(seed: int, step: int) -> torch.Generator:
    """Returns the random generator for the batch of a step."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))


def epoch_order(count: int, epoch: int, seed: int) -> Tensor:
    """Returns the order of the examples in an epoch."""
    return torch.randperm(count, generator=step_generator(seed, epoch))


def epoch_rows(count: int, first: int, size: int, seed: int) -> Tensor:
    """Returns the indices of the examples `first` to `first + size` of a run over shuffled epochs of `count` examples.

    As long as the batch size is constant, every epoch has each example exactly once.
    """
    number_B = torch.arange(first, first + size)
    row_B = torch.empty(size, dtype=torch.long)
    for epoch in range(first // count, (first + size - 1) // count + 1):
        in_epoch_B = number_B // count == epoch
        row_B[in_epoch_B] = epoch_order(count, epoch, seed)[number_B[in_epoch_B] % count]
    return row_B


def pad(rows: Sequence[Ids], multiple: int) -> tuple[Tensor, Tensor]:
    """Returns the rows as one batch, padded on the right, and which tokens are not padding.

    The length is rounded up to a multiple, so that there are few different shapes to compile.
    """
    length = -(-max(map(len, rows)) // multiple) * multiple
    token_BT = np.zeros((len(rows), length), dtype=np.int64)
    visible_BT = np.zeros((len(rows), length), dtype=bool)
    for row, ids in enumerate(rows):
        token_BT[row, : len(ids)], visible_BT[row, : len(ids)] = ids, True
    return torch.from_numpy(token_BT), torch.from_numpy(visible_BT)
