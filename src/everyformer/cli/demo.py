"""`everyformer demo`: trains the byte model of source B, made small, on Shakespeare, and shows what came of it."""

from __future__ import annotations

import time
from pathlib import Path

from everyformer.cli.progress import watching
from everyformer.cli.terminal import Lasting, console, next_command
from everyformer.cli.train import exit_code, run_folder

STEPS = 600
SETTINGS = (
    "model.width=128", "model.heads=4", "model.layers=4", "model.context=128", "run.batch=16", "run.evaluate=200",
    "run.save=0", "optim.name=muon", "optim.lr=3e-3", "optim.warmup=50", "optim.min_lr=0.0",
)  # fmt: skip
PACKED = 2.6  # bits per byte that xz -9 needs for the whole text
PROMPT = "ROMEO:\n"


def demo(*, out: Path | None = None) -> int:
    """Train a small byte model on Shakespeare in two to four minutes, tell how good it is, and let it write.

    Parameters
    ----------
    out
        The run's folder; it must not exist yet. Without it: runs/demo-1, -2, ...
    """
    from everyformer.study import curves, look, picture
    from everyformer.train.loop import train
    from everyformer.train.recipe import Recipe

    picture.file_types()  # before minutes of training, not after
    screen, began = console(Lasting), time.perf_counter()
    recipe = Recipe.of("byte-language", *SETTINGS, f"run.steps={STEPS}", size="tiny")
    folder = run_folder(out, "demo")
    screen.print("byte-language, 4 blocks of width 128, reads Shakespeare byte by byte; the last tenth is held out")
    with watching(screen) as callback:
        trained = train(recipe, folder, callbacks=(callback,))
    if trained.stopped:
        next_command(screen, "resume", folder)
        return exit_code(trained)
    if not trained.metrics:  # Ctrl-C left the last evaluation out
        next_command(screen, "evaluate", folder)
        return 0
    bits, minutes = trained.metrics["bits_per_byte"], (time.perf_counter() - began) / 60
    screen.print(f"\n{bits:.2f} bits per byte of held-out text after {minutes:.1f} minutes", style="bold")
    screen.print(f"xz -9 needs {PACKED} for the whole text; a byte model that knows nothing needs 8")
    screen.print("\nwritten at temperature 0.5", style="dim")
    choices = {"tokens": 300, "temperature": 0.5, "seed": 0}
    screen.print(trained.generate(PROMPT, **choices), soft_wrap=True)
    attention = folder / "attention.png"
    look.draw(look.reading(trained.network, trained.task.data)).savefig(attention)
    screen.print(f"\ncurves: {curves.draw(folder)}\nattention: {attention}", soft_wrap=True)
    next_command(screen, "generate", folder, "--prompt", "JULIET:", "--tokens", "300", "--stream")
    return 0
