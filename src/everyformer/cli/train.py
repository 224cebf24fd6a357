"""`everyformer train` and `everyformer resume`: start a run, or continue one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console

from everyformer.cli.options import Data, Published, RunData, Step
from everyformer.cli.out_of_memory import explain_out_of_memory
from everyformer.cli.own_parts import Imports, import_parts, recorder
from everyformer.cli.terminal import UnbreakableConsole, console, next_command

if TYPE_CHECKING:
    from everyformer.train.trained import TrainedRun


def train(
    member: str,
    /,
    *settings: str,
    size: str | None = None,
    data: Data = None,
    task: str | None = None,
    out: Path | None = None,
    init_from: Path | None = None,
    recipe: Published = None,
    imports: Imports = (),
    lists_settings: Annotated[bool, Parameter("--settings", negative=(), show_default=False)] = False,
) -> int:
    """Train a model on your data.

    Parameters
    ----------
    member
        A member of the family (see everyformer family), or a .json file with a model of your own.
    settings
        Settings as path=value, for example run.steps=500 optim.lr=3e-4 model.width=256; --settings lists all of them.
    size
        A size of the member. Default: the member's own, see everyformer family --json.
    task
        language, masked, classify, regress, translate, denoise, replaced, image, control or answer; or an environment, for
        example popgym:AutoencodeEasy, minigrid:MemoryS7 or gymnasium:CartPole. Default: the member's task; answer for the
        generated problems of everyformer data.
    out
        The folder of the run; it must not exist yet. Default: runs/MEMBER-1, runs/MEMBER-2, ...
    init_from
        A run or a saved model from which to load the weights of the body (fine-tuning).
    lists_settings
        List all settings with type, default, meaning and an example, and do not train.
    """
    if lists_settings:
        from everyformer.cli.settings import settings as list_settings

        return list_settings(member, size=size, task=task)
    import_parts(imports)
    from everyformer.family.table import find
    from everyformer.train.loop import train as start
    from everyformer.train.recipe import Recipe

    screen = console(UnbreakableConsole)
    whole = Recipe.of(member, *settings, size=size, data=data, task=task, init_from=init_from, published=bool(recipe))
    if recipe:
        print_published(screen, member, size)
    folder = run_folder(out, find(member).name)
    from everyformer.train.progress import show_progress

    with show_progress(screen) as callback:
        callbacks = (recorder(imports, folder), callback)
        trained = explain_out_of_memory(whole, lambda: start(whole, folder, callbacks=callbacks))
    _finish(screen, trained, folder)
    return exit_code(trained)


def resume(
    run: Path,
    /,
    *settings: str,
    data: RunData = None,
    step: Step = None,
    steps: int | None = None,
    imports: Imports = (),
) -> int:
    """Resume a run from its last checkpoint.

    Parameters
    ----------
    run
        The folder of a run.
    settings
        Settings of the run or the optimizer to change, for example run.accumulate=4 or optim.lr=1e-4. The learning rate then
        follows the new schedule from here on. Model and task cannot change.
    step
        The checkpoint to resume from, a number or best; later checkpoints are overwritten. Default: the last one.
    steps
        The step at which the run ends. Default: run.steps of the recipe.
    """
    import_parts(imports, run)
    from everyformer.train import checkpoint
    from everyformer.train.folder import override_run, read_recipe
    from everyformer.train.loop import resume as continue_run

    screen = console(UnbreakableConsole)
    recipe = override_run(read_recipe(run), settings)
    has_checkpoint = bool(checkpoint.steps(run))

    def say_start(line: dict[str, Any]) -> None:
        if line["kind"] == "begin" and not has_checkpoint:
            screen.print(f"{run} has no checkpoint, so it starts from step 0")

    from everyformer.train.progress import show_progress

    with show_progress(screen) as callback:
        trained = explain_out_of_memory(
            recipe,
            lambda: continue_run(
                run, step=step, steps=steps, settings=settings, data=data, callbacks=(say_start, callback)
            ),
        )
    _finish(screen, trained, run)
    return exit_code(trained)


def print_published(screen: Console, member: str, size: str | None) -> None:
    """Say where the published settings are from, and what is not among them."""
    from everyformer.family.published import published
    from everyformer.family.table import find

    found = published(member, size or find(member).size)
    screen.print(f"recipe of {found.source}")
    if found.missing:
        screen.print(f"not part of it: {found.missing}")


def run_folder(out: Path | None, name: str) -> Path:
    """The folder of a new run. Raises ValueError if it lies under a file."""
    folder = out or _free_folder(Path("runs"), name)
    for one in (folder, *folder.parents):
        if one.exists() and not one.is_dir():
            raise ValueError(
                f"{one} is a file, so the run cannot be written to {folder}; give another folder with --out"
            )
    return folder


def exit_code(trained: TrainedRun) -> int:
    """0 if the run reached its end, else 128 plus the number of the signal that stopped it, as in a shell."""
    if trained.stopped is None:
        return 0
    return 128 + (signal.SIGINT if signal.SIGINT.name in trained.stopped else signal.SIGTERM)


def _free_folder(parent: Path, name: str) -> Path:
    """The first numbered folder that does not exist; after a restart by torchrun, the last one that does."""
    from everyformer.train.distributed import restarted

    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{max(1, number - restarted())}"


def _finish(screen: Console, trained: TrainedRun, folder: Path) -> None:
    if screen.quiet:
        return
    if trained.skipped_steps:
        reasons = "the reasons are in records.jsonl, in the lines of the kind skip"
        screen.print(f"{trained.skipped_steps} of {trained.step} steps were skipped; {reasons}", style="yellow")
    best = trained.best if trained.best and trained.best["step"] != trained.step else None
    if best:
        from everyformer.train.progress import metrics

        screen.print(f"best checkpoint (--step best): step {best['step']}, {metrics(best)}")
    try:
        from everyformer.study.curves import draw

        screen.print(f"curves: {draw(folder)}")
    except ImportError:
        screen.print("curves: not drawn, because matplotlib is not installed (pip install everyformer[plot])")
    screen.print(f"run: {folder}")
    chosen = ["--step", "best"] if best and trained.early_stop else []
    if trained.stopped:
        next_command(screen, "resume", folder)
    elif trained.task.inference.predicts_targets and trained.recipe.data and Path(trained.recipe.data).is_file():
        next_command(screen, "predict", folder, "--data", trained.recipe.data, "--limit", "5", *chosen)
    elif trained.can_generate:
        next_command(screen, "generate", folder, *chosen, hint=trained.task.inference.example)
    else:
        next_command(screen, "evaluate", folder)
