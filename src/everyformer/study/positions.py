"""Bits by position: what a language model needs for the first tokens that it reads, and for those after them.

A model with a segment memory, or a recurrent net, begins every prompt with an empty memory. If training never showed it one, its first
predictions are worse than chance, however good those in the middle of a text are.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from everyformer.infer.prompts import language_head
from everyformer.network.cache import Cache
from everyformer.network.network import Network, evaluating


@torch.no_grad()
def bits_by_position(
    network: Network,
    token_N: NDArray[Any],
    length: int,
    *,
    segment: int | None = None,
    windows: int = 64,
    seed: int = 0,
) -> list[float]:
    """Returns the mean bits of the targets 0 to `length` - 1 after a start with an empty memory at random places of a text.

    The target 0 is the token after the first one. The model reads `segment` tokens at a time (default: all) and carries its memory from
    one segment to the next.
    """
    if not 1 <= length < len(token_N):
        raise ValueError(f"length is {length}, but the text has {len(token_N)} tokens; give 1 to {len(token_N) - 1}")
    start_B = np.random.default_rng(seed).integers(0, len(token_N) - length, windows)
    piece = np.stack([np.asarray(token_N[start : start + length + 1]) for start in start_B]).astype(np.int64)
    token_BT = torch.from_numpy(piece).to(next(network.parameters()).device)
    head, cache, bits = language_head(network), None if segment is None else Cache(), list[float]()
    with evaluating(network):
        for start in range(0, length, segment or length):
            end = min(length, start + (segment or length))
            output = network(token_BT[:, start:end], cache=cache)
            cache = output.cache
            logits_BTV = output.logits_of(head).float()
            loss_BT = F.cross_entropy(logits_BTV.transpose(1, 2), token_BT[:, start + 1 : end + 1], reduction="none")
            bits += (loss_BT.double().mean(0) / math.log(2)).tolist()
    return bits


def position_groups(length: int) -> list[tuple[int, int]]:
    """Returns the bounds of the positions 0, 1, 2-3, 4-7 and so on, each group twice as long as the one before."""
    bounds = [0, *(1 << n for n in range(max(1, length).bit_length()) if 1 << n < length), length]
    return list(pairwise(bounds))
