"""`everyformer evaluate`: the metrics of a run, and how they were computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from everyformer.cli.options import AsJson, Device, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.progress import metrics
from everyformer.cli.terminal import console, next_command


def evaluate(
    run: Path,
    /,
    *,
    split: str = "valid",
    step: Step = None,
    stride: int | None = None,
    memory: int | None = None,
    limit: int | None = None,
    kernel: str = "auto",
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    compiled: Annotated[bool, Parameter("--compile", negative=(), show_default=False)] = False,
    device: Device = "auto",
    as_json: AsJson = False,
    imports: Imports = (),
) -> int:
    """Evaluate a run on its data.

    Parameters
    ----------
    run
        The folder of a run.
    split
        valid, train, or test if the data has one.
    stride
        The stride of a language model's window: 1 scores every token with a full context; the length of the window
        scores windows that do not overlap. For a model with segment memory, the number of tokens per segment.
    memory
        The length of the segment memory. Default: as in training.
    limit
        The number of examples. Default: all.
    kernel
        The attention kernel.
    precision
        The precision. Default: as in training.
    compiled
        Compile the network first. This pays off for a long evaluation on a GPU.
    """
    import_parts(imports, run)
    from everyformer.train.trained import open_run

    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit} is less than 1; give the number of examples to evaluate")
    options: dict[str, Any] = {"stride": stride, "memory": memory}
    options = {name: number for name, number in options.items() if number is not None}
    trained = open_run(run, step=step, device=device, **options)
    if compiled:
        trained.network.compile()
    result = trained.evaluate(split, limit, kernel, precision)
    if as_json:
        print(json.dumps(result))
        return 0
    screen = console()
    screen.print(metrics(result))
    if trained.can_generate:
        next_command(screen, "generate", run, hint=trained.task.inference.example)
    else:
        more = [] if trained.step < trained.recipe.run.steps else ["--steps", str(2 * trained.step)]
        next_command(screen, "resume", run, *more)
    return 0
