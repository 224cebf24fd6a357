"""Pictures of patterns: who sees whom, as a grid of half blocks for a terminal or as an image file.

Queries go down, keys go across. A cell that stands for several positions is filled where any of them is seen.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.hashing import Hash, hashing
from everyformer.attention.pattern import Graph, Pattern, SameDocument, Visible
from everyformer.value import nearest, snake

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_HEADS = 64
MOST_PAIRS = 2**24  # of all heads together: 4,096 positions in one head
SHARPEST = 512  # cells on a side of an image
COLORS = {"not seen": "#eef1f4", "seen": "#1f5a96", "seen ahead": "#e07a2f"}


def check_size(length: int, heads: int) -> None:
    if not 1 <= heads <= MOST_HEADS:
        raise ValueError(f"heads is {heads}: a picture has room for 1 to {MOST_HEADS} heads")
    longest = math.isqrt(MOST_PAIRS // heads)
    if not 1 <= length <= longest:
        raise ValueError(f"length is {length}: a picture of {heads} heads has room for 1 to {longest} positions")


def example_context(pattern: Pattern, length: int) -> tuple[Context, list[str]]:
    """A scene with made-up data for the parts of a pattern that read data, and what was made up."""
    said: list[str] = []
    at_P = torch.arange(length)
    document_BP = edges_BNN = key_BK = None
    parts = list(pattern.walk())
    if any(isinstance(part, SameDocument) for part in parts):
        document_BP = (at_P * 3 // length)[None]
        said.append("same_document is shown with three documents of a third each")
    if any(isinstance(part, Graph) and part.edges is None for part in parts):
        edges_BNN = _tree(at_P)[None]
        said.append("graph is shown with a binary tree: a node sees itself, its parent and its children")
    if any(isinstance(part, Visible) for part in parts):
        key_BK = torch.where(at_P < length - length // 4, at_P, -1)[None]
        said.append("visible is shown with the last quarter as padding")
    context = Context.of(length, length, at_P.device, key_BK=key_BK, documents=document_BP, edges=edges_BNN)
    for part in hashing(pattern):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            hashes = Hash(part, 1, 8)
            bucket_BHKR = hashes.buckets(torch.randn(1, 1, length, 8))
        context = context.with_hashes(hashes(bucket_BHKR, context))
        said.append(f"{snake(type(part).__name__)} is shown with random keys")
    return context, said


def _tree(at_P: Tensor) -> Tensor:
    parent_P = ((at_P - 1) // 2).clamp(min=0)
    up_PP = parent_P[:, None] == at_P
    return up_PP | up_PP.T | (at_P[:, None] == at_P)


def pool(seen_HQK: Tensor, size: int) -> Tensor:
    """One cell for every size x size block: is anything seen in it?"""
    return F.max_pool2d(seen_HQK[:, None].float(), size, ceil_mode=True)[:, 0].bool()


def grid(seen_QK: Tensor, scale: int = 1) -> list[str]:
    """Lines of half blocks, two queries a line, with a frame and the positions of every eighth query and key."""
    rows, columns = seen_QK.shape
    edge = len(str(max(rows, columns) * scale))
    ticks = "".join(f"{at * scale:<8}" for at in range(0, columns, 8))[: columns + edge].rstrip()
    lines = [" " * (edge + 2) + ticks, " " * (edge + 1) + "┌" + "─" * columns + "┐"]
    below_QK = F.pad(seen_QK, (0, 0, 0, 1))[1:]
    for row in range(0, rows, 2):
        label = str(row * scale) if row % 8 == 0 else ""
        cells = zip(seen_QK[row].tolist(), below_QK[row].tolist(), strict=True)
        lines.append(f"{label:>{edge}} │" + "".join(" ▄▀█"[2 * up + down] for up, down in cells) + "│")
    return [*lines, " " * (edge + 1) + "└" + "─" * columns + "┘"]


def file_types() -> dict[str, str]:
    """The endings of picture files that can be written, and what they are."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError(
            "a picture file needs matplotlib, which is not installed; run pip install -c constraints.txt -e '.[plot]'"
        ) from None
    return FigureCanvasBase.get_supported_filetypes()


def check_file(path: Path) -> None:
    """Refuse early a picture that could not be written."""
    known = file_types()
    ending = path.suffix.lstrip(".").lower()
    if ending not in known:
        raise ValueError(
            f"{path} ends in {path.suffix or 'nothing'}, which is no kind of picture; {nearest(ending, known)}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")


def draw(pattern: Pattern, seen_HQK: Tensor) -> Figure:
    """A picture of a pattern, one square for each head; its `savefig` writes it."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    heads, length = seen_HQK.shape[:2]
    columns = heads if heads <= 3 else math.ceil(math.sqrt(heads))
    rows = math.ceil(heads / columns)
    side = 4.2 if heads > 1 else 5.4
    title = textwrap.fill(str(pattern), width=max(20, int(10 * side * columns)))
    around = 0.5 + 0.2 * title.count("\n")  # the title and the legend
    figure = Figure(
        (side * columns, side * rows + around), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    )
    figure.suptitle(title, fontsize=12, fontweight="bold", fontfamily="monospace")
    plots = figure.subplots(rows, columns, squeeze=False).flat
    scale = math.ceil(length / SHARPEST)
    cells_HQK = pool(seen_HQK, scale)
    ahead_HQK = cells_HQK & torch.ones(cells_HQK.shape[1:], dtype=torch.bool).triu(1)
    colors = ListedColormap(list(COLORS.values()))
    for head, plot in enumerate(plots):
        if head >= heads:
            plot.remove()
            continue
        values_QK = (cells_HQK[head].int() + ahead_HQK[head].int()).numpy()
        end = cells_HQK.shape[1] * scale - 0.5
        plot.imshow(values_QK, cmap=colors, vmin=0, vmax=2, interpolation="nearest", extent=(-0.5, end, end, -0.5))
        plot.set(xlabel="key position", ylabel="query position")
        plot.set(xlim=(-0.5, length - 0.5), ylim=(length - 0.5, -0.5))
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        if length <= 64:  # lines between the cells, while there is room for them
            edges = [at - 0.5 for at in range(1, length)]
            plot.hlines(edges, -0.5, length - 0.5, color="white", linewidth=0.6)
            plot.vlines(edges, -0.5, length - 0.5, color="white", linewidth=0.6)
        if heads > 1:
            name = textwrap.shorten(f"head {head}: {pattern.for_head(head)}", width=44, placeholder=" …")
            plot.set_title(name, fontsize=9, fontfamily="monospace")
    used = [name for number, name in enumerate(COLORS) if number < 2 or bool(ahead_HQK.any())]
    marks = [Patch(facecolor=COLORS[name], edgecolor="#9aa5b1", linewidth=0.5, label=name) for name in used]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9)
    return figure
