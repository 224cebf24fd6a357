"""`everyformer contracts`: what every legal model keeps, checked here and now."""

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

from everyformer.cli.terminal import console, next_command
from everyformer.cli.thread import one_thread

if TYPE_CHECKING:
    from everyformer.study.contracts import Report


@one_thread()
def contracts(
    member: str | None = None,
    /,
    *,
    only: str | None = None,
    everything: Annotated[bool, Parameter("--all", negative=(), show_default=False)] = False,
    as_json: Annotated[bool, Parameter("--json", negative=(), show_default=False)] = False,
) -> int:
    """Check the contracts on a member, or on every member and on models in which every two parts meet (minutes).

    Parameters
    ----------
    member
        A member of the family, checked at its tiny size.
    only
        Some of the contracts, with commas between them: future,cache.
    everything
        Let every three of pattern, rules and wiring meet, instead of every two parts.
    as_json
        Print JSON.
    """
    from everyformer.family.table import members
    from everyformer.study.contracts import contracts as check
    from everyformer.study.sweep import cells, sweep

    names = None if only is None else [name.strip() for name in only.split(",")]
    if member is not None:
        if everything:
            raise ValueError(f"--all is about the combinations, not about {member}; leave one of them away")
        report = check(member, names)
    else:
        with _progress("combinations") as tell:
            report = sweep(cells(triples=everything), names, tell)
        with _progress("members") as tell:
            for number, name in enumerate(members(), 1):
                report.findings += check(name, names).findings
                tell(number, len(members()))
        report.unasked = [name for name in names or () if name not in {one.contract for one in report.findings}]
    if as_json:
        print(json.dumps(_plain(report), indent=2))
    else:
        _print(report, member)
    return 0 if report.ok else 1


def _print(report: Report, member: str | None) -> None:
    screen = console()
    cells = len(report.findings)
    screen.print(str(report), soft_wrap=True)
    if report.broken:
        screen.print(f"\nBROKEN in {len(report.broken):,} of {cells:,} cells", style="red")
    elif report.ok:
        screen.print(f"\nall kept in {cells:,} cells", style="green")
    if member is None:
        screen.print(f"{report.refused:,} combinations are illegal and were refused")
    next_command(screen, "contracts", *([] if member else ["gpt2"]))


def _plain(report: Report) -> dict[str, Any]:
    def number(error: float) -> float | None:
        return error if math.isfinite(error) else None  # JSON has no infinity

    return {
        "ok": report.ok,
        "unasked": report.unasked,
        "refused": report.refused,
        "contracts": [
            {"contract": name, "cells": cells, "worst_error": number(error), "limit": limit, "kept": kept}
            for name, cells, error, limit, kept in report.rows()
        ],
        "broken": [
            {"contract": found.contract, "cell": found.cell, "error": number(found.error), "limit": found.limit}
            for found in report.broken
        ],
    }


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Gives `tell(done, total)`: a bar on a terminal, a line for every tenth elsewhere; never on standard output."""
    if sys.stderr.isatty():
        with Progress(*Progress.get_default_columns(), console=Console(stderr=True), transient=True) as bars:
            bar = bars.add_task(what, total=None)
            yield lambda done, total: bars.update(bar, completed=done, total=total)
        return
    tenth = 0

    def tell(done: int, total: int) -> None:
        nonlocal tenth
        if done * 10 // total > tenth:
            tenth = done * 10 // total
            print(f"{what}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    yield tell
