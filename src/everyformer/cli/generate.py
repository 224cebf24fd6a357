"""`everyformer generate`: use a trained model."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from everyformer.cli.options import Device, RunData, Step
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.terminal import console, escape_controls, next_command

IgnoreEnd = Annotated[
    bool,
    Parameter(
        help="Generate on after a token that ends a text, as published models have one.",
        negative=(),
        show_default=False,
    ),
]


def generate(
    run: Path,
    /,
    *,
    prompt: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    beam: int | None = None,
    seed: int | None = None,
    ignore_end: IgnoreEnd = False,
    stream: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    out: Path | None = None,
    images: int | None = None,
    given: float | None = None,
    data: RunData = None,
    step: Step = None,
    device: Device = "auto",
    imports: Imports = (),
) -> int:
    """Continue a prompt, fill its blanks, translate or classify it, generate images, or record an agent's episode.

    Parameters
    ----------
    run
        The folder of a run.
    prompt
        The text to continue, translate or classify, or a text with blanks (___) to fill. Default: a new line.
    tokens
        The number of tokens to generate. Default: 200.
    temperature
        The softmax temperature; 0 takes the most likely token. Default: 0.8, for images 1.
    top_k
        Sample from the k most likely tokens only.
    top_p
        Sample from the smallest set of tokens whose probabilities sum to this value.
    min_p
        Sample from tokens with at least this fraction of the largest probability.
    beam
        Search for the most likely text with this beam width, instead of sampling.
    seed
        The random seed. The same seed gives the same output.
    stream
        Print each token as soon as it is generated.
    out
        The file for images (.png) or for an episode (.gif). Default: samples.png or episode.gif in the run's folder.
    images
        The number of images. Default: 16.
    given
        Complete held-out images from this fraction of their rows: 0.5 gives the upper half.
    """
    import_parts(imports, run)
    options = {
        "prompt": prompt, "tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "beam": beam,
        "seed": seed, "stream": stream or None, "ignore_end": ignore_end or None, "out": out, "images": images, "given": given,
    }  # fmt: skip
    _generate(run, data, step, device, {name: value for name, value in options.items() if value is not None})
    return 0


def _generate(run: Path, data: RunData, step: Step, device: str, options: dict[str, Any]) -> None:
    """Generate with the options that were given, and print or write the result."""
    from everyformer.train.trained import load

    if options.get("tokens", 0) < 0:
        raise ValueError(f"--tokens {options['tokens']} is negative; give the number of tokens to generate")
    if options.get("beam", 1) < 1:
        raise ValueError(f"--beam {options['beam']} is less than 1; give the width of the beam, or leave it out")
    trained = load(run, step=step, device=device, data=data or False)
    if "stream" in options and "beam" in options:
        raise ValueError("--beam returns the whole text at once and cannot be streamed; leave out --stream or --beam")
    screen = console()
    if trained.task.inference.generates_images:
        file = options.pop("out", run / trained.task.inference.file)
        screen.print(trained.generate_images(file, **options))
    else:
        prompt = str(options.pop("prompt", "\n"))
        if options.pop("stream", False):
            pieces: Iterable[str] = chain([prompt], trained.stream(prompt, **options))
        else:
            pieces = [trained.generate(prompt, **options)]
        for piece in pieces:
            sys.stdout.write(escape_controls(piece))
            sys.stdout.flush()
        sys.stdout.write("\n")
    next_command(screen, "evaluate", run)
