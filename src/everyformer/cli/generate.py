"""`everyformer generate`: let a trained model write."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from everyformer.cli.terminal import console, next_command


def generate(
    run: Path,
    /,
    *,
    prompt: str = "\n",
    tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    beam: int | None = None,
    seed: int | None = None,
    stream: Annotated[bool, Parameter(negative=(), show_default=False)] = False,
    step: int | Literal["best"] | None = None,
    device: str = "auto",
) -> int:
    """Write on from a prompt, or translate it.

    Parameters
    ----------
    run
        The folder of a run.
    prompt
        What comes before; for a translator, the sentence to translate.
    tokens
        How many tokens to write.
    temperature
        0 takes the most likely token each time.
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
    step
        The checkpoint: a number, or best; without it, the last.
    device
        cpu, cuda, or auto.
    """
    from everyformer.train.finished import open_run

    found = open_run(run, step=step, device=device, data=False)
    choices = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    screen = console()
    if stream:
        for piece in found.stream(prompt, tokens, **choices):
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    else:
        screen.print(found.write(prompt, tokens, beam=beam, **choices))
    next_command(screen, f"evaluate {run}")
    return 0
