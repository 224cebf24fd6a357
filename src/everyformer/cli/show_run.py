"""`everyformer show` of runs: what a trained model computes on an example, its embeddings and its curves.

A picture is a file (--out) or lines in the terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich import box
from rich.columns import Columns
from rich.console import Console
from rich.table import Table
from rich.text import Text

from everyformer.cli.options import AsJson, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.show import WIDEST
from everyformer.cli.show import show as show
from everyformer.cli.tables import print_labelled
from everyformer.cli.terminal import console, next_command, next_use

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from everyformer.study.inner_maps import InnerMap
    from everyformer.task.attention_maps import AttentionMaps
    from everyformer.train.trained import TrainedRun

ProbedText = Annotated[
    str | None,
    Parameter(help="The text. Default: the first words of a sonnet; of a translation, a validation sentence."),
]
ProbedExample = Annotated[
    int | None,
    Parameter(help="Instead of a text, an example of the validation data: an image, a node or an episode. Default: 0."),
]
ImageFile = Annotated[Path | None, Parameter(help="The image file (.png, .svg, .pdf). Default: draw in the terminal.")]
Run = Annotated[Path, Parameter(help="The folder of a run.")]
MapsOf = Callable[..., "list[InnerMap]"]


@show.command
def attention(
    run: Run,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = None,
    part: str | None = None,
    layer: int | None = None,
    head: int | None = None,
    out: ImageFile = None,
    step: Step = None,
    beside: Path | None = None,
    imports: Imports = (),
) -> None:
    """Draw the attention weights of a trained model on a text or an example of its data.

    Weights over an image are drawn as a heat map over it, those of a graph along its edges; those of an LSTM are the weights of
    earlier inputs in its state.

    Parameters
    ----------
    part
        Of a model with an encoder: cross, encoder or decoder. Default: cross.
    layer
        One layer. Default: all.
    head
        One head. Default: all.
    beside
        The folder of a second run. Its last checkpoint is drawn beside the first run.
    """
    from everyformer.family.table import find
    from everyformer.study.attention_pictures import draw, selected
    from everyformer.task.attention_maps import attention_maps
    from everyformer.train.trained import load

    _check(out, imports, run)
    runs = [load(run, step=step, data=text is None)]
    runs += [] if beside is None else [load(beside, data=text is None)]
    inputs = [one.task.inference.probe_input(one.network, text, example) for one in runs]
    found = [attention_maps(one.network, read, part) for one, read in zip(runs, inputs, strict=True)]
    maps = [selected(one, layer, head) for one in found]
    if beside is not None:
        names = [find(one.recipe.member).name for one in runs]
        maps = [replace(one, title=f"{name}: {one.title}") for name, one in zip(names, maps, strict=True)]
    if out is None:
        for one in maps:
            print_attention(console(), one)
    _finish(runs[0], run, "attention", out, lambda: draw(*maps))


def print_attention(screen: Console, maps: AttentionMaps) -> None:
    """Print the weights of each head as a matrix, heads side by side where there is room."""
    from everyformer.study.attention_pictures import matrices
    from everyformer.study.text_pictures import matrix

    width = min(screen.width, WIDEST)
    title, heads = matrices(maps)
    screen.print(title, style="bold")
    largest = max(float(one.value_QK.max()) for one in heads) or 1.0
    grids = ["\n".join([one.title, *matrix(one.value_QK / largest, one.queries, one.keys, width)]) for one in heads]
    screen.print(Columns([Text(grid + "\n", no_wrap=True) for grid in grids], padding=(0, 2)), width=width)
    scale = f"up to {largest:.2g}" if maps.image is None else "relative to the largest of the head"
    screen.print(f"a darker cell is more weight, {scale}", style="dim")


@show.command
def halting(
    run: Run,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = None,
    out: ImageFile = None,
    step: Step = None,
    imports: Imports = (),
) -> None:
    """Draw the steps that a universal-transformer or act-rnn takes at each position."""
    from everyformer.study.inner_maps import halting_maps

    title = "steps by position: the weight of each"
    _draw_inner("halting", title, halting_maps, run, text, example, out, step, imports)


@show.command
def buckets(
    run: Run,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = None,
    out: ImageFile = None,
    step: Step = None,
    imports: Imports = (),
) -> None:
    """Draw the hash buckets of a reformer: the bucket of each position by round."""
    from everyformer.study.inner_maps import bucket_maps

    title = "hash buckets: a position attends to earlier ones of its bucket"
    _draw_inner("buckets", title, bucket_maps, run, text, example, out, step, imports)


@show.command
def gates(
    run: Run,
    /,
    *,
    text: ProbedText = None,
    example: ProbedExample = None,
    out: ImageFile = None,
    step: Step = None,
    imports: Imports = (),
) -> None:
    """Draw the gates of a gtrxl or an lstm at each position."""
    from everyformer.study.inner_maps import gate_maps

    title = "gates by position: groups of features, from closed to open"
    _draw_inner("gates", title, gate_maps, run, text, example, out, step, imports)


def _draw_inner(
    kind: str,
    title: str,
    maps_of: MapsOf,
    run: Path,
    text: str | None,
    example: int | None,
    out: Path | None,
    step: Step,
    imports: Sequence[str],
) -> None:
    from everyformer.study.inner_maps import draw
    from everyformer.train.trained import load

    _check(out, imports, run)
    trained = load(run, step=step, data=text is None)
    maps = maps_of(trained.network, trained.task.inference.probe_input(trained.network, text, example))
    if out is None:
        _print_inner(console(), title, maps)
    _finish(trained, run, kind, out, lambda: draw(maps, title))


def _print_inner(screen: Console, title: str, maps: Sequence[InnerMap]) -> None:
    from everyformer.study.inner_maps import DARKER, as_shares
    from everyformer.study.text_pictures import digit, matrix, shade

    width = min(screen.width, WIDEST)
    screen.print(title, style="bold")
    for one in maps:
        screen.print(f"\n{one.title}")
        cell = digit if one.kind == "bucket" else shade
        print("\n".join(matrix(as_shares(one, maps), one.rows, one.labels, width, cell)))
        if one.count_T is not None:
            name = "steps".rjust(max(map(len, one.rows)))
            print(matrix(one.count_T[None], [name], one.labels, width, digit)[-1])
    if maps[0].kind in DARKER:
        largest = max(float(one.value_RT.max()) for one in maps)
        screen.print(f"\na darker cell is {DARKER[maps[0].kind].format(largest)}", style="dim")


@show.command
def spans(
    run: Run,
    /,
    *,
    text: Annotated[str | None, Parameter(help="Draw the spans at each position of this text.")] = None,
    out: ImageFile = None,
    step: Step = None,
    as_json: AsJson = False,
    imports: Imports = (),
) -> None:
    """Draw the learned span of each head of an adaptive-span model, and print the operations that it saves.

    Without a text the spans are means over the validation text; with one they are drawn by position, which shows what a dynamic
    span depends on.
    """
    if text is not None:
        from everyformer.study.inner_maps import span_maps

        _draw_inner("spans", "spans of the heads by position", span_maps, run, text, None, out, step, imports)
        return
    from everyformer.study.spans import draw_spans, spans_of
    from everyformer.train.trained import load

    _check(out, imports, run)
    trained = load(run, step=step)
    result = spans_of(trained.network, trained.task.data)
    if as_json:
        if out is not None:
            draw_spans(result).savefig(out)
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
    _finish(trained, run, "spans", out, lambda: draw_spans(result))


@show.command
def embeddings(run: Run, /, *, out: ImageFile = None, step: Step = None, imports: Imports = ()) -> None:
    """Draw the embeddings of a model's tokens and positions, projected on the plane in which they differ most."""
    from everyformer.study.embedding_maps import draw, embedding_maps
    from everyformer.study.text_pictures import points
    from everyformer.train.trained import load

    _check(out, imports, run)
    trained = load(run, step=step)
    maps = embedding_maps(trained.network, trained.task.data)
    screen = console()
    for one in maps if out is None else ():
        width = min(screen.width, WIDEST)
        shares = " and ".join(f"{share:.0%}" for share in one.share)
        title = f"{one.title}: {len(one.labels):,} vectors in the plane that explains {shares} of their variance"
        screen.print(title, style="bold")
        print("\n".join(points(one.point_N2, one.labels, min(width, 80))))
    _finish(trained, run, "embeddings", out, lambda: draw(maps))


