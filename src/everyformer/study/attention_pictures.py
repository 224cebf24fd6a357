"""Draws attention weights: as a grid of queries and keys, over an image, or along the edges of a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from textwrap import wrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from everyformer.task.attention_maps import AttentionMaps
from everyformer.task.probe_input import GraphNodes, ImageCells

if TYPE_CHECKING:
    from matplotlib.figure import Figure, SubFigure

MAX_TOKENS = 64  # whose labels are legible
MAX_NODES, FEW_NODES = 40, 24  # of a graph, around the node of interest: of an image, and in a terminal
DPI = 160


class HeadMatrix(NamedTuple):
    """The weights of one head as they are drawn in a terminal: of an image its cells, of a graph the nodes around one."""

    title: str
    value_QK: Tensor
    queries: Sequence[str]
    keys: Sequence[str]


def selected(maps: AttentionMaps, layer: int | None = None, head: int | None = None) -> AttentionMaps:
    """The maps of one layer, one head, or both. Raises ValueError if there is none of that number."""
    weight_LHQK = list(maps.weight_LHQK)
    chosen = []
    for name, number, count in ((maps.row, layer, len(weight_LHQK)), (maps.column, head, len(weight_LHQK[0]))):
        if number is not None and not 0 <= number < count:
            raise ValueError(f"there is no {name} {number}; give 0 to {count - 1}")
        chosen.append(slice(0, count) if number is None else slice(number, number + 1))
    layers, heads = chosen
    return replace(
        maps, weight_LHQK=[weight_HQK[heads] for weight_HQK in weight_LHQK[layers]], first=(layers.start, heads.start)
    )


def matrices(maps: AttentionMaps) -> tuple[str, list[HeadMatrix]]:
    """The title of maps, and what a terminal shows of each head. Raises ValueError if there are too many keys to label."""
    maps = _legible(maps)
    title, queries, keys = _title(maps), list(maps.queries), list(maps.keys)
    image, graph, found = maps.image, maps.graph, []
    if graph is not None:
        nodes = neighbourhood(graph.edge_NN, graph.node, FEW_NODES)
        queries = keys = [str(node) for node in nodes]
        title = f"attention along the edges of {len(nodes)} nodes around node {graph.node}: rows are queries, columns are keys"
    for layer, weight_HQK in enumerate(maps.weight_LHQK, maps.first[0]):
        for head, weight_QK in enumerate(weight_HQK, maps.first[1]):
            name = f"{maps.row} {layer}, {maps.column} {head}"
            if image is not None:
                value_QK = image_heat(image, weight_QK)
                queries, keys = ([""] * length for length in value_QK.shape)
            else:
                value_QK = weight_QK if graph is None else weight_QK[nodes][:, nodes]
            found.append(HeadMatrix(name, value_QK, queries, keys))
    return title, found


def draw(*maps: AttentionMaps) -> Figure:
    """Draw maps side by side: a grid with a row per layer and a column per head. Darker is more weight.

    Weights over an image are drawn as a heat map of what one query attends to; those of a graph as the widths of its edges.
    Raises ValueError if there are too many keys to label.
    """
    from matplotlib.figure import Figure

    legible, sizes = [_legible(one) for one in maps], []
    for one in legible:
        width, height = _cell_size(one)
        sizes.append((width * one.weight_LHQK[0].shape[0] + 1, height * len(one.weight_LHQK) + 1))
    widths, heights = zip(*sizes, strict=True)
    figure = Figure((sum(widths), max(heights)), dpi=DPI, layout="constrained")
    subfigures = figure.subfigures(1, len(legible), squeeze=False, width_ratios=widths)[0]
    for subfigure, one in zip(subfigures, legible, strict=True):
        _draw_one(subfigure, one)
    return figure


def _legible(maps: AttentionMaps) -> AttentionMaps:
    """The maps with as many queries as can be labelled; each shows all its keys. Raises ValueError if these are too many."""
    if maps.image is not None or maps.graph is not None:
        return maps
    if not (maps.queries and 1 <= len(maps.keys) <= MAX_TOKENS):
        raise ValueError(
            f"the input has {len(maps.keys)} positions, but 1 to {MAX_TOKENS} can be drawn; give an input of such a length"
        )
    if len(maps.queries) <= MAX_TOKENS:
        return maps
    title = f"{maps.title}; the first {MAX_TOKENS} of {len(maps.queries)} queries"
    weight_LHQK = [weight_HQK[:, :MAX_TOKENS] for weight_HQK in maps.weight_LHQK]
    return replace(maps, weight_LHQK=weight_LHQK, queries=maps.queries[:MAX_TOKENS], title=title)


def _cell_size(maps: AttentionMaps) -> tuple[float, float]:
    """Inches of one head."""
    if maps.image is not None or maps.graph is not None:
        return 1.8, 1.8
    return max(1.6, 0.075 * len(maps.keys)), max(1.6, 0.075 * len(maps.queries))


def _draw_one(figure: SubFigure, maps: AttentionMaps) -> None:
    layers, heads = len(maps.weight_LHQK), maps.weight_LHQK[0].shape[0]
    plots = figure.subplots(layers, heads, squeeze=False)
    painter = _grid_painter(maps)
    if maps.image is not None:
        painter = _image_painter(maps.image)
    elif maps.graph is not None:
        painter = _graph_painter(maps.graph, maps.weight_LHQK)
    figure.suptitle(wrapped(_title(maps), max(30, 18 * heads)), fontsize=10)
    for layer, weight_HQK in enumerate(maps.weight_LHQK):
        for head, weight_QK in enumerate(weight_HQK):
            plot = plots[layer][head]
            scale = painter(plot, weight_QK, layer == layers - 1, head == 0)
            if layer == 0:
                plot.set_title(f"{maps.column} {maps.first[1] + head}", fontsize=8)
        plots[layer][0].set_ylabel(f"{maps.row} {maps.first[0] + layer}", fontsize=8)
    bar = figure.colorbar(scale, ax=plots, shrink=1 / layers, fraction=0.02, pad=0.01, aspect=15)
    bar.ax.tick_params(labelsize=6)
    bar.set_label("weight" if maps.image is None else "weight / largest", fontsize=8)


def wrapped(title: str, width: int) -> str:
    """A title in as few lines as the width permits, all about equally long."""
    count = len(wrap(title, width))
    lines = (wrap(title, narrower) for narrower in range(len(title) // count, width + 1))
    return "\n".join(next(some for some in lines if len(some) == count))


def _title(maps: AttentionMaps) -> str:
    """What the picture shows."""
    if maps.graph is not None:
        shown = len(neighbourhood(maps.graph.edge_NN, maps.graph.node))
        whole = shown == len(maps.graph.class_N)
        part = "the graph" if whole else f"{shown} nodes around node {maps.graph.node}"
        return f"attention along the edges of {part}: colours of nodes are classes"
    if maps.image is None:
        return maps.title
    if maps.image.query is None:
        return "attention over the image: mean of all queries"
    if maps.image.cell_P2[maps.image.query, 0] < 0:
        return "attention of the class token over the image"
    return "attention over the image of the query that predicts the marked pixel"


Painter = Callable[[Any, Tensor, bool, bool], Any]  # draws Q, K weights; whether in the last row, in the first column


def _grid_painter(maps: AttentionMaps) -> Painter:
    largest = max(float(weight_HQK.max()) for weight_HQK in maps.weight_LHQK)

    def paint(plot: Any, weight_QK: Tensor, last: bool, first: bool) -> Any:
        image = plot.imshow(weight_QK.numpy(), cmap="Blues", vmin=0, vmax=largest, aspect="auto")
        plot.tick_params(length=0, labelsize=5)
        rotation = 90 if max(map(len, maps.keys)) > 1 else 0
        plot.set_xticks(range(len(maps.keys)), maps.keys if last else [], fontfamily="monospace", rotation=rotation)
        plot.set_yticks(range(len(maps.queries)), maps.queries if first else [], fontfamily="monospace")
        return image

    return paint


def image_heat(image: ImageCells, weight_QK: Tensor) -> Tensor:
    """The weights of the query of interest on each cell of the image, relative to the largest."""
    heat_YX = torch.zeros([length // image.size for length in image.pixel_CYX.shape[1:]])
    weight_K = weight_QK.mean(0) if image.query is None else weight_QK[image.query]
    reads_P = image.cell_P2[:, 0] >= 0
    row_P, column_P = image.cell_P2[reads_P].unbind(1)
    heat_YX.index_put_((row_P, column_P), weight_K[reads_P], accumulate=True)
    return heat_YX / heat_YX.max().clamp(min=1e-12)


def _image_painter(image: ImageCells) -> Painter:
    """Red where the query attends to: the weights of the cells, over the image in grey."""
    grey_YX = image.pixel_CYX.mean(0).numpy()

    def paint(plot: Any, weight_QK: Tensor, last: bool, first: bool) -> Any:
        heat_YX = image_heat(image, weight_QK)
        extent = (-0.5, grey_YX.shape[1] - 0.5, grey_YX.shape[0] - 0.5, -0.5)
        plot.imshow(grey_YX, cmap="gray", vmin=0, vmax=1, extent=extent)
        alpha_YX = 0.15 + 0.6 * heat_YX.numpy()
        heat = plot.imshow(heat_YX.numpy(), cmap="inferno", vmin=0, vmax=1, alpha=alpha_YX, extent=extent)
        if image.query is not None and image.query + 1 < len(image.cell_P2) and image.cell_P2[image.query, 0] >= 0:
            y, x = image.cell_P2[image.query + 1].tolist()  # the position after it reads what it predicts
            plot.plot([x * image.size], [y * image.size], "s", mfc="none", mec="cyan", ms=4)
        plot.set_xticks([])
        plot.set_yticks([])
        return heat

    return paint


def neighbourhood(edge_NN: Tensor, node: int, limit: int = MAX_NODES) -> list[int]:
    """The nodes nearest to a node by edges in either direction, itself first."""
    joined_NN, found, seen = edge_NN | edge_NN.T, [node], {node}
    for one in found:
        new = [other for other in joined_NN[one].nonzero()[:, 0].tolist() if other not in seen]
        found += new[: max(0, limit - len(found))]
        seen.update(new)
    return found


def layout(joined_NN: Tensor, steps: int = 200) -> np.ndarray[Any, Any]:
    """Positions in a plane by forces (Fruchterman and Reingold 1991): edges pull, nodes push. The same for the same graph."""
    count = len(joined_NN)
    angle_N = np.linspace(0, 2 * np.pi, count, endpoint=False)
    at_N2, ideal = np.stack((np.cos(angle_N), np.sin(angle_N)), axis=1), 2 / np.sqrt(count)
    joined = joined_NN.numpy()
    for step in range(steps):
        between_NN2 = at_N2[:, None] - at_N2[None]
        distance_NN = np.maximum(np.linalg.norm(between_NN2, axis=-1), 1e-3)
        force_NN = ideal**2 / distance_NN - joined * distance_NN**2 / ideal
        move_N2 = (between_NN2 / distance_NN[..., None] * force_NN[..., None]).sum(1) - 0.2 * at_N2
        length_N1 = np.maximum(np.linalg.norm(move_N2, axis=1, keepdims=True), 1e-6)
        at_N2 = at_N2 + move_N2 / length_N1 * np.minimum(length_N1, 0.2 * (1 - step / steps))
    return at_N2


def _graph_painter(graph: GraphNodes, weight_LHQK: Sequence[Tensor]) -> Painter:
    """Lines from query to key, darker and wider with their weight; the weight of a node on itself is a ring."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.collections import LineCollection
    from matplotlib.colors import Normalize

    nodes = neighbourhood(graph.edge_NN, graph.node)
    edge_NN = graph.edge_NN[nodes][:, nodes]
    joined_NN = (edge_NN | edge_NN.T) & ~torch.eye(len(nodes), dtype=torch.bool)
    at_N2 = layout(joined_NN)
    largest = max(float(weight_HQK[:, nodes][:, :, nodes].max()) for weight_HQK in weight_LHQK)
    colours = [f"C{int(one) % 10}" for one in graph.class_N[nodes]]
    scale: Any = ScalarMappable(Normalize(0, largest), "Greys")

    def paint(plot: Any, weight_QK: Tensor, last: bool, first: bool) -> Any:
        weight_NN = weight_QK[nodes][:, nodes]
        pairs = sorted(joined_NN.nonzero().tolist(), key=lambda pair: float(weight_NN[pair[0], pair[1]]))
        strength = [float(weight_NN[query, key]) for query, key in pairs]
        lines = [(at_N2[query], (at_N2[query] + at_N2[key]) / 2) for query, key in pairs]  # the half at the query
        widths = [0.3 + 3 * weight / largest for weight in strength]
        greys = [scale.to_rgba(0.15 * largest + 0.85 * weight) for weight in strength]
        plot.add_collection(LineCollection(lines, linewidths=widths, colors=greys))
        rings = [scale.to_rgba(float(weight_NN[node, node])) for node in range(len(nodes))]
        plot.scatter(*at_N2.T, s=22, c=colours, edgecolors=rings, linewidths=1.2, zorder=3)
        plot.scatter(*at_N2[:1].T, s=70, facecolors="none", edgecolors="red", linewidths=1, zorder=4)
        plot.set_xticks([])
        plot.set_yticks([])
        plot.margins(0.1)
        return scale

    return paint
