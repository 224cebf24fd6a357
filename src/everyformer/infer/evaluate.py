"""Evaluation of language models: the negative log-likelihood of a text, with a stated window and stride.

Every target is scored once, from a window of at most `window` tokens that moves by `stride`:
    stride = window      windows do not overlap: the first targets of each window have little context
    stride = window / 2  every target has at least half a window of context
    stride = 1           every target has a full window (the evaluation of Bloem 2019, source B), at `window` times the cost
The first targets of the text have shorter contexts; the last window ends with the text. No window is padded. Every window starts
anew: a model with a recurrent state but no segment memory starts from its initial state. With a `limit` some of the windows are
scored, evenly spread over the text: each target then has the context that it has without the limit. The prefix of a prefix language
model is the part of a window that is not scored; a prefix of fixed length is never scored.

A model with a segment memory reads the text segment by segment instead: every token is read once and the cached states of
earlier segments are used again (Dai et al. 2019). The memory is empty at the first token and carried from segment to segment, over
the boundaries of documents too. A long text is split into rows that are read as one batch; all rows but
the first start some tokens early, to fill their memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everyformer.attention.context import Probe
from everyformer.attention.span import DynamicSpanModule, SpanModule
from everyformer.infer.estimate import Estimate
from everyformer.infer.prompts import fixed_prefix, language_head, prefix_inputs
from everyformer.network.act import HaltingUnit
from everyformer.network.cache import Cache
from everyformer.network.linear_cross_entropy import LogitMap
from everyformer.network.network import Network, evaluating
from everyformer.network.output_head import Language, vocabulary_size

MAX_LOGITS = 1 << 26  # in one call by default: a quarter of a GiB in float32
MAX_HIDDEN = 1 << 27  # numbers of a hidden state in one call by default, so that a GPU is busy for milliseconds
MAX_CPU_HIDDEN, MAX_CPU_WINDOWS = 1 << 22, 32  # the same, and windows, on a CPU, where larger batches are not faster
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
    limit: int | None = None,
    batch: int | None = None,
    kernel: str = "auto",
    estimate: Estimate | None = None,
) -> tuple[float, int]:
    """Returns the sum of -log p over the targets token_N[1:], in nats, and the number of targets.

    With a `limit` at most about so many targets are scored, of windows that are spread over the text. `batch` is the number of
    windows in one call (None: as many as MAX_HIDDEN allows, on a CPU at most 32). Logits are computed of the new targets of a window
    alone, in chunks. `estimate` collects the sums of the windows and reports the progress. Use autocast around it for another
    precision.
    """
    if not 1 <= stride <= window:
        raise ValueError(f"stride is {stride} with a window of {window}: give a stride of 1 to {window}")
    if len(token_N) < 2:
        raise ValueError(f"{len(token_N)} tokens have no target to score; give at least 2")
    if batch is not None and batch < 1:
        raise ValueError(f"batch is {batch} windows: give 1 or more, or None")
    head, device, count = language_head(network), next(network.parameters()).device, len(token_N) - 1
    window, estimate = min(window, count), Estimate() if estimate is None else estimate
    given = max(0, fixed_prefix(network) - 1)  # first targets of a window that are in its prefix
    if given and stride > window - given:
        raise ValueError(
            f"stride is {stride} with a window of {window}, but its first {given + 1} tokens are the model's prefix and are not predicted; "
            f"{f'give a stride of at most {window - given}' if window > given else 'give a longer window'}"
        )
    batch = batch or _fitting(window, network.value.width, device)
    batches = [(end_B, min(new, window - given)) for end_B, new in _batches(count, window, stride, batch, limit)]
    estimate.expect(sum(len(end_B) * new for end_B, new in batches))
    with evaluating(network):
        for end_B, new in batches:
            token_BT = _windows(token_N, end_B, window, device)
            side_inputs = prefix_inputs(network, [window - new + 1] * len(end_B))
            output = network(token_BT[:, :-1], kernel=kernel, side_inputs=side_inputs, probe=_later())
            estimate.add(_loss(output.logits_of(head), token_BT, new), new, end_B)
    return estimate.total, estimate.scored


@torch.no_grad()
def streaming_nll(
    network: Network,
    token_N: NDArray[Any],
    segment: int,
    memory: int | None = None,
    *,
    rows: int = 1,
    lead: int = 0,
    limit: int | None = None,
    kernel: str = "auto",
    estimate: Estimate | None = None,
) -> tuple[float, int]:
    """Like `window_nll`, for a model with a segment memory: reads `segment` tokens at a time after `memory` cached positions.

    Default for `memory`: the model's own length. A key-value cache gives the same outputs here, because the weights do not
    change. With several `rows` the text is split into as many rows of one batch; all but the first row start `lead` tokens
    early, and these tokens are not scored in that row. With a `limit` each row is read in part, from its start, and the lead of
    the first row is not scored either, so that the targets are spread evenly over the text.
    """
    if segment < 1 or len(token_N) < 2:
        raise ValueError(
            f"{len(token_N)} tokens in segments of {segment}: give 2 tokens or more, and segments of 1 or more"
        )
    count, estimate = len(token_N) - 1, Estimate() if estimate is None else estimate
    parts = _rows(count, segment, rows, lead, limit)
    estimate.expect(
        sum(end * scored + (end - unscored) * (len(start_B) - scored) for start_B, end, unscored, scored in parts)
    )
    head, device = language_head(network), next(network.parameters()).device
    with evaluating(network):
        if memory is not None and (distance := network.max_distance()) is not None:
            memory = min(memory, max(1, distance))  # no layer attends farther back
        for start_B, end, unscored, scored in parts:
            cache = Cache(max_length=memory)
            for offset in range(0, end, segment):
                size = min(segment, end - offset)
                token_BT = _windows(token_N, start_B + offset + size, size, device)
                output = network(token_BT[:, :-1], cache=cache, kernel=kernel, probe=_later())
                cache = output.cache
                if counted := scored if offset < unscored else len(start_B):
                    loss_B = _loss(output.logits_of(head), token_BT[:counted], size)
                    estimate.add(loss_B, size, start_B[:counted] + offset + size)
    return estimate.total, estimate.scored


def _rows(
    count: int, segment: int, rows: int, lead: int, limit: int | None
) -> list[tuple[NDArray[Any], int, int, int]]:
    """The parts of a text that are read one after the other: the starts of their rows, the length that is read, how much of it
    is a lead, and in how many rows the lead is scored too."""
    lead = -(-lead // segment) * segment
    each = (count - lead) // rows // segment * segment
    if rows < 1 or (rows > 1 and each < 1):
        raise ValueError(f"{count} targets in {rows} rows with a lead of {lead}: give fewer rows, or 1")
    if rows == 1:
        return [(np.zeros(1, int), count if limit is None else min(limit, count), 0, 1)]
    # Row r starts at r * each. The last targets, which do not fill whole segments, are read by one more row.
    read = each if limit is None else min(each, max(1, limit // rows // segment) * segment)
    parts = [(np.arange(rows) * each, lead + read, lead, int(read == each))]
    if read == each and (done := lead + rows * each) < count:
        parts.append((np.array([done - lead]), lead + count - done, lead, 0))
    return parts


def streaming_rows(count: int, segment: int, memory: int, limit: int | None = None) -> tuple[int, int]:
    """Returns the number of rows and the lead for `streaming_nll`, such that the leads are a small part of the text.

    With a limit there are as many rows as have room, so that the scored targets are spread over the text.
    """
    lead = max(memory, MIN_LEAD)
    rows = min(MAX_ROWS, count // (MAX_ROWS * max(lead, segment)))
    if limit is not None and limit < count:
        rows = min(MAX_ROWS, limit // segment, count // (-(-lead // segment) * segment + segment))
    return (rows, lead) if rows > 1 else (1, 0)


def _batches(count: int, window: int, stride: int, batch: int, limit: int | None) -> Iterator[tuple[NDArray[Any], int]]:
    """Yields for each batch the ends of its windows, and how many last targets of each are new.

    Within a limit it yields windows that are spread evenly over those after the first, each with `stride` new targets.
    """
    regular = (count - window) // stride
    end_N = window + stride * np.arange(1, regular + 1)
    limited = limit is not None and limit < count and regular > 0
    if limited:
        chosen = min(regular, max(1, (limit or 0) // stride))
        end_N = end_N[np.arange(chosen) * regular // chosen]
    else:
        yield np.array([window]), window
    for first in range(0, len(end_N), batch):
        yield end_N[first : first + batch], stride
    if not limited and (rest := (count - window) % stride):
        yield np.array([count]), rest


def _fitting(window: int, width: int, device: torch.device) -> int:
    """The number of windows in one call by default."""
    if device.type == "cpu":
        return max(1, min(MAX_CPU_WINDOWS, MAX_CPU_HIDDEN // (window * width)))
    return max(1, MAX_HIDDEN // (window * width))


def _windows(token_N: NDArray[Any], end_B: NDArray[Any], window: int, device: torch.device) -> Tensor:
    """Returns the inputs and targets of the windows with these ends. Windows that overlap are views of one piece of the text."""
    steps = np.diff(end_B)
    stride = int(steps[0]) if len(steps) else 1
    if stride <= window and (steps == stride).all():
        piece = np.asarray(token_N[end_B[0] - window : end_B[-1] + 1]).astype(np.int64)
        return torch.from_numpy(piece).to(device).unfold(0, window + 1, stride)
    rows = [np.asarray(token_N[end - window : end + 1]) for end in end_B]
    return torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)


def _later() -> Probe:
    """The probe of a pass that does not compute its logits."""
    return Probe(records_weights=False, logits=False)


def _loss(logits: LogitMap, token_BT: Tensor, new: int) -> Tensor:
    """Returns the sum of -log p of the last `new` tokens of each row, in float64."""
    hidden_BTD = logits.hidden[: len(token_BT), logits.hidden.shape[1] - new :]
    return replace(logits, hidden=hidden_BTD).losses(token_BT[:, -new:]).double().sum(1)


def vocabulary_of(network: Network, head: int) -> int:
    """Returns the number of tokens that an output head predicts."""
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
        token_BT = token_T.to(next(network.parameters()).device)[None]
        network(token_BT, probe=probe, side_inputs=prefix_inputs(network, [length]))
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
