"""`everyformer family`: all members in a table, one member in full, or the differences between two."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from everyformer.cli.options import AsJson
from everyformer.cli.own_parts import Imports, import_parts
from everyformer.cli.tables import print_blocks, print_labelled, width_of
from everyformer.cli.terminal import console, next_command
from everyformer.study.differences import differences, is_size, tree_of
from everyformer.study.family_listing import NOTHING, read_listing
from everyformer.value import flatten, to_json

if TYPE_CHECKING:
    from everyformer.network.model import EncoderDecoder, Model

COLUMNS = (
    "member",
    "paper",
    "pattern",
    "score mods",
    "sublayers",
    "residual",
    "depth",
    "cache",
    "sizes and parameters",
)
STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}


def family(
    name: str | None = None,
    /,
    *,
    size: str | None = None,
    diff: Annotated[tuple[str, str] | None, Parameter(negative=())] = None,
    as_json: AsJson = False,
    imports: Imports = (),
) -> None:
    """List all members, show one member, or compare two.

    Parameters
    ----------
    name
        The member to show: NAME, NAME:SIZE, or a .json file with a model of your own.
    size
        The size of that member.
    diff
        Two members, each NAME or NAME:SIZE. Prints only the fields in which they differ.
    """
    import_parts(imports)
    screen = console()
    if diff is not None:
        if name is not None or size is not None:
            raise ValueError("--diff takes two members, and neither NAME nor --size; write --diff gpt2:tiny bert:tiny")
        _compare(screen, *diff, as_json)
    elif name is not None:
        _one(screen, name, size, as_json)
    elif size is not None:
        raise ValueError(f"--size {size} needs a member; write everyformer family NAME --size {size}")
    else:
        _all(screen, as_json)


def _all(screen: Console, as_json: bool) -> None:
    rows = read_listing()
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = _table(rows, "\n" if screen.is_terminal else ", ")
    screen.print(table if width_of(screen, table) <= screen.width else _blocks(rows))
    next_command(screen, "family", "--diff", "bert", "gpt2")


def _cells(row: dict[str, Any], between_sizes: str) -> list[str]:
    sides = [
        " → ".join(dict.fromkeys(row[column])) for column in ("pattern", "score mods", "sublayers", "residual", "depth")
    ]
    sizes = between_sizes.join(f"{name} {human(size['parameters'])}" for name, size in row["sizes"].items())
    return [row["member"], row["paper"], *sides, row["cache"], sizes]


def human(count: int) -> str:
    """A count with three digits: 124M."""
    rounded = float(f"{count:.3g}")
    for letter, unit in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if rounded >= unit:
            return f"{rounded / unit:.3g}{letter}"
    return str(count)


def _table(rows: list[dict[str, Any]], between_sizes: str) -> Table:
    table = Table(*COLUMNS, **STYLE)
    table.columns[0].style = "bold"
    for row in rows:
        table.add_row(*_cells(row, between_sizes))
    return table


def _blocks(rows: list[dict[str, Any]]) -> Table:
    """The same for a terminal that is too narrow for the table: one block per member."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for number, row in enumerate(rows):
        if number:
            grid.add_row()
        name, *cells = _cells(row, ", ")
        grid.add_row(Text(COLUMNS[0], "dim"), Text(name, "bold"))
        for label, cell in zip(COLUMNS[1:], cells, strict=True):
            grid.add_row(Text(label.split()[0], "dim"), cell)
    return grid


def _find(text: str, size: str | None = None) -> tuple[str, Model | EncoderDecoder]:
    """Returns NAME:SIZE and the value for NAME or NAME:SIZE."""
    from everyformer.family.table import find

    name, colon, size_in_text = text.partition(":")
    if colon and size:
        raise ValueError(f"{text} and --size {size} both give a size; give one of them")
    member = find(name)
    size = size_in_text or size or member.size
    return f"{name}:{size}", member.value(size)


def _one(screen: Console, text: str, size: str | None, as_json: bool) -> None:
    from everyformer.family.table import find, parameters

    title, value = _find(text, size)
    if as_json:
        print(to_json(value))
        return
    name = title.partition(":")[0]
    screen.print(f"{title}  {find(name).paper}, {parameters(value):,} parameters\n", style="bold")
    lines = {path: _show(leaf) for path, leaf in flatten(tree_of(value))}
    if max(map(len, lines)) + 2 + max(map(len, lines.values())) <= screen.width:
        print_labelled(screen, lines)
    else:
        print_blocks(screen, ((Text(path, "dim"), [text]) for path, text in lines.items()))
    next_command(screen, "family", "--diff", title, "bert" if name != "bert" else "gpt2")


def _compare(screen: Console, one: str, two: str, as_json: bool) -> None:
    (first, a), (second, b) = _find(one), _find(two)
    pairs = differences(a, b)
    groups = {
        "architecture": {path: pair for path, pair in pairs.items() if not is_size(path, pair)},
        "sizes and rates": {path: pair for path, pair in pairs.items() if is_size(path, pair)},
    }
    if as_json:
        print(json.dumps({"members": [first, second], **groups}, indent=2))
        return
    if not pairs:
        screen.print(f"{first} and {second} do not differ.")
    else:
        table = Table("", first, second, **STYLE)
        narrow: list[tuple[Text, list[str]]] = []
        for (title, lines), style in zip(groups.items(), ("bold", "dim"), strict=True):
            if lines:
                table.add_section()
                table.add_row(Text(title, f"{style} italic"))
                narrow.append((Text(title, f"{style} italic"), []))
            for path, pair in lines.items():
                table.add_row(Text(path, style), *(Text(_show(leaf), style) for leaf in pair))
                both = zip((first, second), pair, strict=True)
                narrow.append((Text(path, style), [f"{name}: {_show(leaf)}" for name, leaf in both]))
        if width_of(screen, table) <= screen.width:
            screen.print(table)
        else:
            print_blocks(screen, narrow)
    next_command(screen, "family", first)


def _show(leaf: Any) -> str:
    if isinstance(leaf, bool):
        return "yes" if leaf else "no"
    return NOTHING if leaf is None or leaf == [] else str(leaf)
