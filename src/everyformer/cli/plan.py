"""`everyformer plan`: what a run will take, before it is begun."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from everyformer.cli.out_of_memory import explain_out_of_memory
from everyformer.cli.terminal import console, next_command


def plan(
    member: str,
    /,
    *settings: str,
    size: str | None = None,
    data: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,  # - is standard input
    task: str | None = None,
    init_from: Path | None = None,
    memory: float | None = None,
    measure: Annotated[bool, Parameter(show_default=False)] = True,
    as_json: Annotated[bool, Parameter("--json", negative=(), show_default=False)] = False,
) -> int:
    """Plan a run: parameters, operations, memory, time, and what to change where it does not fit.

    Parameters
    ----------
    member
        A member of the family.
    settings
        path=value, as for train.
    size
        One of the member's sizes.
    data
        As for train.
    task
        As for train.
    init_from
        As for train.
    memory
        GiB that the run may take; without it, what the device has.
    measure
        Take a few real steps for the time; --no-measure leaves it out.
    as_json
        Print JSON.
    """
    from everyformer.study.plan import plan as make
    from everyformer.train.recipe import Recipe

    recipe = Recipe.of(member, *settings, size=size, data=data, task=task, init_from=init_from)
    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"--memory {memory:g}: give the GiB that the run may take, more than 0, or leave it out")
    limit = None if memory is None else int(memory * 2**30)
    found = explain_out_of_memory(recipe, lambda: make(recipe, limit=limit, measure=measure))
    if as_json:
        names = (
            "parameters",
            "flops",
            "run_flops",
            "targets",
            "memory",
            "limit",
            "checkpoint",
            "changes",
            "seconds",
            "measured",
        )
        print(json.dumps({name: getattr(found, name) for name in names} | {"fits": found.fits}))
        return 0
    screen = console()
    screen.print(str(found), soft_wrap=True)
    named = {"--size": size, "--data": data, "--task": task, "--init-from": init_from and str(init_from)}
    words = [member, *(word for name, given in named.items() if given for word in (name, given)), *settings]
    next_command(screen, *(["family"] if found.changes is None else ["train", *words, *found.changes]))
    return 0
