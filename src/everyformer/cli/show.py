"""`everyformer show`: draw patterns, and what a trained model computes, in the terminal and in files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from cyclopts import App
from rich.columns import Columns
from rich.text import Text

from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.tables import print_labelled
from everyformer.cli.terminal import console, next_command

if TYPE_CHECKING:
    from everyformer.attention.pattern import Pattern

WIDEST = 200  # characters of a picture in a pipe, which has no width
show = App(name="show", help="Draw patterns and curves, and what a trained model computes inside.")


@show.command(name="family")
def family_patterns(*, out: Path | None = None) -> None:
    """Draw the attention patterns of the family: rows are queries, columns are keys.

    Parameters
    ----------
    out
        The image file (.png, .svg, .pdf). Default: draw in the terminal.
    """
    from everyformer.study.family_patterns import draw, panels
    from everyformer.study.pattern_images import check_file
    from everyformer.study.text_pictures import matrix

    screen = console()
    if out is not None:
        check_file(out)
        draw(panels()).savefig(out)
        screen.print(f"family: {out}")
    else:
        screen.print("rows are queries, columns are keys", style="dim")
        texts = []
        for panel in panels():
            cells = matrix(panel.value_QK, [""] * len(panel.value_QK), [""] * len(panel.value_QK), WIDEST)
            texts.append(Text("\n".join((panel.name, panel.what, *cells, "")), no_wrap=True))
        screen.print(Columns(texts, padding=(0, 2)), width=min(screen.width, WIDEST))
    next_command(screen, *(("family",) if out else ("show", "family", "--out", "family.png")))


@show.command
def pattern(
    text: str,
    /,
    *,
    length: int = 32,
    heads: int | None = None,
    out: Path | None = None,
    imports: Imports = (),
) -> None:
    """Draw an attention pattern: rows are queries, columns are keys.

    Parameters
    ----------
    text
        The pattern, for example "causal & window(8)" or "by_head(causal, window(4))".
    length
        The number of positions.
    heads
        The number of heads. Default: the number of patterns in by_head, else 1.
    out
        An image file to draw as well (.png, .svg, .pdf).
    """
    import_parts(imports)
    from everyformer.attention.parse import parse
    from everyformer.attention.pattern import ByHead
    from everyformer.study.pattern_images import check_file, check_size

    value = parse(text)
    distinct = max((len(part.patterns) for part in value.walk() if isinstance(part, ByHead)), default=1)
    heads = distinct if heads is None else heads
    check_size(length, heads)
    if out is not None:
        check_file(out)
    _draw_pattern(value, length, heads, out)
    if out is not None:
        next_command(console(), "show", "pattern", "causal & (window(8) | stride(8))", "--length", "64")
    else:
        more = [] if heads == distinct else ["--heads", str(heads)]
        next_command(console(), "show", "pattern", text, "--length", str(length), *more, "--out", "pattern.png")


def _draw_pattern(value: Pattern, length: int, heads: int, out: Path | None) -> None:
    """Print a pattern as a grid for each head, with its facts, and draw it into a file."""
    from everyformer.attention.kernels.blocked import FINEST, computed_fraction
    from everyformer.attention.kernels.request import Request
    from everyformer.study.pattern_images import draw, example_context, grid, pool

    context, notes = example_context(value, length)
    allowed_HQK = value.mask(length, heads=heads, context=context)

    screen = console()
    width = min(screen.width, WIDEST)
    scale = math.ceil(length / max(8, width - len(str(length)) - 3))  # the rest is for the numbers and the frame
    if scale > 1:
        notes.append(
            f"a cell stands for {scale} x {scale} positions; it is filled if any query in it attends to any key in it"
        )
    screen.print(str(value), style="bold")
    screen.print("rows are queries, columns are keys", style="dim")
    grids = [Text("\n".join(grid(cells_QK, scale)), no_wrap=True) for cells_QK in pool(allowed_HQK, scale)]
    if heads > 1:
        for head in range(heads):
            screen.print(f"head {head}: {value.for_head(head)}")
        grids = [Text(f"\nhead {head}\n", no_wrap=True) + one for head, one in enumerate(grids)]
    screen.print(Columns(grids, padding=(0, 2)) if heads > 1 else grids[0], width=width)

    request = Request.of(value, length, length, heads)
    computed_HNN, fraction = pool(allowed_HQK, FINEST), computed_fraction(request)
    facts = {
        "allowed": f"{allowed_HQK.float().mean():.1%} of the pairs ({int(allowed_HQK.sum()):,} of {allowed_HQK.numel():,})",
        "sees future": "yes" if value.attends_to_future(heads=heads) else "no",
        "computed blocks": f"{int(computed_HNN.sum()):,} of {computed_HNN.numel():,} blocks of {FINEST} x {FINEST}",
        "blocked kernel": f"computes {fraction:.1%} of all scores" + ", with padding" * (fraction > 1),
    }
    print_labelled(screen, facts)
    for note in notes:
        screen.print(f"note: {note}", style="dim")
    if out is not None:
        draw(value, allowed_HQK).savefig(out)
        screen.print(f"wrote {out}")
