"""Evaluating a language model: bits, with the window and the stride stated.

Every target is scored once, from a window of at most `window` tokens that moves by `stride`:
    stride = window      windows do not overlap: the first targets of each have little context
    stride = window / 2  every target has at least half a window before it
    stride = 1           every target has the full window before it (source B's evaluation), at `window` times the cost
The first targets of the text have only what is there; the last window ends with the text. No window is padded.

A model with a memory reads on instead, segment by segment: every token is read once, and what was computed for those before
is used again (Dai et al. 2019), where a window of stride 1 would compute all of it anew for each token. A long text is read in
several rows side by side, each of which begins a little before its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Probe
from everyformer.infer.generate import language_head
from everyformer.network.cache import Cache
from everyformer.network.network import Network, evaluating
from everyformer.network.output_head import Language, vocabulary_size

LOGITS = 1 << 26  # in one call, unless a batch is asked for: a quarter of a GiB of them in float32
WINDOWS = 32  # in one call on a CPU, where more are no faster
ROWS = 32  # of a text read on side by side, at most
LEAD = 256  # tokens that a row reads before its own, at least
WATCHED = 512  # tokens of a text that a model is watched with, at most


@torch.no_grad()
def nats(
    network: Network,
    token_N: NDArray[Any],
    window: int,
    stride: int,
    *,
    batch: int | None = None,
    kernel: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, int]:
    """The sum of -log p over the targets token_N[1:], and how many there are.

    `batch` is how many windows are read in one call (None: as many as there is room for their logits, on a CPU at most
    32). `progress` is told after each call how many targets are scored, of how many. Use autocast around it for another
    precision.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"a stride of {stride} with a window of {window}: give 1 to {window}")
    if len(token_N) < 2:
        raise ValueError(f"{len(token_N)} tokens have no target to score; give at least 2")
    if batch is not None and batch < 1:
        raise ValueError(f"a batch of {batch} windows: give 1 or more, or None")
    number, device, count = language_head(network), next(network.parameters()).device, len(token_N) - 1
    window = min(window, count)
    room = LOGITS // (window * _vocabulary(network, number))
    batch = batch or max(1, min(WINDOWS, room) if device.type == "cpu" else room)
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(network):
        for end, windows, fresh in _calls(count, window, stride, batch):
            # The piece of text that the windows share goes to the device once; there they are views of it.
            piece = np.asarray(token_N[end - window : end + (windows - 1) * stride + 1]).astype(np.int64)
            token_BT = torch.from_numpy(piece).to(device).unfold(0, window + 1, stride)
            output = network(token_BT[:, :-1], kernel=kernel)
            total += _loss(output.logits_of(number)[:, -fresh:], token_BT[:, -fresh:])
            if progress is not None:
                progress(end + (windows - 1) * stride, count)
    return float(total), count


@torch.no_grad()
def streaming_nll(
    network: Network,
    token_N: NDArray[Any],
    segment: int,
    memory: int | None = None,
    *,
    rows: int = 1,
    lead: int = 0,
    kernel: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, int]:
    """The same for a model that remembers: `segment` tokens at a time, seen with `memory` positions before them.

    Without a memory length it is the model's own. A key cache serves: weights do not change here. With several `rows` as many
    parts of the text are read side by side; all but the first begin `lead` tokens earlier, which are not scored there.
    """
    if segment < 1 or len(token_N) < 2:
        raise ValueError(f"{len(token_N)} tokens in segments of {segment}: give at least 2, and segments of 1 or more")
    count = len(token_N) - 1
    lead = -(-lead // segment) * segment
    each = (count - lead) // rows // segment * segment
    if rows < 1 or (rows > 1 and each < 1):
        raise ValueError(f"{count} targets in {rows} rows with a lead of {lead}: give fewer rows, or 1")
    # Row r reads from r * each on; the last targets, that make no whole segments, are read on by one row.
    starts, ends = (np.arange(rows) * each, lead + each) if rows > 1 else (np.zeros(1, int), count)
    parts = [(starts, ends, lead if rows > 1 else 0, 1)]
    if rows > 1 and (done := lead + rows * each) < count:
        parts.append((np.array([done - lead]), lead + count - done, lead, 0))
    number, device = language_head(network), next(network.parameters()).device
    total, scored = torch.zeros((), dtype=torch.float64, device=device), 0
    with evaluating(network):
        if memory is not None and (distance := network.max_distance()) is not None:
            memory = min(memory, max(1, distance))  # no layer attends farther back
        for start_B, end, unscored, first in parts:
            cache = Cache(max_length=memory)
            for at in range(0, end, segment):
                size = min(segment, end - at)
                piece = np.stack([np.asarray(token_N[start + at : start + at + size + 1]) for start in start_B])
                token_BT = torch.from_numpy(piece.astype(np.int64)).to(device)
                output = network(token_BT[:, :-1], cache=cache, kernel=kernel)
                cache = output.cache
                counted = first if at < unscored else len(start_B)
                if counted:
                    total += _loss(output.logits_of(number)[:counted], token_BT[:counted, 1:])
                    scored += counted * size
                if progress is not None:
                    progress(scored, count)
    return float(total), count


def side_by_side(count: int, segment: int, memory: int) -> tuple[int, int]:
    """In how many rows a text is read on, and with how long a lead: so that leads are a small part of it."""
    lead = max(memory, LEAD)
    rows = min(ROWS, count // (ROWS * max(lead, segment)))
    return (rows, lead) if rows > 1 else (1, 0)


def _calls(count: int, window: int, stride: int, batch: int) -> Iterator[tuple[int, int, int]]:
    """For each call: where its first window ends, how many windows it has, and how many last targets of each are new."""
    yield window, 1, window
    regular = (count - window) // stride
    for first in range(1, regular + 1, batch):
        yield window + first * stride, min(batch, regular + 1 - first), stride
    if rest := (count - window) % stride:
        yield count, 1, rest


def _loss(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Summed in float64, from at least float32."""
    exact = torch.promote_types(logits_BTV.dtype, torch.float32)
    loss_N = F.cross_entropy(logits_BTV.flatten(0, 1).to(exact), target_BT.flatten(), reduction="none")
    return loss_N.double().sum()


def _vocabulary(network: Network, number: int) -> int:
    head = network.value.outputs[number]
    assert isinstance(head, Language)
    return head.vocabulary or vocabulary_size(network.value.embed)


def bits_per_byte(total: float, size: int) -> float:
    """Nats of a text of so many bytes, as bits per byte."""
    return total / math.log(2) / size


def perplexity(total: float, count: float) -> float:
    """e to the mean; infinite where that is past what a float can tell."""
    return math.inf if total / count > 709 else math.exp(total / count)


@torch.no_grad()
def probed(network: Network, token_N: NDArray[Any]) -> Probe:
    """What a model tells of itself while it reads the beginning of a text."""
    probe, most = Probe(), min(WATCHED, network.limit or WATCHED)
    token_T = torch.from_numpy(np.asarray(token_N[:most]).astype(np.int64))
    with evaluating(network):
        network(token_T.to(next(network.parameters()).device)[None], probe=probe)
    return probe
