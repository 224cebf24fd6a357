"""Standard output and error: a terminal with colours and a width, or a pipe without them.

Results go to standard output; progress and the next command to try go to standard error, so that a pipe gets only the result.
"""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any

from rich.console import Console

from everyformer.cli.own_parts import imported


def fold(text: str, width: int) -> list[str]:
    """A text as lines that break between words only; a longer word, such as a path, stays whole."""
    return textwrap.wrap(text, max(8, width), break_long_words=False, break_on_hyphens=False) or [""]


class WordConsole(Console):
    """A console that breaks texts between words only."""

    def print(self, *objects: Any, **options: Any) -> None:
        if len(objects) == 1 and isinstance(objects[0], str) and not {"soft_wrap", "no_wrap"} & options.keys():
            lines = [line for text in objects[0].split("\n") for line in fold(text, self.width)]
            objects, options = ("\n".join(lines),), options | {"soft_wrap": True}
        super().print(*objects, **options)


class UnbreakableConsole(WordConsole):
    """A console for long work: it continues when the reader of a pipe exits, as after `| head -1`."""

    def on_broken_pipe(self) -> None:
        discard_output()


def discard_output() -> None:
    """Discard standard output from now on, including what is buffered, which Python would otherwise report at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console(kind: type[Console] = WordConsole, *, stderr: bool = False) -> Console:
    """A console on standard output, or on standard error. In a pipe lines are not wrapped, unless COLUMNS is set.

    Of the processes that torchrun starts, only the first prints.
    """
    quiet = os.environ.get("RANK", "0") != "0"
    piped = not (sys.stderr if stderr else sys.stdout).isatty() and not os.environ.get("COLUMNS")
    return kind(width=10_000 if piped else None, highlight=False, markup=False, emoji=False, quiet=quiet, stderr=stderr)


def error_console() -> Console:
    """A console on standard error."""
    return console(stderr=True)


def write_error(message: str) -> None:
    """Write an error to standard error: one line in a pipe, whole words in a terminal. One write: other processes write there too."""
    line = f"error: {' '.join(message.split())}"
    if sys.stderr.isatty():
        line = "\n".join(fold(line, error_console().width))
    sys.stderr.write(f"{line}\n")


def escape_controls(text: str) -> str:
    """Generated text without control characters, if it is printed to a terminal."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "·" for c in text)


def next_command(screen: Console, *words: str | Path, hint: str = "") -> None:
    """Print a command to try next to standard error, quoted for the shell. `hint` is appended as it is."""
    given = [word for name in imported for word in ("--import", name)] if "--import" not in words else []
    command = " ".join((shlex.join(["everyformer", *map(str, words), *given]), *([hint] if hint else [])))
    if not screen.quiet:
        error_console().print(f"\nnext: {command}", style="dim", soft_wrap=True)


def next_use(screen: Console, run: Path, trained: Any) -> None:
    """Print what a model is used for: generating, embedding texts if it has no output head, or else evaluating."""
    if trained.can_generate:
        next_command(screen, "generate", run, hint=trained.task.inference.example)
    elif trained.methods[:1] == ("embed",):
        next_command(screen, "embed", run, hint="--data FILE --out vectors.npy")
    else:
        next_command(screen, "evaluate", run)
