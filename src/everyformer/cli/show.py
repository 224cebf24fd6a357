"""`everyformer show`: pictures in the terminal, and in files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich import box
from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from everyformer.cli.terminal import console, next_command

show = App(name="show", help="Draw a part of a Transformer.")


@show.command
def attention(
    run: Path,
    /,
    *,
    text: str | None = None,
    out: Path = Path("attention.png"),
    step: int | Literal["best"] | None = None,
    beside: Path | None = None,
) -> None:
    """Draw what a trained model looks at while it reads a text.

    Parameters
    ----------
    run
        The folder of a run.
    text
        What it reads; without it, the beginning of a sonnet, as much of it as the model can read.
    out
        The picture (.png, .svg, .pdf).
    step
        The checkpoint: a number, or best; without it, the last.
    beside
        The folder of another run, whose last checkpoint is drawn beside the first.
    """
    from everyformer.family.table import find
    from everyformer.study.look import draw, reading
    from everyformer.study.picture import check_file
    from everyformer.train.trained import open_run

    check_file(out)
    found = open_run(run, step=step)
    runs = [found] if beside is None else [found, open_run(beside)]
    sights = [reading(one.network, one.task.data, text) for one in runs]
    if beside is not None:
        sights = [
            replace(sight, title=f"{find(one.recipe.member).name}: {sight.title}")
            for sight, one in zip(sights, runs, strict=True)
        ]
    draw(*sights).savefig(out)
    screen = console()
    screen.print(f"attention: {out}", soft_wrap=True)
    if found.can_generate:
        next_command(screen, "generate", run, hint=found.task.inference.example)
    else:
        next_command(screen, "evaluate", run)


@show.command
def spans(
    run: Path,
    /,
    *,
    out: Path | None = None,
    step: int | Literal["best"] | None = None,
    as_json: Annotated[bool, Parameter("--json", negative=(), show_default=False)] = False,
) -> None:
    """Tell how far each head of a model with adaptive spans looks, and what that saves.

    Parameters
    ----------
    run
        The folder of a run.
    out
        Draw into this file too (.png, .svg, .pdf).
    step
        The checkpoint: a number, or best; without it, the last.
    as_json
        Print JSON.
    """
    from everyformer.study.look import draw_spans, spans_of
    from everyformer.study.picture import check_file
    from everyformer.train.trained import open_run

    if out is not None:
        check_file(out)
    opened = open_run(run, step=step)
    found = spans_of(opened.network, opened.task.data)
    if out is not None:
        draw_spans(found).savefig(out)
    if as_json:
        print(json.dumps(asdict(found)))
        return
    screen = console()
    table = Table("layer", *(f"head {head}" for head in range(max(map(len, found.each)))), box=box.SIMPLE_HEAD)
    for layer, spans_H in enumerate(found.each):
        table.add_row(str(layer), *(f"{z:.1f}" for z in spans_H))
    screen.print(table)
    for label, fact in {
        "span": f"{found.mean:.1f} on average",
        "keys": f"{found.keys:.1f} of {found.most:,.0f} that a head could see ({found.keys / found.most:.1%})",
        "operations": f"{found.flops:.3g} a token, {found.most_flops:.3g} with every span at its longest "
        f"({found.flops / found.most_flops:.1%})",
    }.items():
        screen.print(f"{label:<16}{fact}", soft_wrap=True)
    if out is not None:
        screen.print(f"wrote {out}", soft_wrap=True)
    next_command(screen, *(("evaluate", run) if out else ("show", "spans", run, "--out", "spans.png")))


@show.command
def pattern(text: str, /, *, length: int = 32, heads: int | None = None, out: Path | None = None) -> None:
    """Draw who sees whom: queries go down, keys go across.

    Parameters
    ----------
    text
        The pattern, such as "causal & window(8)" or "by_head(causal, window(4))".
    length
        How many positions.
    heads
        How many heads; as many as by_head has patterns, unless given.
    out
        Draw into this file too (.png, .svg, .pdf).
    """
    from everyformer.attention.kernels.blocked import FINEST, computed_fraction
    from everyformer.attention.parse import parse
    from everyformer.attention.pattern import ByHead, for_head
    from everyformer.study.picture import check_file, check_size, draw, example_context, grid, pool

    value = parse(text)
    dealt = max((len(part.patterns) for part in value.walk() if isinstance(part, ByHead)), default=1)
    heads = dealt if heads is None else heads
    check_size(length, heads)
    if out is not None:
        check_file(out)
    context, notes = example_context(value, length)
    seen_HQK = value.mask(length, heads=heads, context=context)

    screen = console()
    width = min(screen.width, 200)  # a pipe has no width, but a picture should have one
    scale = math.ceil(length / max(8, width - len(str(length)) - 3))  # beside the numbers and the frame
    if scale > 1:
        notes.append(f"a cell stands for {scale} x {scale} positions and is filled where anything is seen")
    screen.print(str(value), style="bold", soft_wrap=True)
    screen.print("queries go down, keys go across", style="dim")
    grids = [Text("\n".join(grid(cells_QK, scale)), no_wrap=True) for cells_QK in pool(seen_HQK, scale)]
    if heads > 1:
        for head in range(heads):
            screen.print(f"head {head}: {for_head(value, head)}", soft_wrap=True)
        grids = [Text(f"\nhead {head}\n", no_wrap=True) + one for head, one in enumerate(grids)]
    screen.print(Columns(grids, padding=(0, 2)) if heads > 1 else grids[0], width=width)

    live_HNN, share = pool(seen_HQK, FINEST), computed_fraction(value, length, length, heads)
    for label, fact in {
        "seen": f"{seen_HQK.float().mean():.1%} of the pairs ({int(seen_HQK.sum()):,} of {seen_HQK.numel():,})",
        "looks ahead": "yes" if value.attends_to_future(heads=heads) else "no",
        "live blocks": f"{int(live_HNN.sum()):,} of {live_HNN.numel():,} blocks of {FINEST} x {FINEST}",
        "blocked kernel": f"computes {share:.1%} of all scores" + ", with filler" * (share > 1),
    }.items():
        screen.print(f"{label:<16}{fact}", soft_wrap=True)
    for note in notes:
        screen.print(f"note: {note}", style="dim", soft_wrap=True)
    if out is None:
        more = [] if heads == dealt else ["--heads", str(heads)]
        next_command(screen, "show", "pattern", text, "--length", str(length), *more, "--out", "pattern.png")
    else:
        draw(value, seen_HQK).savefig(out)
        screen.print(f"wrote {out}", soft_wrap=True)
        next_command(screen, "show", "pattern", "causal & (window(8) | stride(8))", "--length", "64")
