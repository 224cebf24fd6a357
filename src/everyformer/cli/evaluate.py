"""`everyformer evaluate`: the metrics of a run, and how they were computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from everyformer.cli.options import AsJson, Device, Limit, RunData, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, error_console, next_command

if TYPE_CHECKING:
    from everyformer.train.trained import TrainedRun


def evaluate(
    run: Path,
    /,
    *,
    data: RunData = None,
    split: str = "valid",
    step: Step = None,
    stride: int | None = None,
    memory: int | None = None,
    limit: Limit = None,
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
        How many tokens a language model's window moves at a time: 1 gives every token a full context, and takes longest.
        Default: half the window. For a model with segment memory: how many tokens it reads at a time.
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
    from everyformer.train.progress import show_evaluation
    from everyformer.train.run_data import describe_change
    from everyformer.train.trained import load

    if isinstance(limit, int) and limit < 1:
        raise ValueError(f"--limit {limit} is less than 1; give the number of examples to evaluate, or all")
    options = {name: number for name, number in (("stride", stride), ("memory", memory)) if number is not None}
    trained = load(run, step=step, device=device, data=data or True, **options)
    if trained.step and (change := describe_change(trained.changed_splits())):  # else nothing was trained here
        error_console().print(f"note: {change}", style="yellow")
    if compiled:
        trained.network.compile()
    with show_evaluation(error_console()) as progress:
        result = trained.evaluate(split, limit, kernel, precision, progress)
    if as_json:
        print(json.dumps(result))
    else:
        _show(trained, result, run, capped=limit is None)
    return 0


def _show(trained: TrainedRun, result: dict[str, Any], run: Path, capped: bool) -> None:
    from everyformer.train.progress import metrics

    screen = console()
    screen.print(f"step {trained.step}  {metrics(result)}")
    if capped and result.get("targets", 0) < result.get("targets_in_split", 0):
        screen.print("some of the targets were scored, spread over the split; --limit all scores all", style="dim")
    if trained.can_generate:
        next_command(screen, "generate", run, hint=trained.task.inference.example)
    else:
        more = [] if trained.step < trained.recipe.run.steps else ["--steps", str(2 * trained.step)]
        next_command(screen, "resume", run, *more)
