"""`everyformer demo`: train a small version of Bloem's byte-level language model (2019, source B) on Shakespeare."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from everyformer.cli.terminal import UnbreakableConsole, console, next_command
from everyformer.cli.train import exit_code, run_folder

if TYPE_CHECKING:
    from everyformer.train.trained import TrainedRun

STEPS = 600
SETTINGS = (
    "model.width=128", "model.heads=4", "model.layers=4", "task.context=128", "run.batch=16", "run.evaluate=200",
    "run.save=0", "optim.name=muon", "optim.lr=3e-3", "optim.warmup=50", "optim.min_lr=0.0",
)  # fmt: skip
XZ_BITS = 2.6  # bits per byte of the whole text after xz -9
PROMPT = "ROMEO:\n"


def demo(*, out: Path | None = None, steps: int | None = None) -> int:
    """Train a small byte-level language model on Shakespeare in two to four minutes, evaluate it, and sample from it.

    Parameters
    ----------
    out
        The folder of the run; it must not exist yet. Default: runs/demo-1, runs/demo-2, ...
    steps
        The number of training steps. Default: 600.
    """
    from everyformer.train.loop import train
    from everyformer.train.recipe import Recipe

    if steps is not None and steps < 1:
        raise ValueError(f"--steps {steps} is less than 1; give the number of training steps")
    screen, began = console(UnbreakableConsole), time.perf_counter()
    recipe = Recipe.of("byte-language", *SETTINGS, f"run.steps={steps or STEPS}", size="tiny")
    folder = run_folder(out, "demo")
    screen.print("training byte-language (4 layers, width 128) on the bytes of Shakespeare; the last tenth is held out")
    from everyformer.train.progress import show_progress

    with show_progress(screen) as callback:
        trained = train(recipe, folder, callbacks=(callback,))
    if trained.stopped:
        next_command(screen, "resume", folder)
        return exit_code(trained)
    if not trained.metrics:  # Ctrl-C skipped the last evaluation
        next_command(screen, "evaluate", folder)
        return 0
    bits, minutes = trained.metrics["bits_per_byte"], (time.perf_counter() - began) / 60
    screen.print(f"\n{bits:.2f} bits per byte of held-out text after {minutes:.1f} minutes", style="bold")
    screen.print(f"for comparison: xz -9 needs {XZ_BITS} for the whole text, uniform guessing 8")
    screen.print("\nsampled at temperature 0.5", style="dim")
    choices = {"tokens": 300, "temperature": 0.5, "seed": 0}
    screen.print(trained.generate(PROMPT, **choices), soft_wrap=True)
    screen.print(f"\n{_draw(trained, folder)}", soft_wrap=True)
    next_command(screen, "generate", folder, "--prompt", "JULIET:", "--tokens", "300", "--stream")
    return 0


def _draw(trained: TrainedRun, folder: Path) -> str:
    """Draw the curves and the attention, if matplotlib is installed. Returns where they are."""
    from everyformer.study import attention_pictures, curves, pattern_images
    from everyformer.task.attention_maps import attention_maps

    try:
        pattern_images.file_types()
    except ValueError as error:
        return f"no pictures: {error}"
    attention = folder / "attention.png"
    inputs = trained.task.inference.probe_input(trained.network)
    attention_pictures.draw(attention_maps(trained.network, inputs)).savefig(attention)
    return f"curves: {curves.draw(folder)}\nattention: {attention}"
