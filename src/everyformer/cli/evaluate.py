"""`everyformer evaluate`: the metrics of a run, and how they were computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from everyformer.cli.options import AsJson, Device, RunData, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.progress import metrics, show_evaluation
from everyformer.cli.terminal import console, error_console, next_command


def evaluate(
    run: Path,
    /,
    *,
    data: RunData = None,
    split: str = "valid",
    step: Step = None,
    stride: int | None = None,
    memory: int | None = None,
    limit: Annotated[int | Literal["all"] | None, Parameter(show_choices=False)] = None,
    kernel: str = "auto",
    precision: Literal["fp32", "bf16", "fp16"] | None = None,
    compiled: Annotated[bool, Parameter("--compile", negative=(), show_default=False)] = False,
    device: Device = "auto",
    as_json: AsJson = False,
    imports: Imports = (),
) -> int:
    """Evaluate a run on its data, or on other data.

    Parameters
    ----------
    run
        The folder of a run.
    split
        valid, train, or test if the data have one.
    stride
        For a language model: by how many tokens its window moves on. With 1 each token is predicted from a full window,
        which takes longest; with the length of the window the windows do not overlap. Default: half the window. For a
        model with segment memory: the number of tokens that it reads at a time.
    memory
        The length of the segment memory. Default: as in training.
    limit
        How many examples to evaluate, spread over the split, or all. An example is a text, a pair, an image, an episode,
        or a window of a language model. Default: as many as have 262,144 targets (predicted tokens, classes, pixels).
    kernel
        The attention kernel.
    precision
        The precision. Default: as in training.
    compiled
        Compile the network first. This pays off for a long evaluation on a GPU.
    """
    import_parts(imports, run)
    from everyformer.train.run_data import describe_change
    from everyformer.train.trained import open_run

    if isinstance(limit, int) and limit < 1:
        raise ValueError(f"--limit {limit} is less than 1; give the number of examples to evaluate, or all")
    options: dict[str, Any] = {"stride": stride, "memory": memory}
    options = {name: number for name, number in options.items() if number is not None}
    trained = open_run(run, step=step, device=device, data=data or True, **options)
    if change := describe_change(trained.changed_splits()):
        error_console().print(f"note: {change}", style="yellow", soft_wrap=True)
    if compiled:
        trained.network.compile()
    with show_evaluation(error_console()) as progress:
        result = trained.evaluate(split, limit, kernel, precision, progress)
    if as_json:
        print(json.dumps(result))
        return 0
    screen = console()
    screen.print(f"step {trained.step}  {metrics(result)}")
    if limit is None and result.get("targets", 0) < result.get("targets_in_split", 0):
        screen.print(
            f"{result['targets']:,} of {result['targets_in_split']:,} targets were scored; --limit all scores all",
            style="dim",
        )
    if trained.can_generate:
        next_command(screen, "generate", run, hint=trained.task.inference.example)
    else:
        more = [] if trained.step < trained.recipe.run.steps else ["--steps", str(2 * trained.step)]
        next_command(screen, "resume", run, *more)
    return 0
