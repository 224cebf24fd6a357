"""The log-likelihood of texts under a language model, in batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from everyformer.data.tokenizer import Ids
from everyformer.infer.evaluate import MAX_LOGITS, streaming_nll, vocabulary_of, window_nll
from everyformer.infer.prompts import fixed_prefix, language_head, pad_left, prefix_inputs
from everyformer.network.network import Network, evaluating

ROWS = 32  # in one call


@dataclass(frozen=True)
class Score:
    """How likely a text is: `Score(log_likelihood=-12.5, tokens=10, bits_per_byte=1.8)`.

    `log_likelihood` is the sum of log p of each token after the first, given those before it, in nats. `tokens` is their number;
    `bits_per_byte` is None if they have no bytes.
    """

    log_likelihood: float
    tokens: int
    bits_per_byte: float | None


@torch.no_grad()
def row_nll(network: Network, rows: Sequence[Ids], window: int) -> list[float]:
    """Returns the sum of -log p over the tokens of each row after its first, in nats.

    A longer row is read as in evaluation: in windows that overlap by half, or segment by segment with a segment memory.
    """
    if length := fixed_prefix(network):
        raise ValueError(
            f"the first {length} tokens are the model's prefix and have no probability, so a text has no score; use evaluate"
        )
    whole = [row for row in range(len(rows)) if 1 < len(rows[row]) <= window + 1]
    whole.sort(key=lambda row: len(rows[row]))
    totals = [0.0] * len(rows)
    for row, ids in enumerate(rows):
        if len(ids) > window + 1:
            token_N = np.asarray(ids)
            if network.value.memory is not None:
                totals[row] = streaming_nll(network, token_N, window)[0]
            else:
                totals[row] = window_nll(network, token_N, window, max(1, window // 2))[0]
    head, device = language_head(network), next(network.parameters()).device
    vocabulary = vocabulary_of(network, head)
    with evaluating(network):
        while whole:
            longest = len(rows[whole[-1]])
            size = max(1, min(ROWS, MAX_LOGITS // (longest * vocabulary)))
            chosen, whole = whole[-size:], whole[:-size]
            token_BT, visible_BT = pad_left([list(map(int, rows[row])) for row in chosen], device)
            before_BT = visible_BT[:, :-1]  # of a target, the token before it
            visible = None if bool(before_BT.all()) else before_BT
            side_inputs = prefix_inputs(network, [1] * len(token_BT))  # every token after the first is predicted
            logits_BTV = network(token_BT[:, :-1], visible=visible, side_inputs=side_inputs).logits_of(head).float()
            loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2), token_BT[:, 1:], reduction="none")
            sums = loss_BT.masked_fill(~before_BT, 0).double().sum(1).tolist()
            for row, total in zip(chosen, sums, strict=True):
                totals[row] = total
    return totals
