"""Where the verbs write: a terminal, with colour and a width, or a pipe, with neither."""

from __future__ import annotations

import os
import sys

from rich.console import Console


def console() -> Console:
    """Standard output. A pipe has no width, so nothing is folded or cut in it unless COLUMNS asks for it.

    Of the processes that torchrun begins only the first speaks.
    """
    quiet = os.environ.get("RANK", "0") != "0"
    piped = not sys.stdout.isatty() and not os.environ.get("COLUMNS")
    return Console(width=10_000 if piped else None, highlight=False, markup=False, emoji=False, quiet=quiet)


def harmless(text: str) -> str:
    """What a model wrote: in a terminal without characters that would command it."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def next_command(screen: Console, command: str) -> None:
    """How every verb ends: what to try now."""
    screen.print(f"\nnext: everyformer {command}", style="dim", soft_wrap=True)
