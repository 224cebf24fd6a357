"""`everyformer export`: a trained model in a format of other programs."""

from __future__ import annotations

import os
import shutil
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from everyformer.cli.options import Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, error_console, next_use
from everyformer.value import nearest

if TYPE_CHECKING:
    from everyformer.network.network import Network, PairNetwork

# The formats: what each is for, and its module, with `reason(network)`, why a network cannot be exported (None if it can), and
# `export(trained, folder)`, which writes into an empty folder and returns notes. Its other parameters are options of the command.
FORMATS = {
    "hf": ("Hugging Face transformers", "everyformer.train.export_hf"),
    "torch": ("a graph of torch.export", "everyformer.train.export_torch"),
    "onnx": ("onnxruntime", "everyformer.train.export_onnx"),
    "gguf": ("llama.cpp", "everyformer.train.export_gguf"),
}


def export(
    run: Path,
    /,
    *,
    to: Annotated[
        str, Parameter(help="The format: " + ", ".join(f"{name} ({what})" for name, (what, _) in FORMATS.items()) + ".")
    ],
    out: Path,
    precision: Literal["fp32", "fp16", "bf16"] | None = None,
    step: Step = None,
    imports: Imports = (),
) -> int:
    """Write a trained model in a format of other programs.

    Parameters
    ----------
    run
        The folder of a run, or of a saved model.
    out
        The folder to write; it must not exist yet, or be empty. A format that is one file also takes its name, such as a.gguf.
    precision
        The precision of the weights in a gguf file. Default: fp32.
    """
    import_parts(imports, run)
    from everyformer.family.table import parameters
    from everyformer.train.trained import load

    if to not in FORMATS:
        raise ValueError(f"there is no format {to!r}; {nearest(to, FORMATS)}")
    options = {name: value for name, value in {"precision": precision}.items() if value is not None}
    for name in options.keys() - signature(_module(to).export).parameters.keys():
        raise ValueError(f"--{name} is not an option of --to {to}; leave it out")
    out = out.expanduser()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} already exists and is not empty; choose another folder")
    trained = load(run, step=step, device="cpu")
    if (reason := _module(to).reason(trained.network)) is not None:
        others = [name for name in FORMATS if name != to and _module(name).reason(trained.network) is None]
        remedy = f"use --to {' or '.join(others)}" if others else "keep it as a run, which everyformer itself reads"
        raise ValueError(f"{run} cannot be exported to {to}: {reason}; {remedy}")
    notes = _write(to, trained, out, options)
    for note in notes:
        error_console().print(f"note: {note}", style="yellow")
    files = sum(path.stat().st_size for path in (out, *out.rglob("*")) if path.is_file())
    screen = console()
    count = parameters(trained.network.value)
    screen.print(f"{to}: {out}  ({count:,} parameters, {files / 2**20:.1f} MiB)")
    next_use(screen, run, trained)
    return 0


def _module(name: str) -> Any:
    return import_module(FORMATS[name][1])


def _write(name: str, trained: Any, out: Path, options: dict[str, Any]) -> tuple[str, ...]:
    """Write into a folder that gets its name when it is complete, or whose one file gets it."""
    part = out.with_name(f"{out.name}.part")
    try:
        part.mkdir(parents=True)
    except FileExistsError:
        raise ValueError(f"{part} is left of an export that was stopped; remove it") from None
    except OSError as error:
        raise ValueError(
            f"cannot create {part} ({error.strerror}); give a folder that can be written with --out"
        ) from None
    try:
        notes: tuple[str, ...] = _module(name).export(trained, part, **options)
        files = list(part.iterdir())
        if out.suffix == f".{name}" and not out.is_dir() and [path.suffix for path in files] == [out.suffix]:
            os.replace(files[0], out)
            part.rmdir()
        else:
            os.replace(part, out)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return notes


def reasons(network: Network | PairNetwork) -> dict[str, str | None]:
    """Returns why a network cannot be exported, by the name of the format; None where it can."""
    return {name: _module(name).reason(network) for name in FORMATS}
