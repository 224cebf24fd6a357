"""Tables that fold in a narrow terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.text import Text

from everyformer.cli.terminal import fold

INDENT = " " * 4


def print_labelled(screen: Console, lines: Mapping[str, str]) -> None:
    """Labels and texts in two columns; a long text continues below itself."""
    wide = max(map(len, lines), default=0) + 2
    for label, text in lines.items():
        for number, piece in enumerate(fold(text, screen.width - wide)):
            screen.print(f"{'' if number else label:<{wide}}{piece}", soft_wrap=True)


def print_blocks(screen: Console, entries: Iterable[tuple[str | Text, Iterable[str]]]) -> None:
    """A heading per entry, and its texts below it, indented. A long heading is a path, which is broken behind its points."""
    for heading, texts in entries:
        for part in _fold_path(heading if isinstance(heading, Text) else Text(heading), screen.width):
            screen.print(part)
        for text in texts:
            for piece in fold(text, screen.width - len(INDENT)):
                screen.print(INDENT + piece, soft_wrap=True)


def _fold_path(path: Text, width: int) -> Iterable[Text]:
    cuts, start, before = list[int](), 0, 0
    for point in re.finditer(r"\.|$", path.plain):
        if point.end() - start > width and before > start:
            start = before
            cuts.append(start)
        before = point.end()
    return path.divide(cuts)


def width_of(screen: Console, table: RenderableType) -> int:
    """The width of a table whose cells do not fold."""
    return screen.measure(table, options=screen.options.update(max_width=10_000)).maximum
