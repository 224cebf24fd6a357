"""`everyformer bench train`: measure training steps on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from everyformer.cli.bench_report import AsFile, Ceilings, check_files, print_row, write_json
from everyformer.cli.options import Device
from everyformer.cli.terminal import console, next_command

if TYPE_CHECKING:
    import torch

    from everyformer.study.bench_train import Speed

HEADER = (
    f"{'row':<18}{'way':<22}{'ms':>9}{'least':>9}{'most':>9}{'cpu ms':>9}{'tokens/s':>11}{'TFLOP/s':>9}{'of matrix':>10}{'GiB':>7}"
    f"{'warm-up':>9}"
)
TOP = 15  # kernels of a profile that are printed


def train(
    *rows: str,
    steps: int = 20,
    ways: Annotated[str | None, Parameter(show_default=False)] = None,
    profile: Annotated[bool, Parameter(negative=())] = False,
    device: Device = "auto",
    json_file: AsFile = None,
    figure: Path | None = None,
) -> int:
    """Measure training steps, as everyformer train takes them, beside a plain script and transformers.

    A GPU computes at published sizes in bf16, a CPU at small ones in fp32. Operations are 6 N + 12 L T D a token: N weights
    in products, L layers, T positions, width D; of dense attention only. cpu ms is the processor time of a step.

    Parameters
    ----------
    rows
        gpt2 (124M), bytes (Bloem's byte model), long (16,384 positions), or one of long-dense, long-fixed, long-strided,
        long-reformer, long-span and long-dynamic-span. Default: all.
    steps
        The number of steps that are measured after the warm-up.
    ways
        Who trains and how, separated by commas: everyformer, plain or transformers, alone or with -compiled or -graphs (CUDA
        graphs), for example plain-compiled. Default: the usual ones of each row.
    profile
        Print which kernels or operators take the time, instead of the table.
    json_file
        A file for the table as JSON.
    figure
        An image file to draw, for example train.png.
    """
    from everyformer.study.bench_train import bench, choose_rows, choose_ways
    from everyformer.train.distributed import find_device
    from everyformer.train.provenance import start_log

    if steps < 1:
        raise ValueError(f"steps is {steps}; give 1 or more")
    check_files(json_file, figure)
    chosen, asked = find_device(device), None if ways is None else ways.split(",")
    names = choose_rows(rows)
    for name in names:
        choose_ways(name, asked, chosen)  # a wrong name is an error before anything is measured
    facts = start_log(seed=0, packages=("transformers",))
    screen = console()
    if profile:
        _profile(screen, names, asked, chosen, min(steps, 10))
        return 0
    ceilings, found = Ceilings.measure(screen, chosen), list["Speed"]()
    print_row(screen, HEADER, {})
    for group in bench(names, chosen, ways=asked, steps=steps):
        for speed in group:
            _print(screen, speed, ceilings.matrix)
        found += group
    write_json(screen, json_file, facts, ceilings, [_plain(speed, ceilings.matrix) for speed in found])
    _draw(screen, found, figure)
    next_command(screen, "bench", "train", names[0], "--profile")
    return 0


def _plain(speed: Speed, matrix: float) -> dict[str, Any]:
    share = None if speed.teraflops is None else speed.teraflops / matrix
    return {
        "row": speed.row, "way": speed.way, **asdict(speed.steps), "tokens_per_second": speed.rate,
        "teraflops": speed.teraflops, "share_of_matrix_rate": share, "shape": speed.shape._asdict(),
    }  # fmt: skip


def _print(screen: Console, speed: Speed, matrix: float) -> None:
    steps, name = speed.steps, f"{speed.row:<18}{speed.way:<22}"
    if steps.failure is not None:
        print_row(screen, f"{name}failed: {steps.failure}", {f"{speed.row} {speed.way}": f"failed: {steps.failure}"})
        return
    times = [f"{1000 * one:,.2f}" for one in (steps.median, steps.least, steps.most, steps.processor)]
    # A rate without its operations, such as that of sparse attention, is not known.
    rate, share = (
        ("-", "-") if speed.teraflops is None else (f"{speed.teraflops:.3g}", f"{speed.teraflops / matrix:.1%}")
    )
    memory = "-" if steps.memory is None else f"{steps.memory / 2**30:.2f}"
    cells = [f"{speed.rate:>11,.0f}", f"{rate:>9}", f"{share:>10}", f"{memory:>7}", f"{steps.warmup:>8.1f}s"]
    spread = f"{times[0]} ms ({times[1]} to {times[2]}), {times[3]} cpu ms"
    rates = f"{speed.rate:,.0f} tokens/s, {rate} TFLOP/s, {share} of the matrix rate"
    line = name + "".join(f"{one:>9}" for one in times) + "".join(cells)
    end = f"{memory} GiB, warm-up {steps.warmup:.1f} s"
    print_row(screen, line, {f"{speed.row} {speed.way}": f"{spread}, {rates}, {end}"})


def _draw(screen: Console, found: list[Speed], figure: Path | None) -> None:
    from everyformer.study.bench_figure import Bar, draw
    from everyformer.study.bench_train import OURS

    bars = []
    for one in found:
        panel, _, rest = one.row.partition("-")  # all rows at the same length share their axis
        if one.steps.failure is None:
            least, most = (one.shape.tokens / seconds for seconds in (one.steps.most, one.steps.least))
            bars.append(Bar(panel, ", ".join(filter(None, (rest, one.way))), one.rate, least, most, one.way in OURS))
    if figure is not None and bars:
        screen.print(f"figure: {draw(bars, 'tokens per second', figure)}")


def _profile(screen: Console, names: list[str], asked: list[str] | None, device: torch.device, steps: int) -> None:
    from tempfile import TemporaryDirectory

    from everyformer.study.bench_profile import profile
    from everyformer.study.bench_steps import reason
    from everyformer.study.bench_train import OURS, choose_ways, way_of

    unit = "kernel" if device.type == "cuda" else "operator"
    with TemporaryDirectory() as folder:
        for name in names:
            for way in choose_ways(name, asked, device):
                if asked is None and way not in OURS:
                    continue
                try:
                    found = profile(way_of(name, way, device, Path(folder)), device, steps)
                except Exception as error:  # the other rows are profiled all the same
                    screen.print(f"{name} {way} failed: {reason(error)}")
                    continue
                screen.print(
                    f"{name} {way}: {found.milliseconds:.2f} ms a step, {found.idle:.1%} of it without any {unit}"
                )
                for one in found.kernels[:TOP]:
                    line = f"  {one.share:>6.1%}{one.milliseconds:>10.3f} ms{one.calls:>8.0f} x  {one.name[:100]}"
                    print_row(
                        screen, line, {f"{one.share:.1%}": f"{one.milliseconds:.3f} ms, {one.calls:.0f} x {one.name}"}
                    )
