"""How far the heads of a model with adaptive spans look, and what that saves."""

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
    """z of every layer and head (the mean over a text, where they depend on it), and what a token costs by them. DepthModule that are
    repeated are there once for each step.

    `keys` is how many keys a head sees on average far into a text, the ramp included; `most` how many it could. `flops` are the
    operations of reading one token there, a multiplication and an addition as two; `most_flops` with all spans at their longest.
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
    """The spans of a model while it reads the beginning of a text, or None where it has none."""
    layers = [module for module in network.modules() if isinstance(module, AttentionModule)]
    spanned = [
        (layer, score_mod)
        for layer in layers
        for score_mod in layer.score_mods
        if isinstance(score_mod, SpanModule | DynamicSpanModule)
    ]
    if not spanned:
        return None
    found = probed(network, token_N).spans
    steps = len(found) // len(spanned)
    plain = 2 * (_weights(network) + (steps - 1) * _weights(network.body))
    each, seen, most, costs = [], [], [], []
    for (layer, score_mod), z_BHQ in zip(spanned * steps, found, strict=True):
        value, heads = score_mod.value, layer.heads
        each.append(z_BHQ.mean((0, 2)).tolist())
        seen += (z_BHQ + value.ramp).clamp(0, value.max_span).mean((0, 2)).tolist()
        most += [value.max_span] * heads.heads
        products = 1 + any(isinstance(one, ShawModule) for one in layer.score_mods)  # with keys, and with distances
        costs += [2 * (products * heads.key_width + heads.value_width)] * heads.heads
    flops, most_flops = (
        plain + round(sum(keys * cost for keys, cost in zip(counts, costs, strict=True))) for counts in (seen, most)
    )
    return Spans(each, sum(seen) / len(seen), sum(most) / len(most), flops, most_flops)


def _weights(module: nn.Module) -> int:
    return sum(one.weight.numel() for one in module.modules() if isinstance(one, nn.Linear))
