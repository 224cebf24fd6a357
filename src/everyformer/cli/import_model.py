"""`everyformer import`: a model of Hugging Face transformers becomes a run."""

from __future__ import annotations

import re
from pathlib import Path

from everyformer.cli.terminal import console, error_console, next_command

FIRST_USE = {  # a command and its options, by the task
    "language": ("generate", "--prompt 'Once'"),
    "masked": ("generate", "--prompt 'Once upon a ___.'"),
    "denoise": ("generate", "--prompt 'Once upon a ___.'"),
    "replaced": ("generate", "--prompt 'To be, or not to bee.'"),
    "classify": ("predict", "--data FILE"),
    "regress": ("predict", "--data FILE"),
    "embedtexts": ("embed", "--data FILE --out vectors.npy"),
}


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
    verb, hint = FIRST_USE[task]
    if isinstance(imported.tokenizer, TokenIds):
        hint = re.sub("^--prompt .*", "--prompt '1 2 3'", hint)
    next_command(screen, verb, folder, hint=hint)
    return 0
