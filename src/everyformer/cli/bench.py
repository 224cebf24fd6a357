"""`everyformer bench`: measures the speed of the library on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from everyformer.cli.terminal import console, next_command

bench = App(name="bench", help="Measure speed and memory on this machine.", help_format="plaintext")


@bench.command
def attention(
    *kinds: str,
    lengths: Annotated[str | None, Parameter(show_default=False)] = None,
    device: str = "auto",
    heads: int = 8,
    width: int = 64,
    repeats: int = 5,
    figure: Path | None = None,
) -> int:
    """Measure time and memory of a forward and backward pass of sparse attention, against dense causal attention.

    Parameters
    ----------
    kinds
        The kinds to measure, such as local strided. Default: all of them.
    lengths
        Numbers of positions, such as 1024,4096. Default: 1,024 to 16,384, on a GPU 16,384 and 65,536.
    device
        cpu, cuda, or auto for the best one there is. A GPU computes in bf16, 65,536 positions in a pass; a CPU in fp32, one sequence.
    heads
        The number of heads.
    width
        The width of a head.
    repeats
        How often each kind is measured; the median counts.
    figure
        An image file to write the curves to, such as attention.png.
    """
    from everyformer.study.bench import KINDS, Row, draw, exponent
    from everyformer.study.bench import bench as measure
    from everyformer.study.picture import check_file
    from everyformer.train.distributed import find_device

    found_device = find_device(device)
    default = "16384,65536" if found_device.type == "cuda" else "1024,2048,4096,8192,16384"
    sizes = _numbers(lengths or default)
    if min(heads, width, repeats) < 1:
        raise ValueError(f"heads, width and repeats are {heads}, {width} and {repeats}; give at least 1 of each")
    if figure is not None:
        check_file(figure)
    screen, rows = console(), list[Row]()
    for row in measure(sizes, found_device, kinds=kinds or tuple(KINDS), heads=heads, width=width, repeats=repeats):
        if not rows:
            screen.print(f"{'kind':<10}{'positions':>10}{'batch':>7}{'ms':>10}{'against dense':>15}{'MiB':>8}")
        rows.append(row)
        dense = next(one for one in rows if (one.kind, one.length) == ("dense", row.length))
        numbers = f"{row.length:>10,}{row.batch:>7}{row.time:>10.2f}{dense.time / row.time:>14.2f}x{row.memory / 2**20:>8,.0f}"
        screen.print(f"{row.kind:<10}{numbers}")
    if len(sizes) > 1:
        screen.print()
        for kind in dict.fromkeys(row.kind for row in rows):
            of_kind = [row for row in rows if row.kind == kind]
            time = exponent((row.length, row.time / row.batch) for row in of_kind)
            memory = exponent((row.length, row.memory / row.batch) for row in of_kind)
            screen.print(f"{kind:<10} grows with the length to the power {time:.2f} in time, {memory:.2f} in memory")
    if figure is not None:
        screen.print(f"figure: {draw(rows, figure)}")
    next_command(screen, "bench", "attention", "dense", "local", "--lengths", "1024,2048")
    return 0


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(one) for one in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 2:
        raise ValueError(f"--lengths {text} is not a list of positions; write for example 1024,4096")
    return numbers
