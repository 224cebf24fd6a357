"""`everyformer show`: draw patterns, and what a trained model computes, in the terminal and in files."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter
from rich import box
from rich.columns import Columns
from rich.table import Table
from rich.text import Text

from everyformer.cli.options import AsJson, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.tables import print_labelled
from everyformer.cli.terminal import console, next_command

if TYPE_CHECKING:
    from everyformer.attention.pattern import Pattern
    from everyformer.train.trained import TrainedRun

show = App(name="show", help="Draw patterns, attention weights, spans, halting, hash buckets and gates.")
ProbedText = Annotated[
    str | None,
    Parameter(help="The text. Default: the first words of a sonnet; of a translation, a validation sentence."),
]
ProbedExample = Annotated[
    int, Parameter(help="Instead of a text, an example of the validation data: an image, a node or an episode.")
]


@show.command
def attention(
    run: Path,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = 0,
    part: str | None = None,
    out: Path = Path("attention.png"),
    step: Step = None,
    beside: Path | None = None,
    imports: Imports = (),
) -> None:
    """Draw the attention weights of a trained model on a text or an example of its data.

    Weights over an image are drawn as a heat map over it, those of a graph along its edges.

    Parameters
    ----------
    run
        The folder of a run.
    part
        Of a model with an encoder: cross, encoder or decoder. Default: cross.
    out
        The image file (.png, .svg, .pdf).
    beside
        The folder of a second run. Its last checkpoint is drawn beside the first run.
    """
    import_parts(imports, run)
    from everyformer.family.table import find
    from everyformer.study.attention_pictures import draw
    from everyformer.study.pattern_images import check_file
    from everyformer.task.attention_maps import attention_maps
    from everyformer.train.trained import load

    check_file(out)
    trained = load(run, step=step, data=text is None)  # without a text, an example of the data is drawn
    runs = [trained] if beside is None else [trained, load(beside, data=text is None)]
    inputs = [one.task.inference.probe_input(one.network, text, example) for one in runs]
    maps = [attention_maps(one.network, read, part) for one, read in zip(runs, inputs, strict=True)]
    if beside is not None:
        maps = [
            replace(one_map, title=f"{find(one.recipe.member).name}: {one_map.title}")
            for one_map, one in zip(maps, runs, strict=True)
        ]
    draw(*maps).savefig(out)
    _finish(trained, run, "attention", out)


@show.command
def halting(
    run: Path,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = 0,
    out: Path = Path("halting.png"),
    step: Step = None,
    imports: Imports = (),
) -> None:
    """Draw the steps that a universal-transformer or act-rnn takes at each position.

    Parameters
    ----------
    run
        The folder of a run.
    out
        The image file (.png, .svg, .pdf).
    """
    import_parts(imports, run)
    _draw_inner(
        "halting", "steps by position: the weight of each, and where it halts (red)", run, text, example, out, step
    )


@show.command
def buckets(
    run: Path,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = 0,
    out: Path = Path("buckets.png"),
    step: Step = None,
    imports: Imports = (),
) -> None:
    """Draw the hash buckets of a reformer: the bucket of each position by round.

    Parameters
    ----------
    run
        The folder of a run.
    out
        The image file (.png, .svg, .pdf).
    """
    import_parts(imports, run)
    _draw_inner(
        "buckets", "hash buckets: a position attends to earlier ones of its bucket", run, text, example, out, step
    )


@show.command
def gates(
    run: Path,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = 0,
    out: Path = Path("gates.png"),
    step: Step = None,
    imports: Imports = (),
) -> None:
    """Draw the gates of a gtrxl or an lstm at each position.

    Parameters
    ----------
    run
        The folder of a run.
    out
        The image file (.png, .svg, .pdf).
    """
    import_parts(imports, run)
    _draw_inner("gates", "gates by position: groups of features, from closed to open", run, text, example, out, step)


def _draw_inner(
    kind: str, title: str, run: Path, text: str | None, example: int, out: Path, step: int | Literal["best"] | None
) -> None:
    from everyformer.study import inner_maps
    from everyformer.study.pattern_images import check_file
    from everyformer.train.trained import load

    check_file(out)
    trained = load(run, step=step, data=text is None)
    functions = {
        "halting": inner_maps.halting_maps,
        "buckets": inner_maps.bucket_maps,
        "gates": inner_maps.gate_maps,
    }
    inputs = trained.task.inference.probe_input(trained.network, text, example)
    inner_maps.draw(functions[kind](trained.network, inputs), title).savefig(out)
    _finish(trained, run, kind, out)


def _finish(trained: TrainedRun, run: Path, kind: str, out: Path) -> None:
    screen = console()
    screen.print(f"{kind}: {out}")
    if trained.can_generate:
        next_command(screen, "generate", run, hint=trained.task.inference.example)
    else:
        next_command(screen, "evaluate", run)


@show.command
def spans(
    run: Path,
    /,
    *,
    out: Path | None = None,
    step: Step = None,
    as_json: AsJson = False,
    imports: Imports = (),
) -> None:
    """Print the learned span of each head of an adaptive-span model, and the operations it saves.

    Parameters
    ----------
    run
        The folder of a run.
    out
        An image file to draw as well (.png, .svg, .pdf).
    """
    import_parts(imports, run)
    from everyformer.study.pattern_images import check_file
    from everyformer.study.spans import draw_spans, spans_of
    from everyformer.train.trained import load

    if out is not None:
        check_file(out)
    trained = load(run, step=step)
    result = spans_of(trained.network, trained.task.data)
    if out is not None:
        draw_spans(result).savefig(out)
    if as_json:
        print(json.dumps(asdict(result)))
        return
    screen = console()
    table = Table("layer", *(f"head {head}" for head in range(max(map(len, result.each)))), box=box.SIMPLE_HEAD)
    for layer, spans_H in enumerate(result.each):
        table.add_row(str(layer), *(f"{z:.1f}" for z in spans_H))
    screen.print(table)
    facts = {
        "span": f"{result.mean:.1f} on average",
        "keys": f"{result.keys:.1f} of {result.most:,.0f} that a head could attend to ({result.keys / result.most:.1%})",
        "operations": f"{result.flops:.3g} per token, {result.most_flops:.3g} if every span had its maximum "
        f"({result.flops / result.most_flops:.1%})",
    }
    print_labelled(screen, facts)
    if out is not None:
        screen.print(f"wrote {out}")
    next_command(screen, *(("evaluate", run) if out else ("show", "spans", run, "--out", "spans.png")))


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
    width = min(screen.width, 200)  # a pipe has no width
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
