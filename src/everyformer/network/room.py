"""Buffers with free space at their end, so that appending to a cache copies nothing that was there.

    x_BKE, tail = appended((x_BKE,), (new_BTE,), axis=1, tail=tail)

A value is a view of a buffer up to its own length, and its tail says where the buffer goes on. Whoever appends to the last value
writes behind it and gets a longer view; older values do not change. Whoever appends to an older value, whose continuation is taken,
gets a copy. When a buffer is full, one of twice the length takes its place. Gradients need concatenation, because a buffer that
is written to again cannot be kept for a backward pass; so does code that is compiled, recorded or transformed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from everyformer.attention.has_data import is_recorded, is_transformed

FEWEST = 32  # positions in the smallest buffer


class Room:
    """Buffers of equal length, and the position from which on they are free."""

    def __init__(self, buffers: tuple[Tensor, ...], end: int):
        self.buffers, self._ends = buffers, {end: True}

    def take(self, end: int, count: int) -> bool:
        """Takes `count` positions after `end`. Returns False if they are taken already: of two threads one gets them."""
        if self._ends.pop(end, None) is None:
            return False
        self._ends[end + count] = True
        return True


@dataclass(frozen=True)
class Tail:
    """Where the buffers of a value go on."""

    room: Room
    end: int

    def take(self, new: tuple[Tensor, ...], axis: int) -> bool:
        """Takes the space for these tensors. Returns False if there is none."""
        count, first = new[0].shape[axis], self.room.buffers[0]
        fits = self.end + count <= first.shape[axis] and (torch.is_inference_mode_enabled() or not first.is_inference())
        return fits and self.room.take(self.end, count)


def appended(
    before: tuple[Tensor, ...], new: tuple[Tensor, ...], axis: int, tail: Tail | None
) -> tuple[tuple[Tensor, ...], Tail | None]:
    """Returns tensors with new positions at their end, and the tail of the result."""
    length, count = before[0].shape[axis], new[0].shape[axis]
    if torch.is_grad_enabled() or is_recorded() or is_transformed() or not _alike(before, new):
        return tuple(torch.cat(pair, dim=axis) for pair in zip(before, new, strict=True)), None
    if tail is None or not tail.take(new, axis):
        size = max(FEWEST, 2 * (length + count))
        buffers = tuple(x.new_empty(*x.shape[:axis], size, *x.shape[axis + 1 :]) for x in new)
        for buffer, x in zip(buffers, before, strict=True):
            buffer.narrow(axis, 0, length).copy_(x)
        tail = Tail(Room(buffers, length + count), length)
    start, end = tail.end - length, tail.end + count
    longer: list[Tensor] = []
    for buffer, x in zip(tail.room.buffers, new, strict=True):
        buffer.narrow(axis, tail.end, count).copy_(x)
        longer.append(buffer.narrow(axis, start, length + count))
    return tuple(longer), Tail(tail.room, end)


def _alike(before: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> bool:
    """Whether the tensors have the same dtypes and devices, so that the new ones can be written into the others' buffers."""
    return all(one.dtype == two.dtype and one.device == two.device for one, two in zip(before, new, strict=True))
