"""Embeddings of tokens and of positions, projected on the plane in which they differ most (principal component analysis).

    for one in embedding_maps(run.network, run.task.data): one.point_N2, one.labels

With x the vectors less their mean, x = U S V^T: the points are the first two columns of U S, and a column explains the share
s^2 / sum(s^2) of the variance (Pearson 1901).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everyformer.network.embed import TokensModule
from everyformer.network.network import Network, PairNetwork
from everyformer.study.attention_pictures import DPI
from everyformer.task.probe_input import token_labels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 20_000  # vectors of a vocabulary that are projected, the first ones
POSITIONS = 256  # of an encoding that has no last position
NAMED, FEW_NAMED = 300, 40  # points whose labels are legible beside each other, and of those that are more, or a curve
SIDES = ((1, 1), (-1, 1), (1, -1), (-1, -1))  # of a point, where its name may stand: to the right, up


@dataclass(frozen=True)
class EmbeddingMap:
    """Vectors in a plane."""

    title: str
    point_N2: Tensor
    share: tuple[float, float]  # of the variance, which each axis explains
    labels: Sequence[str]
    in_order: bool  # whether the vectors have an order, as positions do


@torch.no_grad()
def embedding_maps(network: Network | PairNetwork, data: Any = None) -> list[EmbeddingMap]:
    """The embeddings of a network's tokens and positions. `data` of the task, if it has a tokenizer, names the tokens.

    Raises ValueError if the network has neither.
    """
    sides = {"": network} if isinstance(network, Network) else {"encoder": network.encoder, "decoder": network.decoder}
    maps, seen = [], set[int]()
    for side, one in sides.items():
        for what, vector_ND, labels in _tables(one, getattr(data, "tokenizer", None)):
            shared = what == "tokens" and id(next(one.embed.parameters())) in seen  # by the two sides of a pair
            if not shared:
                point_N2, share = principal_plane(vector_ND)
                maps.append(EmbeddingMap(f"{side} {what}".strip(), point_N2, share, labels, in_order=what != "tokens"))
        seen |= set(map(id, one.embed.parameters()))
    if not maps:
        raise ValueError(
            "the model has no embedding of tokens or positions; give a run that reads text, or of vit, such as gpt2 or bert"
        )
    return maps


def _tables(network: Network, tokenizer: Any) -> Iterator[tuple[str, Tensor, list[str]]]:
    """The vectors of tokens and of positions, with their labels."""
    if isinstance(network.embed, TokensModule):
        vector_VD = network.embed.table.weight[:MOST].float().cpu()
        numbers = range(len(vector_VD))
        known = tokenizer is not None and tokenizer.vocabulary <= network.embed.vocabulary
        names = token_labels(tokenizer, range(min(len(vector_VD), tokenizer.vocabulary))) if known else []
        yield "tokens", vector_VD, names + [str(number) for number in numbers[len(names) :]]
    table = getattr(network.position, "table", None)
    if table is not None:
        length = network.limit or POSITIONS
        position_1T = torch.arange(length, device=next(network.parameters()).device)[None]
        yield "positions", table(position_1T).reshape(length, -1).float().cpu(), list(map(str, range(length)))


def principal_plane(vector_ND: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """The points N, 2 of vectors on their first two principal components, and the share of the variance of each.

    Of the two signs of a component that is taken with which its largest entry is positive.
    """
    centred_ND = (vector_ND - vector_ND.mean(0)).double()
    value_D, axis_DD = torch.linalg.eigh(centred_ND.mT @ centred_ND)
    axis_D2 = torch.zeros(len(value_D), 2, dtype=torch.double)
    count = min(2, len(value_D))
    axis_D2[:, :count] = axis_DD[:, -count:].flip(1)
    largest_2 = axis_D2.gather(0, axis_D2.abs().argmax(0, keepdim=True))
    axis_D2 *= torch.where(largest_2 < 0, -1, 1)
    value_D = value_D.clamp(min=0)
    total = float(value_D.sum()) or 1.0
    first, second = [*(float(value) / total for value in value_D[-count:].flip(0)), 0.0][:2]
    return (centred_ND @ axis_D2).float(), (first, second)


def draw(maps: Sequence[EmbeddingMap]) -> Figure:
    """Draw maps side by side. Points are named as far as there is room; an order is shown by a line and by colour."""
    from matplotlib.figure import Figure

    figure = Figure((5.2 * len(maps), 4.8), dpi=DPI, layout="constrained")
    plots = figure.subplots(1, len(maps), squeeze=False)[0]
    for plot, one in zip(plots, maps, strict=True):
        x_N, y_N = one.point_N2.T.numpy()
        if one.in_order:
            plot.plot(x_N, y_N, color="#c5ccd3", lw=0.8, zorder=1)
            dots = plot.scatter(x_N, y_N, c=range(len(x_N)), cmap="viridis", s=10, zorder=2)
            figure.colorbar(dots, ax=plot, fraction=0.03, pad=0.02).set_label("position", fontsize=8)
        else:
            plot.scatter(x_N, y_N, s=4, color="#9db7d1")
        first, second = (
            f"component {number} ({share:.0%} of the variance)" for number, share in enumerate(one.share, 1)
        )
        plot.set(title=f"{one.title}: {len(x_N):,} vectors", xlabel=first, ylabel=second)
        plot.grid(alpha=0.3)
    figure.draw_without_rendering()  # places the axes, and with them the points
    figure.set_layout_engine("none")
    for plot, one in zip(plots, maps, strict=True):
        _name_points(plot, one)
    return figure


def _name_points(plot: Any, one: EmbeddingMap) -> None:
    """Write names beside points where they fit: inside the axes, over no other name, on the side with the fewest points."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    at_N2, taken = plot.transData.transform(one.point_N2.numpy()), list[Bbox]()
    every = 1 if len(at_N2) <= NAMED and not one.in_order else -(-len(at_N2) // FEW_NAMED)
    for point, label in list(zip(one.point_N2.tolist(), one.labels, strict=True))[::every]:
        shown = label if label.isprintable() and label.strip() else repr(label)[1:-1]
        if "\N{REPLACEMENT CHARACTER}" in shown:  # a part of a character has no name
            continue
        name = plot.annotate(shown.replace("$", r"\$"), point, (2, 2), textcoords="offset points", fontsize=6)
        name.set_path_effects([withStroke(linewidth=1.5, foreground="white")])
        found = list[tuple[int, int, int]]()
        for right, up in SIDES:
            _place(name, right, up)
            box = name.get_window_extent()
            inside = plot.bbox.contains(*box.min) and plot.bbox.contains(*box.max)
            if inside and box.count_overlaps(taken) == 0:
                covered_N = ((at_N2 >= box.min) & (at_N2 <= box.max)).all(1)
                found.append((int(covered_N.sum()), right, up))
        if not found:
            name.remove()
            continue
        _, right, up = min(found, key=lambda one: one[0])
        _place(name, right, up)
        taken.append(name.get_window_extent())


def _place(name: Any, right: int, up: int) -> None:
    name.set(
        position=(2 * right, 2 * up),
        horizontalalignment="left" if right > 0 else "right",
        verticalalignment="bottom" if up > 0 else "top",
    )
