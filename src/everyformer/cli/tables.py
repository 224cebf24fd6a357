"""Tables that fold in a narrow terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.text import Text

INDENT = " " * 4


def print_labelled(screen: Console, lines: Mapping[str, str]) -> None:
    """Labels and texts in two columns; a long text continues below itself."""
    wide = max(map(len, lines), default=0) + 2
    for label, text in lines.items():
        pieces = textwrap.wrap(text, max(8, screen.width - wide)) or [""]
        for number, piece in enumerate(pieces):
            screen.print(f"{'' if number else label:<{wide}}{piece}", soft_wrap=True)


def print_blocks(screen: Console, entries: Iterable[tuple[str | Text, Iterable[str]]]) -> None:
    """A heading per entry, and its texts below it, indented."""
    for heading, texts in entries:
        screen.print(heading)
        for text in texts:
            for piece in textwrap.wrap(text, max(8, screen.width - len(INDENT))):
                screen.print(INDENT + piece, soft_wrap=True)


def width_of(screen: Console, table: RenderableType) -> int:
    """The width of a table whose cells do not fold."""
    return screen.measure(table, options=screen.options.update(max_width=10_000)).maximum
