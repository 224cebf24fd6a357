"""What a network computes inside besides attention weights: halting, hash buckets, gates and spans, as arrays and as pictures.

inputs = run.task.inference.probe_input(run.network, "To be")
halting_maps(run.network, inputs)[0].value_RT          # rows are steps, columns positions
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everyformer.network.lstm import RecurrentModule
from everyformer.network.network import Network, PairNetwork
from everyformer.study.attention_pictures import DPI, MAX_TOKENS, wrapped
from everyformer.task.attention_maps import ProbedSide, probe
from everyformer.task.probe_input import ProbeInput

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FEATURES = 8  # rows of a gate: its features are sorted by their mean and averaged in so many groups
ROW, COLUMN = {"gate": 0.08}, 0.16  # inches: a bucket's number is legible
COLOUR_MAPS = {"weight": "Blues", "bucket": "tab20", "gate": "RdYlBu", "span": "viridis"}
SCALES = {"weight": "weight of the step", "gate": "gate: 0 closed, 1 open", "span": "span in positions"}
DARKER = {
    "weight": "more weight",
    "gate": "more open",
    "span": "a longer span, up to {:.3g} positions",
}  # in a terminal
COLOURS = 20  # of tab20: buckets beyond them repeat the colours


@dataclass(frozen=True)
class InnerMap:
    """Numbers by position: rows R are steps, rounds of hashing, groups of features of a gate, or heads."""

    title: str
    value_RT: Tensor
    rows: Sequence[str]  # labels
    labels: Sequence[str]  # of the positions
    kind: str  # of the numbers: weight, bucket, gate or span
    count_T: Tensor | None = None  # steps taken at each position


def halting_maps(network: Network | PairNetwork, inputs: ProbeInput) -> list[InnerMap]:
    """The weight of each step by position, of each depth or sublayer that halts. Raises ValueError if none does."""
    maps = []
    for side in probe(network, inputs):
        for index, weight_BTN in enumerate(side.probe.halts):
            weight_TN = weight_BTN[0, : len(side.labels)].float().cpu()
            count_T = (weight_TN > 0).sum(1)
            name = " ".join(filter(None, (side.name, f"layer {index}" if len(side.probe.halts) > 1 else "")))
            title = f"{name + ': ' if name else ''}{count_T.float().mean():.2f} steps per position on average"
            rows = [f"step {step}" for step in range(weight_TN.shape[1])]
            maps.append(InnerMap(title, weight_TN.T, rows, side.labels, "weight", count_T))
    if not maps:
        raise ValueError("the model does not halt by position; give a run of universal-transformer or act-rnn")
    return maps


def bucket_maps(network: Network | PairNetwork, inputs: ProbeInput) -> list[InnerMap]:
    """The bucket of each position by round of hashing, of each layer and head. Raises ValueError if none hashes."""
    maps = []
    for side in probe(network, inputs):
        for index, bucket_BHRK in enumerate(side.probe.buckets):
            for head, bucket_RK in enumerate(bucket_BHRK[0, :, :, : len(side.labels)].cpu()):
                rows = [f"round {number}" for number in range(len(bucket_RK))]
                title = f"{side.name} {side.row} {index}, head {head}".strip()
                maps.append(InnerMap(title, bucket_RK, rows, side.labels, "bucket"))
    if not maps:
        raise ValueError("the model does not hash its keys; give a run of reformer")
    return maps


def gate_maps(network: Network | PairNetwork, inputs: ProbeInput) -> list[InnerMap]:
    """Each gate by position, of gated residuals and of LSTMs. Raises ValueError if the model has neither."""
    maps = []
    for side in probe(network, inputs):
        for name, gates in _named_gates(side):
            for gate, gate_BTD in gates.items():
                value_RT = _by_mean(gate_BTD[0, : len(side.labels)].float().cpu().T)
                title = f"{side.name} {name}: {gate} gate, mean {value_RT.mean():.2f}".strip()
                rows = ["" for _ in value_RT]
                rows[0], rows[-1] = "most closed", "most open"
                maps.append(InnerMap(title, value_RT, rows, side.labels, "gate"))
    if not maps:
        raise ValueError("the model has no gates; give a run of gtrxl, lstm or ablated-lstm")
    return maps


def span_maps(network: Network | PairNetwork, inputs: ProbeInput) -> list[InnerMap]:
    """The span of each head at each position, of each layer. Raises ValueError if no span is learned."""
    maps = []
    for side in probe(network, inputs):
        for index, z_BHQ in enumerate(side.probe.spans):
            z_HQ = z_BHQ[0, :, : len(side.labels)].float().cpu()
            title = f"{side.name} {side.row} {index}: {z_HQ.mean():.1f} positions on average".strip()
            maps.append(InnerMap(title, z_HQ, [f"head {head}" for head in range(len(z_HQ))], side.labels, "span"))
    if not maps:
        raise ValueError("the model has no learned spans; give the run of adaptive-span")
    return maps


def _named_gates(side: ProbedSide) -> list[tuple[str, dict[str, Tensor]]]:
    """The gates with the layer and the sublayer that they belong to, in the order of execution."""
    body = side.network.body
    layers = [list(layer.sublayers) for layer in body.layer_modules()] * body.executions
    places = [(f"{side.row} {number}", sublayer) for number, layer in enumerate(layers) for sublayer in layer]
    joins = [f"{place}, {type(sublayer).__name__.removesuffix('Module')}" for place, sublayer in places]
    cells = [f"{place}, LSTM" for place, sublayer in places if isinstance(sublayer, RecurrentModule)]
    recorded = side.probe
    # A halting depth may take fewer steps than it has.
    return [*zip(joins, recorded.gates, strict=False), *zip(cells, recorded.cell_gates, strict=False)]


def _by_mean(gate_DT: Tensor) -> Tensor:
    """Features sorted by their mean and averaged in groups."""
    order_D = gate_DT.mean(1).argsort()
    return torch.stack([part.mean(0) for part in gate_DT[order_D].tensor_split(min(FEATURES, len(order_D)))])


def as_shares(one: InnerMap, maps: Sequence[InnerMap]) -> Tensor:
    """The numbers of a map from 0 to 1, spans relative to the longest of all maps; buckets as they are."""
    if one.kind != "span":
        return one.value_RT
    return one.value_RT / max(1e-12, *(float(other.value_RT.max()) for other in maps))


def draw(maps: Sequence[InnerMap], title: str) -> Figure:
    """Draw maps below each other, with a column per position. Raises ValueError if there are too many positions."""
    from matplotlib.figure import Figure

    count = max(len(one.labels) for one in maps)
    if count > MAX_TOKENS:
        raise ValueError(f"the input has {count} positions, but at most {MAX_TOKENS} can be drawn; give a shorter one")
    heights = [ROW.get(one.kind, COLUMN) * len(one.rows) + 0.75 for one in maps]
    figure = Figure((max(4.0, COLUMN * count + 2.2), sum(heights) + 0.5), dpi=DPI, layout="constrained")
    figure.suptitle(wrapped(title, int(11 * figure.get_figwidth())), fontsize=10)
    largest = max(1.0, *(float(one.value_RT.max()) for one in maps)) if maps[0].kind == "span" else 1.0
    plots = figure.subplots(len(maps), 1, squeeze=False, height_ratios=heights)[:, 0]
    for plot, one in zip(plots, maps, strict=True):
        buckets = one.kind == "bucket"
        shown_RT = one.value_RT % COLOURS / COLOURS if buckets else one.value_RT
        image = plot.imshow(shown_RT.numpy(), cmap=COLOUR_MAPS[one.kind], vmin=0, vmax=largest, aspect="auto")
        halts = "" if one.count_T is None else "; red: where it halts"
        plot.set_title(one.title + halts, fontsize=8, loc="left")
        plot.tick_params(length=0, labelsize=6)
        rotation = 90 if max(map(len, one.labels)) > 1 else 0
        plot.set_xticks(range(len(one.labels)), one.labels, fontfamily="monospace", rotation=rotation)
        plot.set_yticks(range(len(one.rows)), one.rows)
        if buckets:
            for row, bucket_T in enumerate(one.value_RT.tolist()):
                for column, bucket in enumerate(bucket_T):
                    plot.text(column, row, bucket, ha="center", va="center", fontsize=5)
        if one.count_T is not None:
            plot.step(range(len(one.labels)), one.count_T.numpy() - 0.5, where="mid", color="tab:red", lw=1)
    if maps[0].kind != "bucket":
        bar = figure.colorbar(image, ax=plots, fraction=0.02, pad=0.01, aspect=15, shrink=min(1.0, 1.5 / sum(heights)))
        bar.ax.tick_params(labelsize=6)
        bar.set_label(SCALES[maps[0].kind], fontsize=8)
    return figure
