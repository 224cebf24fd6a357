"""`everyformer embed`: vectors of texts, images or sets, as an array."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from everyformer.cli.options import Device, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, next_command

CHUNK = 1024  # examples that are read and embedded at a time


def embed(
    run: Path,
    /,
    *,
    data: Annotated[str, Parameter(allow_leading_hyphen=True)] = "-",
    out: Path,
    column: str | None = None,
    pooling: Literal["mean", "first", "last", "max"] | None = None,
    normalize: Annotated[bool | None, Parameter(show_default=False, negative="--keep-norm")] = None,
    step: Step = None,
    device: Device = "auto",
    imports: Imports = (),
) -> int:
    """Write one vector of each text as an array.

    Parameters
    ----------
    run
        The folder of a run, of a saved model or of a model of transformers.
    data
        Records (.csv, .tsv, .jsonl, .json, .parquet), a text file with one text per line, a folder of texts, or - for the
        lines of standard input.
    out
        The array to write (.npy): one row for each text, in float32.
    column
        The column of records with the text. Default: text.
    pooling
        How the vectors of the tokens become one. Default: as the model was imported, else their mean.
    normalize
        Give each vector the length 1, so that products are cosines. Default: as the model was imported, else not.
    """
    import_parts(imports, run)
    import numpy as np

    from everyformer.data.files import atomic_write
    from everyformer.train.trained import load

    out = out.expanduser()
    if out.suffix.lower() != ".npy" or not out.parent.is_dir():
        raise ValueError(f"--out {out} is no .npy file in a folder that exists; give one, such as vectors.npy")
    trained = load(run, step=step, device=device)
    rows = _inputs(trained, data, column)
    vectors = [trained.embed(rows[start : start + CHUNK], pooling, normalize) for start in range(0, len(rows), CHUNK)]
    with atomic_write(out) as file:
        np.save(file, np.concatenate(vectors))
    screen = console()
    screen.print(f"{len(rows):,} vectors of {vectors[0].shape[1]} numbers: {out}")
    next_command(screen, "show", "attention", run, hint="--out attention.png")
    return 0


def _inputs(trained: Any, data: str, column: str | None) -> list[Any]:
    from everyformer.data.inputs import read_inputs
    from everyformer.data.labelled_records import INPUTS

    inference = trained.task.inference
    if inference.can_predict:
        inputs = inference.read_inputs(data, column)
    else:
        trained.require("embed", "gives its inputs no vector each")
        inputs = read_inputs(data, "text", (column,) if column else INPUTS["text"])
    rows = [one for _, one in inputs.rows]
    if not rows:
        raise ValueError(f"{inputs.name} has no examples; give at least one")
    return rows
