"""`everyformer contracts`: check the properties that every legal model has."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import Progress

from everyformer.cli.options import AsJson
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.tables import print_labelled
from everyformer.cli.terminal import console, next_command
from everyformer.cli.thread import one_thread

if TYPE_CHECKING:
    from everyformer.study.contract_report import Report


@one_thread()
def contracts(
    member: str | None = None,
    /,
    *,
    only: str | None = None,
    everything: Annotated[bool, Parameter("--all", negative=(), show_default=False)] = False,
    jobs: int = 1,
    as_json: AsJson = False,
    imports: Imports = (),
) -> int:
    """Check that a model keeps the contracts: future tokens do not change past outputs, the cache is exact, and so on.

    Without a member, checks all members, and small models in which every two parts occur together (takes minutes).

    Parameters
    ----------
    member
        A member of the family, checked at its tiny size, or a .json file with a model of your own.
    only
        The contracts to check, separated by commas, for example future,cache. Default: all.
    everything
        Check more combinations: also every three of pattern, score modification and residual (takes much longer).
    jobs
        The number of processes that check combinations.
    """
    import_parts(imports)
    from everyformer.family.table import members
    from everyformer.study.contracts import contracts as check
    from everyformer.study.sweep import cells, sweep

    if jobs < 1:
        raise ValueError(f"--jobs {jobs} is less than 1; give the number of processes")
    models, names = 0, None if only is None else [name.strip() for name in only.split(",")]
    if member is not None:
        if everything:
            raise ValueError(f"--all checks combinations and cannot be used with {member}; leave one of them out")
        report = check(member, names)
    else:
        combinations = cells(triples=everything)
        models = sum(one is not None for one in combinations)
        with _progress("combinations") as update:
            report = sweep(combinations, names, update, jobs=jobs)
        with _progress("members") as update:
            for number, name in enumerate(members(), 1):
                report.results += check(name, names).results
                update(number, len(members()))
        checked = {result.contract for result in report.results}
        report.not_applicable = [name for name in names or () if name not in checked]
    if as_json:
        print(json.dumps(_plain(report), indent=2))
    else:
        _print(report, member, models)
    return 0 if report.ok else 1


def _print(report: Report, member: str | None, models: int) -> None:
    from everyformer.train.provenance import start_log

    screen, checks = console(), len(report.results)
    if not screen.is_terminal:  # the output may become a log
        start_log(seed=0)
    lines, rows = str(report).splitlines(), list(report.rows())
    if max(map(len, lines[: len(rows) + 1])) > screen.width:
        lines = lines[len(rows) + 1 :]
        print_labelled(
            screen,
            {
                name: f"{'passed' if passed else 'FAILED'}, checks {count}, worst error {error:.1e}, limit {limit:.0e}"
                for name, count, error, limit, passed in rows
            },
        )
    screen.print("\n".join(lines), soft_wrap=True)
    if report.failures:
        screen.print(
            f"\nFAILED: {len(report.failures):,} of {checks:,} {'check' if checks == 1 else 'checks'}", style="red"
        )
    elif report.ok:
        passed = "the check passed" if checks == 1 else f"all {checks:,} checks passed"
        screen.print(f"\n{passed}", style="green")
    if member is None:
        screen.print(f"{models:,} models and all members were checked")
        screen.print(f"{report.refused:,} combinations are illegal and were not built")
    next_command(screen, "contracts", *([] if member else ["gpt2"]))


def _plain(report: Report) -> dict[str, Any]:
    def number(error: float) -> float | None:
        return error if math.isfinite(error) else None  # JSON has no infinity or NaN

    return {
        "ok": report.ok,
        "not_applicable": report.not_applicable,
        "refused": report.refused,
        "contracts": [
            {"contract": name, "checks": checks, "worst_error": number(error), "limit": limit, "passed": passed}
            for name, checks, error, limit, passed in report.rows()
        ],
        "failures": [
            {"contract": result.contract, "model": result.model, "error": number(result.error), "limit": result.limit}
            for result in report.failures
        ],
    }


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields `update(done, total)`: a bar on a terminal, else a line for every tenth, on standard error."""
    if sys.stderr.isatty():
        with Progress(*Progress.get_default_columns(), console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)
        return
    tenth = 0

    def update(done: int, total: int) -> None:
        nonlocal tenth
        if done * 10 // total > tenth:
            tenth = done * 10 // total
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    yield update
