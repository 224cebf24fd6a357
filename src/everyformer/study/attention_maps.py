"""Images of attention weights, by layer and head, and of adaptive spans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from everyformer.attention.context import Probe
from everyformer.data.tokenizer import Tokenizer
from everyformer.network.network import Network, PairNetwork
from everyformer.network.repeat import Halt, Repeat
from everyformer.study.spans import Spans, spans
from everyformer.task.task import TaskData

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

GROUPS = 4  # into which the elements of a recurrent state are averaged
MAX_TOKENS = 64  # whose labels are legible
EXAMPLE = "Shall I compare thee to a summer"
SPREAD = 0.5  # fraction of a layer's column over which its heads are spread


@dataclass(frozen=True)
class AttentionMaps:
    """The attention weights of a network on one text."""

    weight_LHQK: Sequence[Tensor]  # one tensor per layer
    names: Sequence[str]  # the tokens as text
    title: str
    column: str = "head"  # label of the columns
    row: str = "layer"  # label of the rows


def attention_maps(network: Network | PairNetwork, data: TaskData, text: str | None = None) -> AttentionMaps:
    """The attention weights of a network on a text. Default: as much of EXAMPLE as the network can read.

    For a recurrent network they are the weights w of earlier inputs in its state (`everyformer.network.lstm`). Each element
    of the state counts as a head; the elements are sorted by their mean distance and averaged in groups.
    Raises ValueError if the network does not read a single text, or has no such weights.
    """
    tokenizer: Tokenizer | None = getattr(data, "tokenizer", None)
    if tokenizer is None or not isinstance(network, Network):
        raise ValueError(
            "attention can be drawn only for a model of a single text, not of pairs, images or an environment; "
            "give the run of a language model or a text classifier"
        )
    if text == "":
        raise ValueError("the text is empty; give one with --text, or leave --text out")
    if text is not None:
        ids = tokenizer.encode(text.encode())
    else:
        try:
            ids = tokenizer.encode(EXAMPLE.encode())
        except ValueError:  # an unknown character: use validation text
            ids = np.asarray(data.splits["valid"][: len(EXAMPLE)])  # type: ignore[attr-defined]
        ids = ids[: network.limit and network.limit - network.value.class_token]
    names = [tokenizer.decode([int(one)]).replace("\n", "\\n") for one in ids]
    maps = weights(network, torch.from_numpy(ids.astype(np.int64)))
    if not maps:
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in network.value.body.sublayers()))
        raise ValueError(
            f"a model of {kinds} has no attention weights to draw; give a run of a model with attention, or of lstm"
        )
    if any(network.value.body.patterns()):
        row = (
            "step" if isinstance(network.value.body, Repeat | Halt) and len(network.value.body.layers) == 1 else "layer"
        )
        return AttentionMaps(maps, names, "attention weights: rows are queries, columns are keys", row=row)
    title = (
        "weights of earlier inputs in the state: rows are positions, columns inputs; groups from short to long distance"
    )
    return AttentionMaps([grouped(weight_DQK) for weight_DQK in maps], names, title, "group")


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
    plot.set_xlabel("layer")
    plot.set_ylabel("span of each head")
    plot.set_ylim(0, 1.1 * max(1.0, *map(max, result.each)))
    return figure


@torch.no_grad()
def weights(network: Network, token_T: Tensor) -> list[Tensor]:
    """The attention weights of every layer, H, Q, K each; of a network without attention those of its states, D, Q, K."""
    probe, device = Probe(), next(network.parameters()).device
    network(token_T[None].to(device), probe=probe)
    return [weight_BHQK[0].float().cpu() for weight_BHQK in probe.weights or probe.state_weights]


def grouped(weight_HQK: Tensor, groups: int = GROUPS) -> Tensor:
    """Means over groups of heads of about equal size, sorted by the mean distance of their weights."""
    queries, keys = weight_HQK.shape[1:]
    distance_QK = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    order_H = ((weight_HQK * distance_QK).sum((1, 2)) / weight_HQK.sum((1, 2))).argsort()
    return torch.stack([part_HQK.mean(0) for part_HQK in weight_HQK[order_H].tensor_split(min(groups, len(order_H)))])


def draw(*maps: AttentionMaps) -> Figure:
    """Draw maps side by side: a grid with a row per layer and a column per head. Darker is more weight.

    Raises ValueError if there are too many tokens to label.
    """
    from matplotlib.figure import Figure

    sizes = []
    for one in maps:
        if not 1 <= len(one.names) <= MAX_TOKENS:
            raise ValueError(
                f"the text has {len(one.names)} tokens, but at most {MAX_TOKENS} can be drawn; give a shorter text"
            )
        side = max(1.6, 0.075 * len(one.names))
        sizes.append((side * one.weight_LHQK[0].shape[0] + 1, side * len(one.weight_LHQK) + 1))
    widths, heights = zip(*sizes, strict=True)
    figure = Figure((sum(widths), max(heights)), dpi=160, layout="constrained")
    subfigures = figure.subfigures(1, len(maps), squeeze=False, width_ratios=widths)[0]
    for subfigure, one in zip(subfigures, maps, strict=True):
        _draw_one(subfigure, one)
    return figure


def _draw_one(figure: SubFigure, maps: AttentionMaps) -> None:
    names, layers, heads = maps.names, len(maps.weight_LHQK), maps.weight_LHQK[0].shape[0]
    figure.suptitle(fill(maps.title, 18 * heads), fontsize=10)
    plots = figure.subplots(layers, heads, squeeze=False)
    for layer, weight_HQK in enumerate(maps.weight_LHQK):
        for head, weight_QK in enumerate(weight_HQK):
            plot = plots[layer][head]
            image = plot.imshow(weight_QK.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            plot.tick_params(length=0, labelsize=5)
            plot.set_xticks(range(len(names)), names if layer == layers - 1 else [], fontfamily="monospace")
            plot.set_yticks(range(len(names)), names if head == 0 else [], fontfamily="monospace")
            if layer == 0:
                plot.set_title(f"{maps.column} {head}", fontsize=8)
        plots[layer][0].set_ylabel(f"{maps.row} {layer}", fontsize=8)
    scale = figure.colorbar(image, ax=plots, shrink=1 / layers, fraction=0.02, pad=0.01, aspect=15)
    scale.ax.tick_params(labelsize=6)
    scale.set_label("weight", fontsize=8)
