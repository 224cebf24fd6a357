"""Draws patterns: as text for a terminal, two rows of cells per line, or as an image file.

Rows are queries, columns are keys. A cell that stands for several positions is filled if any of its pairs is allowed.
"""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.hashing import Hash, hashing
from everyformer.attention.pattern import Graph, Pattern, Prefix, SameDocument, Visible
from everyformer.value import nearest, snake

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_HEADS = 64
MAX_PAIRS = 2**24  # of all heads together: 4,096 positions in one head
MAX_CELLS = 512  # on a side of an image
COLORS = {"not allowed": "#eef1f4", "allowed": "#1f5a96", "allowed, in the future": "#e07a2f"}


def check_size(length: int, heads: int) -> None:
    """Raises ValueError if a drawing of this size would be too large."""
    if not 1 <= heads <= MAX_HEADS:
        raise ValueError(f"heads is {heads}, but 1 to {MAX_HEADS} heads can be drawn")
    longest = math.isqrt(MAX_PAIRS // heads)
    if not 1 <= length <= longest:
        raise ValueError(f"length is {length}, but with {heads} heads 1 to {longest} positions can be drawn")


def example_context(pattern: Pattern, length: int) -> tuple[Context, list[str]]:
    """A context with example data for the parts of a pattern that read data, and notes about the data."""
    notes: list[str] = []
    at_P = torch.arange(length)
    document_BP = edges_BNN = key_BK = None
    parts = list(pattern.walk())
    if any(isinstance(part, SameDocument) for part in parts):
        document_BP = (at_P * 3 // length)[None]
        notes.append("same_document is drawn with three documents of equal length")
    if any(isinstance(part, Graph) and part.edges is None for part in parts):
        edges_BNN = _tree(at_P)[None]
        notes.append("graph is drawn with a binary tree: a node attends to itself, its parent and its children")
    if any(isinstance(part, Visible) for part in parts):
        key_BK = torch.where(at_P < length - length // 4, at_P, -1)[None]
        notes.append("visible is drawn with the last quarter as padding")
    if Prefix() in parts:
        notes.append("prefix is drawn with the first third of the positions")
    side: dict[str, Any] = {"documents": document_BP, "edges": edges_BNN, "prefix": torch.tensor([length // 3])}
    context = Context.of(length, length, at_P.device, key_BK=key_BK, **side)
    for part in hashing(pattern):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            hashes = Hash(part, 1, 8)
            bucket_BHKR = hashes.buckets(torch.randn(1, 1, length, 8))
        context = context.with_hashes(hashes(bucket_BHKR, context))
        notes.append(f"{snake(type(part).__name__)} is drawn with random keys")
    return context, notes


def _tree(at_P: Tensor) -> Tensor:
    parent_P = ((at_P - 1) // 2).clamp(min=0)
    up_PP = parent_P[:, None] == at_P
    return up_PP | up_PP.T | (at_P[:, None] == at_P)


def pool(allowed_HQK: Tensor, size: int) -> Tensor:
    """One cell for every size x size block: whether any pair in it is allowed."""
    return F.max_pool2d(allowed_HQK[:, None].float(), size, ceil_mode=True)[:, 0].bool()


def grid(allowed_QK: Tensor, scale: int = 1) -> list[str]:
    """Lines of text, two queries per line, with a frame and the position of every eighth query and key."""
    rows, columns = allowed_QK.shape
    edge = len(str(max(rows, columns) * scale))
    ticks = "".join(f"{at * scale:<8}" for at in range(0, columns, 8))[: columns + edge].rstrip()
    lines = [" " * (edge + 2) + ticks, " " * (edge + 1) + "┌" + "─" * columns + "┐"]
    below_QK = F.pad(allowed_QK, (0, 0, 0, 1))[1:]
    for row in range(0, rows, 2):
        label = str(row * scale) if row % 8 == 0 else ""
        cells = zip(allowed_QK[row].tolist(), below_QK[row].tolist(), strict=True)
        lines.append(f"{label:>{edge}} │" + "".join(" ▄▀█"[2 * up + down] for up, down in cells) + "│")
    return [*lines, " " * (edge + 1) + "└" + "─" * columns + "┘"]


def file_types() -> dict[str, str]:
    """The suffixes of image files that can be written, with their descriptions."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        raise ValueError(
            "drawing needs matplotlib, which is not installed; install it with pip install 'everyformer[plot]'"
        ) from None
    return FigureCanvasBase.get_supported_filetypes()


def check_file(path: Path) -> None:
    """Raises ValueError if an image cannot be written to this path."""
    known = file_types()
    ending = path.suffix.lstrip(".").lower()
    if ending not in known:
        raise ValueError(
            f"{path} has the suffix {path.suffix or '(none)'}, which is not an image type; {nearest(ending, known)}"
        )
    if not path.parent.is_dir():
        raise ValueError(f"{path} cannot be written, because the folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise ValueError(f"{path} is a folder; give the name of a file")


def draw(pattern: Pattern, allowed_HQK: Tensor) -> Figure:
    """Draw a pattern, one square per head. Write the figure with its `savefig`."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    heads, length = allowed_HQK.shape[:2]
    columns = heads if heads <= 3 else math.ceil(math.sqrt(heads))
    rows = math.ceil(heads / columns)
    side = 4.2 if heads > 1 else 5.4
    title = textwrap.fill(str(pattern), width=max(20, int(10 * side * columns)))
    margin = 0.5 + 0.2 * title.count("\n")  # the title and the legend
    figure = Figure(
        (side * columns, side * rows + margin), dpi=160, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    )
    figure.suptitle(title, fontsize=12, fontweight="bold", fontfamily="monospace")
    plots = figure.subplots(rows, columns, squeeze=False).flat
    scale = math.ceil(length / MAX_CELLS)
    cells_HQK = pool(allowed_HQK, scale)
    future_HQK = cells_HQK & torch.ones(cells_HQK.shape[1:], dtype=torch.bool).triu(1)
    colors = ListedColormap(list(COLORS.values()))
    for head, plot in enumerate(plots):
        if head >= heads:
            plot.remove()
            continue
        values_QK = (cells_HQK[head].int() + future_HQK[head].int()).numpy()
        end = cells_HQK.shape[1] * scale - 0.5
        plot.imshow(values_QK, cmap=colors, vmin=0, vmax=2, interpolation="nearest", extent=(-0.5, end, end, -0.5))
        plot.set(xlabel="key position", ylabel="query position")
        plot.set(xlim=(-0.5, length - 0.5), ylim=(length - 0.5, -0.5))
        for axis in (plot.xaxis, plot.yaxis):
            axis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
        if length <= 64:  # lines between cells that are large enough
            edges = [at - 0.5 for at in range(1, length)]
            plot.hlines(edges, -0.5, length - 0.5, color="white", linewidth=0.6)
            plot.vlines(edges, -0.5, length - 0.5, color="white", linewidth=0.6)
        if heads > 1:
            name = textwrap.shorten(f"head {head}: {pattern.for_head(head)}", width=44, placeholder=" …")
            plot.set_title(name, fontsize=9, fontfamily="monospace")
    used = [name for number, name in enumerate(COLORS) if number < 2 or bool(future_HQK.any())]
    marks = [Patch(facecolor=COLORS[name], edgecolor="#9aa5b1", linewidth=0.5, label=name) for name in used]
    figure.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=9)
    return figure
