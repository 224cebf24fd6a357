"""`everyformer bench family` and `everyformer bench evaluate`: measure all members, and an evaluation, on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from everyformer.cli.bench_report import AsFile, Ceilings, check_files, print_row, write_json
from everyformer.cli.options import Device
from everyformer.cli.terminal import console, next_command

if TYPE_CHECKING:
    from everyformer.study.bench_evaluate import EvaluationSpeed
    from everyformer.study.bench_family import MemberSpeed

HEADER = (
    f"{'member':<23}{'task':<11}{'parameters':>13}{'ms':>10}{'least':>10}{'most':>10}{'cpu ms':>10}{'targets/s':>12}{'tokens/s':>10}"
    f"{'MiB':>9}"
)
EVALUATED = f"{'way':<12}{'positions/s':>13}{'least':>13}{'most':>13}{'bytes/s':>13}{'of forward':>12}"


def family(
    *members: str,
    size: str = "tiny",
    batch: int = 8,
    steps: int = 10,
    tokens: int = 32,
    device: Device = "auto",
    json_file: AsFile = None,
    figure: Path | None = None,
) -> int:
    """Measure members: training steps, evaluation, generation and memory, each on its own task.

    ms are of a training step, targets/s of an evaluation, tokens/s of the generation of one text or image, MiB of the tensors in a
    step. A GPU computes in bf16, a CPU in fp32.

    Parameters
    ----------
    members
        Members of the family. Default: all.
    size
        The size of each member.
    batch
        The examples in a step.
    steps
        The number of steps that are measured after the warm-up.
    tokens
        The number of tokens to generate.
    json_file
        A file for the table as JSON.
    figure
        An image file to draw, for example family.png.
    """
    from everyformer.study.bench_family import bench, choose_members
    from everyformer.train.distributed import find_device
    from everyformer.train.provenance import start_log

    if min(batch, steps, tokens) < 1:
        raise ValueError(f"batch, steps and tokens are {batch}, {steps} and {tokens}; each must be 1 or more")
    check_files(json_file, figure)
    chosen, names = find_device(device), choose_members(members)
    facts, screen = start_log(seed=0), console()
    ceilings, found = Ceilings.measure(screen, chosen), list["MemberSpeed"]()
    print_row(screen, HEADER, {})
    for one in bench(names, chosen, size=size, batch=batch, steps=steps, tokens=tokens):
        _print(screen, one)
        found.append(one)
    write_json(screen, json_file, facts, ceilings, [asdict(one) for one in found])
    _draw(screen, found, figure)
    next_command(screen, "bench", "family", names[0], "--steps", "20")
    return 0


def _print(screen: Console, one: MemberSpeed) -> None:
    if one.failure is not None:
        text = f"failed: {one.failure}"
        print_row(screen, f"{one.member:<23}{text}", {one.member: text})
        return
    steps = one.steps
    times = [f"{1000 * seconds:,.2f}" for seconds in (steps.median, steps.least, steps.most, steps.processor)]
    evaluated, generated = ("-" if rate is None else f"{rate:,.0f}" for rate in (one.evaluated, one.generated))
    memory = "-" if steps.memory is None else f"{steps.memory / 2**20:,.1f}"
    line = f"{one.member:<23}{one.task:<11}{one.parameters:>13,}" + "".join(f"{time:>10}" for time in times)
    text = f"{one.task}, {one.parameters:,} parameters, {times[0]} ms ({times[1]} to {times[2]}), {times[3]} cpu ms, "
    text += f"{evaluated} targets/s, {generated} tokens/s, {memory} MiB"
    print_row(screen, f"{line}{evaluated:>12}{generated:>10}{memory:>9}", {one.member: text})


def _draw(screen: Console, found: list[MemberSpeed], figure: Path | None) -> None:
    from everyformer.study.bench_figure import Bar, draw

    shown = [one for one in found if one.failure is None]
    if figure is not None and shown:
        bars = []
        for one in shown:
            median, least, most = (1000 * time for time in (one.steps.median, one.steps.least, one.steps.most))
            bars.append(Bar("a training step", one.member, median, least, most))
        screen.print(f"figure: {draw(bars, 'ms', figure)}")


def evaluate(
    *,
    size: int | None = None,
    repeats: int = 5,
    device: Device = "auto",
    json_file: AsFile = None,
    figure: Path | None = None,
) -> int:
    """Measure the evaluation of Bloem's byte model with a stride of half a window, beside its forward pass.

    of forward is the share of the forward pass's positions that the evaluation computes per second.

    Parameters
    ----------
    size
        The number of bytes to evaluate. Default: 16,384; on a GPU 5,000,000.
    repeats
        The number of measurements, of which the median is reported.
    json_file
        A file for the table as JSON.
    figure
        An image file to draw, for example evaluate.png.
    """
    from everyformer.study.bench_evaluate import BYTES, FEW_BYTES, LEAST, bench
    from everyformer.train.distributed import find_device
    from everyformer.train.provenance import start_log

    check_files(json_file, figure)
    chosen = find_device(device)
    count = BYTES.get(chosen.type, FEW_BYTES) if size is None else size
    if repeats < 1 or count < LEAST:
        raise ValueError(
            f"size and repeats are {count} and {repeats}; give {LEAST} bytes or more, and 1 repeat or more"
        )
    facts, screen = start_log(seed=0), console()
    ceilings, found = Ceilings.measure(screen, chosen), list["EvaluationSpeed"]()
    print_row(screen, EVALUATED, {})
    for one in bench(chosen, count, repeats=repeats):
        found.append(one)
        scored = "-" if one.scored is None else f"{one.scored:,.0f}"
        rates, share = (
            [f"{rate:,.0f}" for rate in (one.positions, one.least, one.most)],
            one.positions / found[0].positions,
        )
        line = f"{one.way:<12}" + "".join(f"{cell:>13}" for cell in (*rates, scored)) + f"{share:>12.1%}"
        text = f"{rates[0]} positions/s ({rates[1]} to {rates[2]}), {scored} bytes/s, {share:.1%} of the forward pass"
        print_row(screen, line, {one.way: text})
    write_json(screen, json_file, facts, ceilings, [asdict(one) for one in found])
    if figure is not None:
        from everyformer.study.bench_figure import Bar, draw

        bars = [Bar(f"{count:,} bytes", one.way, one.positions, one.least, one.most) for one in found]
        screen.print(f"figure: {draw(bars, 'positions per second', figure)}")
    next_command(screen, "bench", "train", "bytes")
    return 0
