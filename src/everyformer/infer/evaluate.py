"""Evaluation of language models: the negative log-likelihood of a text, with a stated window and stride.

Every target is scored once, from a window of at most `window` tokens that moves by `stride`:
    stride = window      windows do not overlap: the first targets of each window have little context
    stride = window / 2  every target has at least half a window of context
    stride = 1           every target has a full window (the evaluation of Bloem 2019, source B), at `window` times the cost
The first targets of the text have shorter contexts; the last window ends with the text. No window is padded. Every window starts
anew: a model with a recurrent state but no segment memory starts from its initial state.

A model with a segment memory reads the text segment by segment instead: every token is read once and the cached states of
earlier segments are used again (Dai et al. 2019). The memory is empty at the first token and carried from segment to segment, over
the boundaries of documents too. A long text is split into rows that are read as one batch; all rows but
the first start some tokens early, to fill their memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Probe
from everyformer.attention.span import DynamicSpanModule, SpanModule
from everyformer.infer.generate import language_head
from everyformer.network.act import HaltingUnit
from everyformer.network.cache import Cache
from everyformer.network.network import Network, evaluating
from everyformer.network.output_head import Language, vocabulary_size

MAX_LOGITS = 1 << 26  # in one call by default: a quarter of a GiB in float32
MAX_CPU_WINDOWS = 32  # in one call on a CPU, where larger batches are not faster
MAX_ROWS = 32  # into which a text is split for streaming
MIN_LEAD = 256  # tokens that a row reads before its first target, at least
PROBED_TOKENS = 512  # at the beginning of a text, for adaptive spans and halting steps


@torch.no_grad()
def window_nll(
    network: Network,
    token_N: NDArray[Any],
    window: int,
    stride: int,
    *,
    batch: int | None = None,
    kernel: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> tuple[float, int]:
    """Returns the sum of -log p over the targets token_N[1:], in nats, and the number of targets.

    `batch` is the number of windows in one call (None: as many as MAX_LOGITS allows, on a CPU at most 32). `progress` is
    called after each batch with the number of targets scored so far and in all. Use autocast around it for another precision.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride is {stride} with a window of {window}: give a stride of 1 to {window}")
    if len(token_N) < 2:
        raise ValueError(f"{len(token_N)} tokens have no target to score; give at least 2")
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch} windows: give 1 or more, or None")
    head, device, count = language_head(network), next(network.parameters()).device, len(token_N) - 1
    window = min(window, count)
    fitting = MAX_LOGITS // (window * _vocabulary(network, head))
    batch = batch or max(1, min(MAX_CPU_WINDOWS, fitting) if device.type == "cpu" else fitting)
    total = torch.zeros((), dtype=torch.float64, device=device)
    with evaluating(network):
        for end, windows, new in _batches(count, window, stride, batch):
            # The text of all windows goes to the device once; the windows are views of it.
            piece = np.asarray(token_N[end - window : end + (windows - 1) * stride + 1]).astype(np.int64)
            token_BT = torch.from_numpy(piece).to(device).unfold(0, window + 1, stride)
            output = network(token_BT[:, :-1], kernel=kernel)
            total += _loss(output.logits_of(head)[:, -new:], token_BT[:, -new:])
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
    """Like `window_nll`, for a model with a segment memory: reads `segment` tokens at a time after `memory` cached positions.

    Default for `memory`: the model's own length. A key-value cache gives the same outputs here, because the weights do not
    change. With several `rows` the text is split into as many rows of one batch; all but the first row start `lead` tokens
    early, and these tokens are not scored in that row.
    """
    if segment < 1 or len(token_N) < 2:
        raise ValueError(
            f"{len(token_N)} tokens in segments of {segment}: give 2 tokens or more, and segments of 1 or more"
        )
    count = len(token_N) - 1
    lead = -(-lead // segment) * segment
    each = (count - lead) // rows // segment * segment
    if rows < 1 or (rows > 1 and each < 1):
        raise ValueError(f"{count} targets in {rows} rows with a lead of {lead}: give fewer rows, or 1")
    # Row r starts at r * each. The last targets, which do not fill whole segments, are read by one more row.
    starts, ends = (np.arange(rows) * each, lead + each) if rows > 1 else (np.zeros(1, int), count)
    parts = [(starts, ends, lead if rows > 1 else 0, 1)]
    if rows > 1 and (done := lead + rows * each) < count:
        parts.append((np.array([done - lead]), lead + count - done, lead, 0))
    head, device = language_head(network), next(network.parameters()).device
    total, scored = torch.zeros((), dtype=torch.float64, device=device), 0
    with evaluating(network):
        if memory is not None and (distance := network.max_distance()) is not None:
            memory = min(memory, max(1, distance))  # no layer attends farther back
        for start_B, end, unscored, scored_rows in parts:
            cache = Cache(max_length=memory)
            for offset in range(0, end, segment):
                size = min(segment, end - offset)
                piece = np.stack([np.asarray(token_N[start + offset : start + offset + size + 1]) for start in start_B])
                token_BT = torch.from_numpy(piece.astype(np.int64)).to(device)
                output = network(token_BT[:, :-1], cache=cache, kernel=kernel)
                cache = output.cache
                counted = scored_rows if offset < unscored else len(start_B)
                if counted:
                    total += _loss(output.logits_of(head)[:counted], token_BT[:counted, 1:])
                    scored += counted * size
                if progress is not None:
                    progress(scored, count)
    return float(total), count


def streaming_rows(count: int, segment: int, memory: int) -> tuple[int, int]:
    """Returns the number of rows and the lead for `streaming_nll`, such that the leads are a small part of the text."""
    lead = max(memory, MIN_LEAD)
    rows = min(MAX_ROWS, count // (MAX_ROWS * max(lead, segment)))
    return (rows, lead) if rows > 1 else (1, 0)


def _batches(count: int, window: int, stride: int, batch: int) -> Iterator[tuple[int, int, int]]:
    """Yields for each batch the end of its first window, its number of windows, and how many last targets of each are new."""
    yield window, 1, window
    regular = (count - window) // stride
    for first in range(1, regular + 1, batch):
        yield window + first * stride, min(batch, regular + 1 - first), stride
    if rest := (count - window) % stride:
        yield count, 1, rest


def _loss(logits_BTV: Tensor, target_BT: Tensor) -> Tensor:
    """Returns the sum of -log p in float64, from logits in float32 at least."""
    exact = torch.promote_types(logits_BTV.dtype, torch.float32)
    loss_N = F.cross_entropy(logits_BTV.flatten(0, 1).to(exact), target_BT.flatten(), reduction="none")
    return loss_N.double().sum()


def _vocabulary(network: Network, head: int) -> int:
    output_head = network.value.outputs[head]
    assert isinstance(output_head, Language)
    return output_head.vocabulary or vocabulary_size(network.value.embed)


def bits_per_byte(total: float, size: int) -> float:
    """Converts the nats of a text of `size` bytes to bits per byte."""
    return total / math.log(2) / size


def perplexity(total: float, count: float) -> float:
    """Returns e to the mean; infinite where a float overflows."""
    return math.inf if total / count > 709 else math.exp(total / count)


@torch.no_grad()
def probed(network: Network, token_N: NDArray[Any]) -> Probe:
    """Returns the probe of a forward pass over the beginning of a text."""
    probe, length = Probe(), min(PROBED_TOKENS, network.limit or PROBED_TOKENS)
    token_T = torch.from_numpy(np.asarray(token_N[:length]).astype(np.int64))
    with evaluating(network):
        network(token_T.to(next(network.parameters()).device)[None], probe=probe)
    return probe


def adaptive_metrics(network: Network, token_N: NDArray[Any]) -> dict[str, Any]:
    """Returns what a model with adaptive computation uses at the beginning of a text; empty for other models.

    `spans` is the mean attention span of every layer and head, and `span` their mean (Sukhbaatar et al. 2019); `steps_per_token`
    is the mean number of steps of a token before it halts (Graves 2016). Layers that are repeated count once per step.
    """
    adapts = (SpanModule, DynamicSpanModule, HaltingUnit)
    if not any(isinstance(module, adapts) for module in network.modules()):
        return {}
    probe, metrics = probed(network, token_N), dict[str, Any]()
    if probe.spans:
        spans_LH = [span_BHQ.mean((0, 2)) for span_BHQ in probe.spans]
        metrics |= {"span": float(torch.cat(spans_LH).mean()), "spans": [span_H.tolist() for span_H in spans_LH]}
    if probe.halts:
        metrics["steps_per_token"] = mean_steps(probe.halts)
    return metrics


def mean_steps(halts: Sequence[Tensor], visible_BT: Tensor | None = None) -> float:
    """Returns the mean number of steps with a weight above 0 of each token (in each layer)."""
    steps = torch.cat([(weight_BTN > 0).sum(-1) for weight_BTN in halts])
    return float((steps if visible_BT is None else steps[visible_BT]).float().mean())
