"""`everyformer train` and `everyformer resume`."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from everyformer.cli.progress import metrics, watching
from everyformer.cli.room import with_room
from everyformer.cli.terminal import Lasting, console, next_command

if TYPE_CHECKING:
    from everyformer.train.trained import TrainedRun


def train(
    member: str,
    /,
    *settings: str,
    size: str | None = None,
    data: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,  # - is standard input
    task: str | None = None,
    out: Path | None = None,
    init_from: Path | None = None,
) -> int:
    """Train a member on your data.

    Parameters
    ----------
    member
        A member of the family; `everyformer family` lists them. Or a .json file with a model of your own.
    settings
        path=value, such as run.steps=500 optim.lr=3e-4 model.width=256 task.tokenizer=bpe.
    size
        One of the member's sizes.
    data
        A file, a folder, a named set, - for standard input. Without it: the set embedded for the task.
    task
        language, masked, classify, translate, image or control; or an environment to act in, such as
        popgym:RepeatPreviousEasy, minigrid:MemoryS7 or gymnasium:CartPole. Without it: what the member is for.
    out
        The run's folder; it must not exist yet. Without it: runs/MEMBER-1, -2, ...
    init_from
        A run or saved model whose weights, except output heads, initialize the new model (fine-tuning).
    """
    from everyformer.family.table import find
    from everyformer.train.loop import train as begin
    from everyformer.train.recipe import Recipe

    screen = console(Lasting)
    recipe = Recipe.of(member, *settings, size=size, data=data, task=task, init_from=init_from)
    folder = run_folder(out, find(member).name)
    with watching(screen) as callback:
        trained = with_room(recipe, lambda: begin(recipe, folder, callbacks=(callback,)))
    _finish(screen, trained, folder)
    return exit_code(trained)


def resume(run: Path, /, *settings: str, step: int | Literal["best"] | None = None, steps: int | None = None) -> int:
    """Go on with a run from its last checkpoint.

    Parameters
    ----------
    run
        The folder of a run.
    settings
        run.name=value, such as run.accumulate=4: how to go on. What is learned stays as it was.
    step
        Go on from this checkpoint, a number or best, instead of the last; new ones take the place of those after it.
    steps
        Go on to this step instead of the recipe's: run.steps.
    """
    from everyformer.train import checkpoint
    from everyformer.train.folder import override_run, read_recipe
    from everyformer.train.loop import resume as go_on

    screen = console(Lasting)
    recipe = override_run(read_recipe(run), settings)
    if not checkpoint.steps(run):
        screen.print(f"{run} has no checkpoint: it begins anew", soft_wrap=True)
    with watching(screen) as callback:
        trained = with_room(
            recipe, lambda: go_on(run, step=step, steps=steps, settings=settings, callbacks=(callback,))
        )
    _finish(screen, trained, run)
    return exit_code(trained)


def run_folder(out: Path | None, name: str) -> Path:
    """Where a new run is written."""
    folder = out or _free_folder(Path("runs"), name)
    for one in (folder, *folder.parents):
        if one.exists() and not one.is_dir():
            raise ValueError(
                f"{one} is a file, so that no run can be written to {folder}; give another folder as --out"
            )
    return folder


def exit_code(trained: TrainedRun) -> int:
    """0 where the run went to its end, else 128 and the signal that stopped it, as a shell counts."""
    if trained.stopped is None:
        return 0
    return 128 + (signal.SIGINT if signal.SIGINT.name in trained.stopped else signal.SIGTERM)


def _free_folder(parent: Path, name: str) -> Path:
    """The first that is not there; where torchrun has begun the command anew, the last that is."""
    from everyformer.train.distributed import restarted

    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{max(1, number - restarted())}"


def _finish(screen: Console, trained: TrainedRun, folder: Path) -> None:
    if screen.quiet:
        return
    if trained.metrics:
        screen.print(f"\n{metrics(trained.metrics)}", style="bold")
    if trained.skipped_steps:
        reasons = "the reasons are in records.jsonl, in the lines of the kind skip"
        screen.print(f"{trained.skipped_steps} of {trained.step} steps were skipped; {reasons}", style="yellow")
    if trained.best and trained.best["step"] != trained.step:
        screen.print(f"the best checkpoint is of step {trained.best['step']} ({metrics(trained.best)}): --step best")
    try:
        from everyformer.study.curves import draw

        screen.print(f"curves: {draw(folder)}")
    except ImportError:
        screen.print("curves: install matplotlib to have them drawn (pip install everyformer[plot])")
    screen.print(f"run: {folder}")
    if trained.stopped:
        next_command(screen, "resume", folder)
    elif trained.can_generate:
        next_command(screen, "generate", folder, hint=trained.task.inference.example)
    else:
        next_command(screen, "evaluate", folder)
