"""`everyformer generate`: let a trained model write."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from everyformer.cli.terminal import console, harmless, next_command


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
    stream: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    out: Path | None = None,
    images: int | None = None,
    given: float | None = None,
    step: int | Literal["best"] | None = None,
    device: str = "auto",
) -> int:
    """Write on from a prompt, translate or classify it, paint pictures, or show an agent's episode.

    Parameters
    ----------
    run
        The folder of a run.
    prompt
        What comes before, without it a new line; for a translator or classifier, the text to translate or classify.
    tokens
        How many tokens to write; without it, 200.
    temperature
        0 takes the most likely token each time. Without it 0.8, for pictures 1.
    top_k
        Draw from the k most likely tokens only.
    top_p
        Draw from the fewest tokens that have this probability together.
    min_p
        Draw from the tokens with at least this share of the most likely one's probability.
    beam
        Search for the most likely text with a beam of this width instead of drawing.
    seed
        The same seed writes the same text.
    stream
        Show the text as it is written.
    out
        The file for pictures (.png), or for an episode (.gif); without it samples.png or episode.gif in the run's folder.
    images
        The number of images; without it, 16.
    given
        The share of each picture that is given: 0.5 completes the upper halves of pictures held out from training.
    step
        The checkpoint: a number, or best; without it, the last.
    device
        cpu, cuda, or auto.
    """
    from everyformer.train.trained import open_run

    if tokens is not None and tokens < 0:
        raise ValueError(f"--tokens {tokens}: give 0 or more tokens to write")
    if beam is not None and beam < 1:
        raise ValueError(f"--beam {beam}: give a beam of 1 or more, or leave it out")
    found = open_run(run, step=step, device=device, data=False)
    if stream and beam is not None:
        raise ValueError("--beam finds the whole text at once; leave --stream or --beam out")
    asked = {
        "prompt": prompt, "tokens": tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "beam": beam, "seed": seed, "stream": stream or None, "out": out, "images": images, "given": given,
    }  # fmt: skip
    choices: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    screen = console()
    if found.task.inference.generates_images:
        file = choices.pop("out", run / found.task.inference.file)
        screen.print(found.generate_images(file, **choices), soft_wrap=True)
    else:
        prompt = str(choices.pop("prompt", "\n"))
        if choices.pop("stream", False):
            pieces: Iterable[str] = chain([prompt], found.stream(prompt, **choices))
        else:
            pieces = [found.generate(prompt, **choices)]
        for piece in pieces:
            sys.stdout.write(harmless(piece))
            sys.stdout.flush()
        sys.stdout.write("\n")
    next_command(screen, "evaluate", run)
    return 0
