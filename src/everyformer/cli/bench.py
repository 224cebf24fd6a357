"""`everyformer bench`: measure speed and memory on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter
from rich.console import Console

from everyformer.cli.bench_family import evaluate, family
from everyformer.cli.bench_generate import generate
from everyformer.cli.bench_report import AsFile, Ceilings, check_files, write_json
from everyformer.cli.bench_train import train
from everyformer.cli.options import Device
from everyformer.cli.tables import print_labelled
from everyformer.cli.terminal import console, next_command

if TYPE_CHECKING:
    from everyformer.study.bench import Row

HEADER = f"{'kind':<10}{'positions':>10}{'batch':>7}{'ms':>10}{'speed-up':>15}{'MiB':>8}{'least':>10}{'most':>10}"
bench = App(name="bench", help="Measure speed and memory on this machine.", help_format="plaintext")
for verb in (train, evaluate, generate, family):
    bench.command(verb)


@bench.command
def attention(
    *kinds: str,
    lengths: Annotated[str | None, Parameter(show_default=False)] = None,
    device: Device = "auto",
    heads: int = 8,
    width: int = 64,
    repeats: int = 5,
    json_file: AsFile = None,
    figure: Path | None = None,
) -> int:
    """Compare sparse with dense causal attention: time and memory of a forward and backward pass.

    A GPU computes in bf16 on batches of 65,536 positions, a CPU in fp32 on one sequence.

    Parameters
    ----------
    kinds
        The kinds of attention, for example local strided. Default: all.
    lengths
        The sequence lengths, for example 1024,4096. Default: 1,024 to 16,384; on a GPU 16,384 and 65,536.
    heads
        The number of heads.
    width
        The width of a head.
    repeats
        The number of measurements, of which the median is reported.
    json_file
        A file for the table as JSON.
    figure
        An image file to draw, for example attention.png.
    """
    from everyformer.study.bench import KINDS, draw, growth
    from everyformer.study.bench import bench as measure
    from everyformer.train.distributed import find_device
    from everyformer.train.provenance import start_log

    chosen = find_device(device)
    default = "16384,65536" if chosen.type == "cuda" else "1024,2048,4096,8192,16384"
    sizes = numbers(lengths or default, "--lengths", 2)
    if min(heads, width, repeats) < 1:
        raise ValueError(f"heads, width and repeats are {heads}, {width} and {repeats}; each must be 1 or more")
    check_files(json_file, figure)
    facts, screen = start_log(seed=0), console()
    ceilings, rows = Ceilings.measure(screen, chosen), list["Row"]()
    for row in measure(sizes, chosen, kinds=kinds or tuple(KINDS), heads=heads, width=width, repeats=repeats):
        if not rows and screen.width >= len(HEADER):
            screen.print(HEADER)
        rows.append(row)
        dense = next(one for one in rows if (one.kind, one.length) == ("dense", row.length))
        _print_row(screen, row, dense.time / row.time)
    if len(sizes) > 1:
        screen.print()
        for kind, time, memory in growth(rows):
            screen.print(f"{kind:<10} time grows as length^{time:.2f}, memory as length^{memory:.2f}")
    write_json(screen, json_file, facts, ceilings, [asdict(row) for row in rows])
    if figure is not None:
        screen.print(f"figure: {draw(rows, figure)}")
    next_command(screen, "bench", "attention", "dense", "local", "--lengths", "1024,2048")
    return 0


def _print_row(screen: Console, row: Row, gain: float) -> None:
    mebibytes = row.memory / 2**20
    if screen.width >= len(HEADER):
        figures = f"{row.length:>10,}{row.batch:>7}{row.time:>10.2f}{gain:>14.2f}x{mebibytes:>8,.0f}{row.least:>10.2f}{row.most:>10.2f}"
        screen.print(f"{row.kind:<10}{figures}")
    else:
        text = f"batch {row.batch}, {row.time:.2f} ms ({row.least:.2f} to {row.most:.2f}), speed-up {gain:.2f}x, {mebibytes:,.0f} MiB"
        print_labelled(screen, {f"{row.kind} {row.length:,}": text})


def numbers(text: str, option: str, least: int) -> list[int]:
    """Returns the numbers of a list such as 1,16."""
    try:
        found = [int(one) for one in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        example = "1024,4096" if least > 1 else "1,2"
        raise ValueError(f"{option} {text} is not a list of numbers of {least} or more; write for example {example}")
    return found
