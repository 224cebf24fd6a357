"""`everyformer import`: a model of Hugging Face transformers becomes a run."""

from __future__ import annotations

from pathlib import Path

from everyformer.cli.terminal import console, error_console, next_command


def import_model(source: Path, /, *, out: Path | None = None, leave_out: tuple[str, ...] = ()) -> int:
    """Make a run of a model of Hugging Face transformers.

    Parameters
    ----------
    source
        A folder with config.json, the weights (model.safetensors or pytorch_model.bin, also in several files) and the
        tokenizer, as save_pretrained writes it.
    out
        The folder of the run; it must not exist yet. Default: runs/NAME-1, runs/NAME-2, ...
    leave_out
        The beginning of the names of weights that are not read, such as those of a head that everyformer has not.
    """
    from everyformer.cli.train import run_folder
    from everyformer.data.tokenizer import TokenIds
    from everyformer.network.size import parameters
    from everyformer.train.imported import import_run

    folder = run_folder(out, source.expanduser().resolve().name)
    imported = import_run(source, folder, leave_out)
    for note in imported.notes:
        error_console().print(f"note: {note}", style="yellow")
    screen = console()
    model = imported.network.value
    task = type(imported.task).__name__.lower()
    screen.print(f"run: {folder}  ({parameters(model):,} parameters, task {task})")
    if task == "language":
        example = "1 2 3" if isinstance(imported.tokenizer, TokenIds) else "Once"
        next_command(screen, "generate", folder, hint=f"--prompt '{example}'")
    elif task == "denoise":
        next_command(screen, "generate", folder, hint="--prompt 'Once upon a ___.'")
    elif task in ("classify", "regress"):
        next_command(screen, "predict", folder, hint="--data FILE")
    else:
        next_command(screen, "evaluate", folder)
    return 0
