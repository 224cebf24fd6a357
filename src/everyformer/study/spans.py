"""Report of the adaptive attention spans of a model, and of the operations that they save (Sukhbaatar et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from everyformer.attention.score_mod import ShawModule
from everyformer.attention.span import DynamicSpanModule, SpanModule
from everyformer.infer.evaluate import probed
from everyformer.network.multi_head_attention import AttentionModule
from everyformer.network.network import Network


@dataclass(frozen=True)
class Spans:
    """The span z of every layer and head (averaged over a text, if it depends on the text), and the cost of a token.

    Layers that are repeated are listed once per step. `keys` is the mean number of keys that a head attends to far into a text,
    including the ramp; `most` the largest possible number. `flops` are the operations for one token there, with a multiplication
    and an addition counted as two; `most_flops` the same with every span at its maximum.
    """

    each: list[list[float]]
    keys: float
    most: float
    flops: int
    most_flops: int

    @property
    def mean(self) -> float:
        return sum(map(sum, self.each)) / sum(map(len, self.each))


@torch.no_grad()
def spans(network: Network, token_N: NDArray[np.integer]) -> Spans | None:
    """Returns the report for the beginning of a text, or None if the model has no adaptive spans."""
    layers = [module for module in network.modules() if isinstance(module, AttentionModule)]
    spanned = [
        (layer, score_mod)
        for layer in layers
        for score_mod in layer.score_mods
        if isinstance(score_mod, SpanModule | DynamicSpanModule)
    ]
    if not spanned:
        return None
    probed_spans = probed(network, token_N).spans
    steps = len(probed_spans) // len(spanned)
    plain = 2 * (_weights(network) + (steps - 1) * _weights(network.body))
    each, keys, most, costs = [], [], [], []
    for (layer, score_mod), z_BHQ in zip(spanned * steps, probed_spans, strict=True):
        value, heads = score_mod.value, layer.heads
        each.append(z_BHQ.mean((0, 2)).tolist())
        keys += (z_BHQ + value.ramp).clamp(0, value.max_span).mean((0, 2)).tolist()
        most += [value.max_span] * heads.heads
        products = 1 + any(
            isinstance(one, ShawModule) for one in layer.score_mods
        )  # with the keys, and with the relative positions
        costs += [2 * (products * heads.key_width + heads.value_width)] * heads.heads
    flops, most_flops = (
        plain + round(sum(count * cost for count, cost in zip(counts, costs, strict=True))) for counts in (keys, most)
    )
    return Spans(each, sum(keys) / len(keys), sum(most) / len(most), flops, most_flops)


def _weights(module: nn.Module) -> int:
    return sum(one.weight.numel() for one in module.modules() if isinstance(one, nn.Linear))
