"""Writes docs/family.md, and the page and the image of each member in docs/family/, from the members themselves:

    python -m tests.family.make_family_page

A test compares the pages with what this script would write, so run it after a change to a member.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everyformer.attention.pattern import ByHead, Pattern
from everyformer.cli.family import human
from everyformer.family.member import Member
from everyformer.family.published import PUBLISHED
from everyformer.family.table import MEMBERS, parameters
from everyformer.network.multi_head_attention import Attention
from everyformer.study.example import models
from everyformer.study.family_listing import NOTHING, row
from everyformer.study.pattern_images import COLORS, example_context

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[2] / "docs"
PAGE, IMAGES = DOCS / "family.md", DOCS / "family"
LENGTH, HEADS = 32, 4
# The tiny sizes, with patterns small enough to see in an image of 32 positions. A member may be drawn in several variants.
DRAWN: dict[str, list[dict[str, Any]]] = {
    "image-transformer": [{"pattern": "local(8, 8)"}, {"rows": 8, "columns": 8, "pattern": "local2d(8, 4, 4, 2, 2)"}],
    "sparse-transformer": [{}, {"patterns": "causal & (window(8) | stride(8))"}],
    "reformer": [{"pattern": "hashed(2, 8, 4)", "local_pattern": "causal & local(4, 4)"}],
}
HEADER = """# The family

Each member has a page: the idea, the attention pattern, the choices that make the member, its sizes beside the paper's parameter
counts, and the command that trains it. `everyformer family NAME --size SIZE` prints all fields of a member, and
`everyformer settings NAME` what can be set. These pages are written by `python -m tests.family.make_family_page`.

![The attention patterns of the family](pictures/patterns.png)

| member | paper | idea |
| --- | --- | --- |
"""
LEGEND = """In the image each row is a query and each column a key. In a colored cell the query attends to the key: blue if the key is at
the same position or before, orange if it is after."""
NOTES = """`→` stands between encoder and decoder, and `–` for nothing. The sizes named tiny are ours, for tests and first runs. An asterisk
marks a count that differs from the paper's; the last column gives the reason, and other differences from the paper. Differences in the
mathematics are described in the docstring of [the member's file](../../{path})."""


def drawn_patterns(member: Member) -> list[Pattern]:
    """The different patterns of a member, one per head where heads differ."""
    patterns: dict[Pattern, None] = {}
    for changes in DRAWN.get(member.name, [{}]):
        for model in models(member.value("tiny", **changes)):
            for attention in model.body.sublayers():
                pattern = attention.pattern if isinstance(attention, Attention) else None
                heads = pattern.patterns[:HEADS] if isinstance(pattern, ByHead) else (pattern,) if pattern else ()
                patterns |= dict.fromkeys(heads)
    return list(patterns)


def allowed(pattern: Pattern) -> Tensor:
    context, _ = example_context(pattern, LENGTH)
    return pattern.mask(LENGTH, heads=1, context=context)[0]


def draw_cells(plot: Axes, pattern: Pattern) -> None:
    from matplotlib.colors import ListedColormap

    allowed_QK = allowed(pattern)
    future_QK = allowed_QK & torch.ones_like(allowed_QK).triu(1)
    colors = ListedColormap(list(COLORS.values()))
    plot.imshow((allowed_QK.int() + future_QK.int()).numpy(), cmap=colors, vmin=0, vmax=2, interpolation="nearest")
    plot.set_xticks([at - 0.5 for at in range(1, LENGTH)], minor=True)
    plot.set_yticks([at - 0.5 for at in range(1, LENGTH)], minor=True)
    plot.grid(which="minor", color="white", linewidth=0.3)
    plot.tick_params(which="both", length=0, labelbottom=False, labelleft=False)
    for spine in plot.spines.values():
        spine.set_visible(False)


def write_images() -> None:
    """One image per member that attends: its patterns side by side, each with its text below."""
    from matplotlib.figure import Figure

    IMAGES.mkdir(exist_ok=True)
    for member in MEMBERS.values():
        if patterns := drawn_patterns(member):
            figure = Figure((2.3 * len(patterns), 2.6), dpi=100, layout="constrained")
            for plot, pattern in zip(figure.subplots(1, len(patterns), squeeze=False).flat, patterns, strict=True):
                draw_cells(plot, pattern)
                plot.set_xlabel(textwrap.fill(str(pattern), 34), fontsize=6.5, fontfamily="monospace")
            figure.savefig(IMAGES / f"{member.name}.png")


def sizes_table(member: Member) -> str:
    lines = ["| size | parameters | paper | departures |", "| --- | ---: | ---: | --- |"]
    for size in member.sizes:
        count, paper = parameters(member.value(size)), member.paper_parameters.get(size)
        mark = "\\*" if differs(count, paper) else ""
        stated = NOTHING if paper is None else f"{paper:g}M"
        reason = member.departures.get(size, "")
        first = next(one for one in member.sizes if member.departures.get(one, "") == reason)
        shown = reason if first == size else f"as {first}" if reason else ""
        lines.append(f"| {size} | {human(count)}{mark} | {stated} | {shown} |")
    return "\n".join(lines)


def differs(count: int, paper: float | None) -> bool:
    """Whether a count differs from the paper's, rounded to the digits that the paper gives."""
    return paper is not None and round(count / 1e6, len(f"{paper:g}".partition(".")[2])) != paper


def choices(member: Member) -> str:
    """The five choices of the default size, and its sublayers."""
    cells = row(member)
    questions = {
        "who attends to whom": "pattern",
        "how strongly": "score mods",
        "what a layer is made of": "sublayers",
        "how a sublayer joins the stream": "residual",
        "how often": "depth",
        "what is carried over": "cache",
    }
    lines = ["| question | choice |", "| --- | --- |"]
    for question, column in questions.items():
        sides = [cells[column]] if isinstance(cells[column], str) else dict.fromkeys(cells[column])
        lines.append(f"| {question} | {' → '.join(sides).replace('|', '&#124;')} |")
    return "\n".join(lines)


def member_page(member: Member) -> str:
    parts = [f"# {member.name}", f"{member.paper}. {member.idea}"]
    if drawn_patterns(member):
        parts += [f"![pattern of {member.name}]({member.name}.png)", LEGEND]
    command = f"```sh\neveryformer train {member.name} --size tiny\n```"
    path = member.make.__module__.replace(".", "/")
    parts += ["## Choices", choices(member), "## Sizes", sizes_table(member), NOTES.format(path=f"src/{path}.py")]
    parts += ["## Train it", command]
    if found := PUBLISHED.get(member.name):
        missing = f" Not part of it: {found.missing}." if found.missing else ""
        text = (
            f"With `--recipe paper` it has the settings of {found.source} (sizes: {', '.join(found.sizes)}).{missing}"
        )
        parts.append(textwrap.fill(text, 120))
    return "\n\n".join(parts) + "\n"


def page() -> str:
    rows = (
        f"| [{one.name}](family/{one.name}.md) | {one.paper} | {one.idea.partition('. ')[0]}. |"
        for one in MEMBERS.values()
    )
    return HEADER + "\n".join(rows) + "\n"


def pages() -> dict[Path, str]:
    return {PAGE: page()} | {IMAGES / f"{one.name}.md": member_page(one) for one in MEMBERS.values()}


if __name__ == "__main__":
    write_images()
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
