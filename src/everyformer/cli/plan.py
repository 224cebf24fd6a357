"""`everyformer plan`: what a run takes, before it starts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from everyformer.cli.options import AsJson, Data, Published
from everyformer.cli.out_of_memory import explain_out_of_memory
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.tables import print_labelled
from everyformer.cli.terminal import console, next_command

FIELDS = (
    *("parameters", "flops", "run_flops", "targets", "memory", "tensors", "process", "limit", "checkpoint"),
    *("changes", "seconds", "measured", "kernels"),
)


def plan(
    member: str,
    /,
    *settings: str,
    size: str | None = None,
    data: Data = None,
    task: str | None = None,
    init_from: Path | None = None,
    recipe: Published = None,
    memory: float | None = None,
    measure: Annotated[bool, Parameter(show_default=False)] = True,
    as_json: AsJson = False,
    imports: Imports = (),
) -> int:
    """Predict what a run takes: parameters, operations, memory and time, and settings that make it fit.

    Parameters
    ----------
    member
        A member of the family, a .json file with a model of your own, or the folder of a run that is to be fine-tuned.
    settings
        Settings as path=value, as in everyformer train.
    size
        A size of the member, as in everyformer train.
    task
        The task, as in everyformer train.
    init_from
        A run or a saved model, as in everyformer train.
    memory
        The memory in GiB that the run may take. Default: what the device has.
    measure
        Time a few real steps. Default: yes.
    """
    import_parts(imports)
    from everyformer.study.plan import plan as make
    from everyformer.train.recipe import Recipe, is_run

    init_from = init_from or (Path(member) if is_run(member) else None)
    whole = Recipe.of(member, *settings, size=size, data=data, task=task, init_from=init_from, published=bool(recipe))
    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"--memory {memory:g} is not a size in GiB; give a number above 0, or leave it out")
    limit = None if memory is None else int(memory * 2**30)
    planned = explain_out_of_memory(whole, lambda: make(whole, limit=limit, measure=measure))
    if as_json:
        print(json.dumps({name: getattr(planned, name) for name in FIELDS} | {"fits": planned.fits}))
        return 0
    screen = console()
    print_labelled(screen, planned.lines())
    options = {
        "--size": size,
        "--data": data,
        "--task": task,
        "--init-from": init_from and str(init_from),
        "--recipe": recipe,
    }
    words = [member, *(word for name, text in options.items() if text for word in (name, text)), *settings]
    next_command(screen, *(["family"] if planned.changes is None else ["train", *words, *planned.changes]))
    return 0
