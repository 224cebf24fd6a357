"""Pictures of attention: what a network looks at, layer by layer and head by head."""

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
from everyformer.network.halting import Halt, Repeat
from everyformer.network.model import Network, PairNetwork
from everyformer.study.spans import Spans, spans
from everyformer.task.task import TaskData

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

GROUPS = 4  # of the numbers of a recurrent state
MOST = 64  # tokens whose names can be read beside a picture
EXAMPLE = "Shall I compare thee to a summer"
SPREAD = 0.5  # the share of a layer's room that its heads are drawn in


@dataclass(frozen=True)
class Sight:
    """What a network looks at: HQK of each layer, the tokens by name, what the picture is of, its columns and its rows."""

    weight_LHQK: Sequence[Tensor]
    names: Sequence[str]
    title: str
    part: str = "head"
    row: str = "layer"


def reading(network: Network | PairNetwork, data: TaskData, text: str | None = None) -> Sight:
    """What a network looks at while it reads a text, with the tokenizer of its data. Without one: as much of EXAMPLE as it can.

    Of a recurrent one it is the weight w of what came before in its state (`everyformer.network.recurrent`), where each number
    of the state is a head; they are put in order of how far back they look, and drawn as the means of groups.
    """
    tokenizer: Tokenizer | None = getattr(data, "tokenizer", None)
    if tokenizer is None or not isinstance(network, Network):
        raise ValueError(
            "a run that reads no single text (pairs, pictures, an environment) has no attention to draw over a text; give one "
            "that does"
        )
    if text == "":
        raise ValueError("there is nothing to look at in an empty text; give one with --text, or leave it out")
    if text is not None:
        ids = tokenizer.encode(text.encode())
    else:
        try:
            ids = tokenizer.encode(EXAMPLE.encode())
        except ValueError:  # characters that it does not know: then what it is tried on
            ids = np.asarray(data.splits["valid"][: len(EXAMPLE)])  # type: ignore[attr-defined]
        ids = ids[: network.limit and network.limit - network.value.class_token]
    names = [tokenizer.decode([int(one)]).replace("\n", "\\n") for one in ids]
    found = weights(network, torch.from_numpy(ids.astype(np.int64)))
    if not found:
        raise ValueError(
            f"a {type(network.value.body).__name__.lower()} has no weights of what came before to draw; give a run of a "
            "model with attention, or of lstm"
        )
    if network.value.body.each:
        row = "step" if isinstance(network.value.body, Repeat | Halt) and len(network.value.body.each) == 1 else "layer"
        return Sight(found, names, "who looks at whom: queries go down, keys across", row=row)
    title = "what is left of whom in the state: positions go down, what came before across; from short to long memory"
    return Sight([grouped(weight_DQK) for weight_DQK in found], names, title, "group")


def spans_of(network: Network | PairNetwork, data: TaskData) -> Spans:
    """The attention spans of a network on the validation text of its data."""
    text = getattr(data, "splits", {}).get("valid")
    found = spans(network, text) if isinstance(network, Network) and isinstance(text, np.ndarray) else None
    if found is None:
        raise ValueError("the model has no spans that it learned; give a run of adaptive-span")
    return found


def draw_spans(found: Spans) -> Figure:
    """The spans of each layer (across) and head, as the paper draws them; the heads of a layer stand side by side."""
    from matplotlib.figure import Figure

    figure = Figure((max(4.0, 0.5 * len(found.each) + 2), 3.2), dpi=160, layout="constrained")
    plot = figure.subplots()
    for layer, spans_H in enumerate(found.each):
        heads = len(spans_H)
        places = [layer + SPREAD * ((head + 0.5) / heads - 0.5) for head in range(heads)]
        plot.scatter(places, spans_H, s=14, color="tab:blue", alpha=0.7, clip_on=False, zorder=3)
    plot.set_xticks(range(len(found.each)))
    plot.set_xlabel("layer")
    plot.set_ylabel("span of each head")
    plot.set_ylim(0, 1.1 * max(1.0, *map(max, found.each)))
    return figure


@torch.no_grad()
def weights(network: Network, token_T: Tensor) -> list[Tensor]:
    """HQK of every layer: how much each token looks at each other one."""
    probe, device = Probe(), next(network.parameters()).device
    network(token_T[None].to(device), probe=probe)
    return [weight_BHQK[0].float().cpu() for weight_BHQK in probe.weights]


def grouped(weight_HQK: Tensor, groups: int = GROUPS) -> Tensor:
    """The means of groups of heads of about one size, in order of how far back they look on average."""
    queries, keys = weight_HQK.shape[1:]
    apart_QK = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    order_H = ((weight_HQK * apart_QK).sum((1, 2)) / weight_HQK.sum((1, 2))).argsort()
    return torch.stack([part_HQK.mean(0) for part_HQK in weight_HQK[order_H].tensor_split(min(groups, len(order_H)))])


def draw(*sights: Sight) -> Figure:
    """Side by side, in each one square for each layer (down) and head (across); queries go down, keys across, darker is more."""
    from matplotlib.figure import Figure

    sizes = []
    for sight in sights:
        if not 1 <= len(sight.names) <= MOST:
            raise ValueError(
                f"a picture of attention has room for 1 to {MOST} tokens, not {len(sight.names)}; give less text"
            )
        side = max(1.6, 0.075 * len(sight.names))
        sizes.append((side * sight.weight_LHQK[0].shape[0] + 1, side * len(sight.weight_LHQK) + 1))
    widths, heights = zip(*sizes, strict=True)
    figure = Figure((sum(widths), max(heights)), dpi=160, layout="constrained")
    for place, sight in zip(
        figure.subfigures(1, len(sights), squeeze=False, width_ratios=widths)[0], sights, strict=True
    ):
        _fill(place, sight)
    return figure


def _fill(figure: SubFigure, sight: Sight) -> None:
    names, layers, heads = sight.names, len(sight.weight_LHQK), sight.weight_LHQK[0].shape[0]
    figure.suptitle(fill(sight.title, 18 * heads), fontsize=10)
    plots = figure.subplots(layers, heads, squeeze=False)
    for layer, weight_HQK in enumerate(sight.weight_LHQK):
        for head, weight_QK in enumerate(weight_HQK):
            plot = plots[layer][head]
            image = plot.imshow(weight_QK.numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            plot.tick_params(length=0, labelsize=5)
            plot.set_xticks(range(len(names)), names if layer == layers - 1 else [], fontfamily="monospace")
            plot.set_yticks(range(len(names)), names if head == 0 else [], fontfamily="monospace")
            if layer == 0:
                plot.set_title(f"{sight.part} {head}", fontsize=8)
        plots[layer][0].set_ylabel(f"{sight.row} {layer}", fontsize=8)
    scale = figure.colorbar(image, ax=plots, shrink=1 / layers, fraction=0.02, pad=0.01, aspect=15)
    scale.ax.tick_params(labelsize=6)
    scale.set_label("weight", fontsize=8)
