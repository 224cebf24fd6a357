"""`everyformer compare` and `everyformer tune`: fair comparisons, and the search that they are made with."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from rich.console import Console
from rich.table import Table

from everyformer.cli.options import Data
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.tables import print_blocks, print_labelled, width_of
from everyformer.cli.terminal import UnbreakableConsole, console, next_command

if TYPE_CHECKING:
    from everyformer.study.compare.api import Comparison
    from everyformer.study.compare.frozen import Frozen
    from everyformer.study.compare.request import Request
    from everyformer.study.compare.table import Line

Search = Annotated[
    tuple[str, ...],
    Parameter(
        negative=(),
        show_default=False,
        help="A setting to search over besides the rate, with its values, as model.dropout=0,0.1. May be repeated.",
    ),
]
Out = Annotated[Path, Parameter(help="The folder. The same command with the same folder goes on where it was stopped.")]
Workers = Annotated[
    int | None, Parameter(help="Runs at a time, with one thread each. Default: one for each core or GPU.")
]


def compare(
    *words: str,
    data: Data = None,
    size: str | None = None,
    task: str | None = None,
    match: str = "parameters",
    baseline: str | None = None,
    trials: int = 5,
    seeds: int = 3,
    budget: str | None = None,
    search: Search = (),
    suite: str | None = None,
    out: Out = Path("runs/compare"),
    workers: Workers = None,
    dry_run: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    imports: Imports = (),
) -> int:
    """Compare members, or models of your own, fairly: matched in size or cost, each with the same search, over several seeds.

    Parameters
    ----------
    words
        Members or .json files of models of your own; NAME=MEMBER gives one a name. Settings as path=value are of all, those as
        NAME:path=value of one (gpt2:model.layers=3, gpt2:size=small). Without words the comparison in the folder goes on.
    size
        The size of the members. Default: each member's own.
    task
        The task. Default: that of the members.
    match
        What is equal: parameters, flops (a token) or memory, for which the width is solved, or training-flops or seconds, for which the
        steps are; one of each, joined by a comma, or none.
    baseline
        The entry that the others are matched to and compared with. Default: the first.
    trials
        Trials of the settings of each entry; 1: none, the default settings.
    seeds
        Final runs of each entry.
    budget
        The time that everything may take, as 20m or 2h. Default: run.steps decides.
    suite
        A list of data sets in place of --data: diagnostics.
    dry_run
        Print what would be run, and how long it would take.
    """
    import_parts(imports)
    from everyformer.study.compare.api import make_request, run

    screen, request = console(UnbreakableConsole), None
    if words:
        request = make_request(
            words, data=data, size=size, task=task, match=match, baseline=baseline, trials=trials, seeds=seeds,
            budget=budget, search=search, suite=suite, imports=imports,
        )  # fmt: skip
    if dry_run:
        return _dry_run(screen, request, workers)
    try:
        comparison = run(request, out, workers, progress=not screen.quiet)
    except KeyboardInterrupt:
        return _stopped(f"everyformer compare --out {shlex.quote(str(out))}")
    return _finish(screen, comparison)


def _stopped(command: str) -> int:
    """The exit code after Ctrl-C."""
    sys.stderr.write(f"stopped, and all runs are saved; {command} goes on\n")
    return 130


def _dry_run(screen: Console, request: Request | None, workers: int | None) -> int:
    from everyformer.study.compare.api import planned_workers
    from everyformer.study.compare.freeze import freeze

    if request is None:
        raise ValueError("--dry-run needs members; name some")
    at_a_time = planned_workers(request, workers)
    print_plan(screen, freeze(request, at_a_time), at_a_time)
    return 0


def _finish(screen: Console, comparison: Comparison) -> int:
    for row in comparison.frozen.rows:
        print_table(screen, [line for line in comparison.lines if line.row.name == row.name])
    screen.print(f"report: {comparison.folder / 'report.html'}")
    first = next((line for line in comparison.lines if line.metrics), None)
    if first is None:
        return 1
    run = comparison.folder / "runs" / first.row.name / first.entry.name / f"seed-{next(iter(first.metrics))}"
    next_command(screen, "evaluate", run, "--split", "test")
    return 0


def tune(
    member: str,
    /,
    *settings: str,
    data: Data = None,
    size: str | None = None,
    task: str | None = None,
    trials: int = 5,
    search: Search = (),
    out: Out = Path("runs/tune"),
    workers: Workers = None,
    imports: Imports = (),
) -> int:
    """Find a learning rate for a member on your data, in a few short runs.

    Parameters
    ----------
    member
        A member of the family, or a .json file with a model of your own.
    settings
        Settings as path=value, as in everyformer train. The trials have a quarter of run.steps.
    size
        A size of the member, as in everyformer train.
    task
        The task, as in everyformer train.
    trials
        Settings that are tried; half of them end after a quarter of a trial's steps.
    """
    import_parts(imports)
    from everyformer.study.compare.tuning import tune as find

    screen = console(UnbreakableConsole)
    try:
        found = find(
            member, *settings, data=data, size=size, task=task, trials=trials, search=search, imports=imports, out=out,
            workers=workers, progress=not screen.quiet,
        )  # fmt: skip
    except KeyboardInterrupt:
        return _stopped("the same command")
    screen.print(
        f"found: {' '.join(found.settings)}, the best of {len(found.line.trials)} trials of {found.steps} steps"
    )
    for settings_, text in trial_lines(found.line):
        screen.print(f"  {settings_}  {text}", soft_wrap=True)
    screen.print(f"curve: {out / 'report.html'}")
    next_command(screen, *shlex.split(found.command)[1:])
    return 0


def trial_lines(line: Line) -> list[tuple[str, str]]:
    """The settings of each trial, and how far it came."""
    name = line.row.metric.replace("_", " ")
    found = []
    for settings, outcomes in line.trials:
        last = outcomes[-1]
        value = (
            f"{name} {last['metric']:.4f} after {last['steps']} steps" if last["status"] == "done" else last["status"]
        )
        found.append((" ".join(settings), value + (", chosen" if settings == line.chosen else "")))
    return found


def print_plan(screen: Console, frozen: Frozen, workers: int) -> None:
    """What would be run."""
    from everyformer.study.compare.show import entry_seconds, whole_runs
    from everyformer.train.progress import duration

    for row in frozen.rows:
        blocks = []
        for entry in row.entries:
            texts = [
                f"{entry.parameters:,} parameters without embeddings, {entry.flops / entry.tokens:.3g} FLOPs a token",
                f"{entry.steps:,} steps of {entry.tokens:,} tokens, {entry.seconds:.3g} s each",
                *(
                    f"{name} differ from the baseline by {share:+.1%}"
                    for name, share in entry.mismatch
                    if abs(share) > 5e-4
                ),
                f"trials: {'; '.join(' '.join(trial) for trial in entry.trials)}",
            ]
            blocks.append((f"{row.name}: {entry.name}", texts))
        print_blocks(screen, blocks)
        for note in row.notes:
            screen.print(note, soft_wrap=True)
    seconds = sum(entry_seconds(frozen, entry) for row in frozen.rows for entry in row.entries)
    print_labelled(
        screen,
        {
            "cost": f"{whole_runs(frozen):g} whole runs of each entry: {frozen.request.trials} trials, {len(frozen.seeds)} seeds",
            "time": f"about {duration(seconds / max(1, workers))} with {workers} at a time, more if a best rate is at the edge",
        },
    )


def print_table(screen: Console, lines: list[Line]) -> None:
    """A table, or where it does not fit a block for each entry."""
    from everyformer.study.compare.table import cells, head

    names, rows = head(lines[0].row), [cells(line) for line in lines]
    shown = [number for number in range(len(names)) if any(row[number] for row in rows)]
    table = Table(box=None, pad_edge=False, title=lines[0].row.name, title_justify="left", title_style="bold")
    for number in shown:
        table.add_column(names[number], no_wrap=True, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*(row[number] for number in shown))
    if width_of(screen, table) <= screen.width:
        screen.print(table)
    else:
        screen.print(lines[0].row.name, style="bold")
        print_blocks(screen, [(row[0], [f"{names[n]}: {row[n]}" for n in shown[1:] if row[n]]) for row in rows])
    for line in lines:
        for reason in line.reasons:
            screen.print(f"{line.entry.name}: {reason}", style="yellow", soft_wrap=True)
