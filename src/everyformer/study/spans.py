"""Report of the adaptive attention spans of a model, and of the operations that they save (Sukhbaatar et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from everyformer.attention.score_mod import ShawModule
from everyformer.attention.span import DynamicSpanModule, SpanModule
from everyformer.infer.evaluate import probed
from everyformer.network.multi_head_attention import AttentionModule
from everyformer.network.network import Network, PairNetwork
from everyformer.study.attention_pictures import wrapped
from everyformer.task.task import TaskData

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SPREAD = 0.5  # fraction of a layer's column over which its heads are spread


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


def spans_of(network: Network | PairNetwork, data: TaskData) -> Spans:
    """The spans of a network's heads on the validation text. Raises ValueError if it has no learned spans."""
    text = getattr(data, "splits", {}).get("valid")
    result = spans(network, text) if isinstance(network, Network) and isinstance(text, np.ndarray) else None
    if result is None:
        raise ValueError("the model has no learned spans; give the run of adaptive-span")
    return result


def draw_spans(result: Spans) -> Figure:
    """Draw the span of every head by layer, as in Sukhbaatar et al. 2019."""
    from matplotlib.figure import Figure

    figure = Figure((max(4.0, 0.5 * len(result.each) + 2), 3.2), dpi=160, layout="constrained")
    plot = figure.subplots()
    for layer, spans_H in enumerate(result.each):
        heads = len(spans_H)
        columns = [layer + SPREAD * ((head + 0.5) / heads - 0.5) for head in range(heads)]
        plot.scatter(columns, spans_H, s=14, color="tab:blue", alpha=0.7, clip_on=False, zorder=3)
    plot.set_xticks(range(len(result.each)))
    title = f"learned span of each head: {result.mean:.1f} positions on average"
    plot.set_title(wrapped(title, int(11 * figure.get_figwidth())), fontsize=10)
    plot.grid(axis="y", alpha=0.3)
    plot.set_xlabel("layer")
    plot.set_ylabel("span in positions")
    plot.set_ylim(0, 1.1 * max(1.0, *map(max, result.each)))
    return figure
