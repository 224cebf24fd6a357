"""Where the verbs write: a terminal, with colour and a width, or a pipe, with neither."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

from rich.console import Console


class Lasting(Console):
    """For work that goes on when the reader of a pipe has gone, as after `| head -1`."""

    def on_broken_pipe(self) -> None:
        to_nowhere()


def to_nowhere() -> None:
    """Standard output leads nowhere from now on; what it has buffered goes there too, or Python complains of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(kind: type[Console] = Console) -> Console:
    """Standard output. A pipe has no width, so nothing is folded or cut in it unless COLUMNS asks for it.

    Of the processes that torchrun begins only the first speaks.
    """
    quiet = os.environ.get("RANK", "0") != "0"
    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return kind(width=10_000 if piped else None, highlight=False, markup=False, emoji=False, quiet=quiet)


def harmless(text: str) -> str:
    """What a model wrote: in a terminal without characters that would command it."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def next_command(screen: Console, *words: str | Path, hint: str = "") -> None:
    """How every verb ends: what to try now, as a shell reads it. A hint comes after the words and is shell text already."""
    command = " ".join((shlex.join(["everyformer", *map(str, words)]), *([hint] if hint else [])))
    screen.print(f"\nnext: {command}", style="dim", soft_wrap=True)
