"""Which kernel each attention of a pass uses, and where one stores a mask or terms as large as all scores.

with record_kernels() as uses:
    network(token_BT)
describe(uses)                          # ["layers 1-2: tiled"]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import torch

from everyformer.attention.kernels import blocked, sdpa
from everyformer.attention.kernels.request import LONG, Request
from everyformer.attention.pattern import Causal, Full

_recorders: list[list[KernelUse]] = []


class KernelUse(NamedTuple):
    """The kernel of one attention. `dense` says why it stores a mask or terms over all pairs; empty if it does not."""

    kernel: str
    queries: int
    keys: int
    dense: str = ""


@contextmanager
def record_kernels() -> Iterator[list[KernelUse]]:
    """Yields a list to which each attention adds its kernel; those inside a graph of `torch.compile`, always sdpa or reference, do not."""
    uses: list[KernelUse] = []
    _recorders.append(uses)
    try:
        yield uses
    finally:
        _recorders.remove(uses)


def record(kernel: str, request: Request) -> None:
    """Add a use to the lists of all callers of `record_kernels`."""
    if torch.compiler.is_compiling() or not _recorders:
        return
    positions = request.context.positions
    use = KernelUse(kernel, positions.queries, positions.keys, _dense_reason(kernel, request))
    for uses in _recorders:
        uses.append(use)


def _dense_reason(kernel: str, request: Request) -> str:
    """Returns why a long attention stores as many numbers as there are pairs, or an empty string."""
    if request.context.positions.queries < LONG or kernel not in ("sdpa", "reference"):
        return ""
    if kernel == "reference":
        return "it stores all weights"
    if not sdpa.stores_mask(request):
        return ""
    if type(request.narrowed or request.pattern) in (Full, Causal):
        return "terms of the scores" if request.terms else "padding, or a cache"
    reason = blocked.unsupported_reason(request)
    return reason.partition(";")[0] if reason else "the pattern leaves too many pairs for a sparse kernel"


def describe(uses: Sequence[KernelUse], noun: str = "layer") -> list[str]:
    """Returns a line for each group of layers with the same kernel: "layers 1-12: tiled"."""
    groups: dict[KernelUse, list[int]] = {}
    for number, use in enumerate(uses, 1):
        groups.setdefault(use, []).append(number)
    lines = []
    for use, numbers in groups.items():
        text = f"{noun}{'s' * (len(numbers) > 1)} {_ranges(numbers)}: {use.kernel}"
        if use.dense:
            text += f", with a mask of {use.queries:,} x {use.keys:,} pairs ({use.dense})"
        lines.append(text)
    return lines


def _ranges(numbers: Sequence[int]) -> str:
    """Returns "1-3, 5" for 1, 2, 3, 5."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
