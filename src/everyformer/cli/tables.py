"""Tables that fold in a narrow terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

INDENT = (0, 0, 0, 4)


def labelled(lines: Mapping[str, str]) -> Table:
    """Labels and texts in two columns; a long text continues below itself."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in lines.items():
        grid.add_row(label, Text(text))
    return grid


def blocks(entries: Iterable[tuple[str | Text, Iterable[RenderableType]]]) -> Table:
    """A heading per entry, and its texts below it, indented."""
    grid = Table.grid()
    grid.add_column(overflow="fold")
    for heading, texts in entries:
        grid.add_row(heading)
        for text in texts:
            grid.add_row(Padding(text, INDENT))
    return grid


def width_of(screen: Console, table: RenderableType) -> int:
    """The width of a table whose cells do not fold."""
    return screen.measure(table, options=screen.options.update(max_width=10_000)).maximum
