"""`everyformer evaluate`: how good a run is, and how that was computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from everyformer.cli.progress import metrics
from everyformer.cli.terminal import console, next_command


def evaluate(
    run: Path,
    /,
    *,
    split: str = "valid",
    step: int | Literal["best"] | None = None,
    stride: int | None = None,
    memory: int | None = None,
    limit: int | None = None,
    kernel: str = "auto",
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    compiled: Annotated[bool, Parameter("--compile", negative=(), show_default=False)] = False,
    device: str = "auto",
    as_json: Annotated[bool, Parameter("--json", negative=(), show_default=False)] = False,
) -> int:
    """Evaluate a run on its data.

    Parameters
    ----------
    run
        The folder of a run.
    split
        valid, train, or test where the data have one.
    step
        The checkpoint: a number, or best; without it, the last.
    stride
        Of the window of a language model: 1 scores every token from a full context, the window itself never overlaps.
        With a memory it is the segment: how many tokens are read at a time.
    memory
        How many positions a model with a memory remembers; without it, as many as in training.
    limit
        How many examples; without it, all.
    kernel
        How attention is computed.
    precision
        What is computed in; without it, what the run was trained in.
    compiled
        Compile the network first: worth it for a long evaluation on a GPU.
    device
        cpu, cuda, or auto.
    as_json
        Print JSON.
    """
    from everyformer.train.trained import open_run

    if limit is not None and limit < 1:
        raise ValueError(f"--limit {limit}: give 1 or more examples")
    options: dict[str, Any] = {
        name: number for name, number in (("stride", stride), ("memory", memory)) if number is not None
    }
    found = open_run(run, step=step, device=device, **options)
    if compiled:
        found.network.compile()
    answer = found.evaluate(split, limit, kernel, precision)
    if as_json:
        print(json.dumps(answer))
        return 0
    screen = console()
    screen.print(metrics(answer))
    if found.can_generate:
        next_command(screen, "generate", run, hint=found.task.inference.example)
    else:
        further = [] if found.step < found.recipe.run.steps else ["--steps", str(2 * found.step)]
        next_command(screen, "resume", run, *further)
    return 0