@show.command
def curves(
    runs: Annotated[tuple[Path, ...], Parameter(help="The folders of runs.", consume_multiple=True)],
    /,
    *,
    out: ImageFile = None,
) -> None:
    """Draw the curves of runs, also of those in progress: training and validation in one unit, several runs over each other."""
    from everyformer.study.curves import curves_of, figure_of, short_names, smooth
    from everyformer.study.text_pictures import curves as lines_of

    _check(out, (), None)
    found, screen = curves_of(runs), console()
    if out is not None:
        figure_of(runs).savefig(out)
    elif len(found) == 1:
        one = found[0]
        named = [(one.training, smooth(one.train)), ("validation", one.valid), ("final validation", one.final)]
        print("\n".join(lines_of([pair for pair in named if pair[1]], one.unit, min(screen.width, 80))))
    else:
        every = all(len(one.valid) > 1 for one in found)
        what = "validation" if every else "training, moving average"
        names = short_names(runs)
        pairs = [(name, one.valid if every else smooth(one.train)) for name, one in zip(names, found, strict=True)]
        print("\n".join(lines_of(pairs, f"{found[0].unit}, {what}", min(screen.width, 80))))
    if out is not None:
        screen.print(f"curves: {out}")
        next_command(screen, "evaluate", runs[0])
    else:
        next_command(screen, "show", "curves", *runs, "--out", "curves.png")


def _check(out: Path | None, imports: Sequence[str], run: Path | None) -> None:
    """Finds out before any work whether the file can be written."""
    from everyformer.study.pattern_images import check_file

    import_parts(imports, run)
    if out is not None:
        check_file(out)


def _finish(trained: TrainedRun, run: Path, kind: str, out: Path | None, figure: Callable[[], Figure]) -> None:
    """Write the file, if one is wanted, and print what to try next."""
    screen = console()
    if out is None:
        next_command(screen, "show", kind, run, "--out", f"{kind}.png")
        return
    figure().savefig(out)
    screen.print(f"{kind}: {out}")
    next_use(screen, run, trained)
