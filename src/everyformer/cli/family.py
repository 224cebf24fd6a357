"""`everyformer family`: the members in a table, one of them in full, or what tells two of them apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from everyformer.cli.terminal import console, next_command
from everyformer.value import Value, flatten, snake, to_json

if TYPE_CHECKING:
    from everyformer.attention.pattern import Pattern
    from everyformer.family.table import Member
    from everyformer.network.model import EncoderDecoder, Model

COLUMNS = ("member", "paper", "pattern", "score mods", "residual", "depth", "cache", "sizes and parameters")
NOTHING = "–"
STYLE: dict[str, Any] = {"box": box.SIMPLE_HEAD, "padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
# Fields that make a model larger or steadier, not another one.
NUMBERS = {
    *("width", "heads", "layers", "hidden", "vocabulary", "length", "classes", "key_width", "value_width", "memory"),
    *("size", "channels", "base", "dropout", "eps", "std", "max_distance", "max_span", "ramp", "cost", "start"),
}


def family(
    name: str | None = None,
    /,
    *,
    size: str | None = None,
    diff: Annotated[tuple[str, str] | None, Parameter(negative=())] = None,
    as_json: Annotated[bool, Parameter("--json", negative=(), show_default=False)] = False,
) -> None:
    """List the members, show one of them, or compare two.

    Parameters
    ----------
    name
        A member to show in full, as NAME or NAME:SIZE.
    size
        The size of that member.
    diff
        Two members, each NAME or NAME:SIZE: print only the lines in which they differ.
    as_json
        Print JSON, with exact parameter counts.
    """
    screen = console()
    if diff is not None:
        if name is not None or size is not None:
            raise ValueError(
                "--diff compares the two members after it and nothing else; write --diff gpt2:tiny bert:tiny"
            )
        _compare(screen, *diff, as_json)
    elif name is not None:
        _one(screen, name, size, as_json)
    elif size is not None:
        raise ValueError(f"--size {size} of which member? write everyformer family NAME --size {size}")
    else:
        _all(screen, as_json)


def _all(screen: Console, as_json: bool) -> None:
    from everyformer.family.table import MEMBERS

    rows = [_row(member) for member in MEMBERS.values()]
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    table = _table(rows, "\n" if screen.is_terminal else ", ")
    wanted = screen.measure(table, options=screen.options.update(max_width=10_000)).maximum
    screen.print(table if wanted <= screen.width else _blocks(rows))
    next_command(screen, "family", "--diff", "bert", "gpt2")


def _row(member: Member) -> dict[str, Any]:
    """What the table says of a member. Pattern, rules, wiring and depth come once for each side: encoder, decoder."""
    from everyformer.family.table import parameters
    from everyformer.study.example import models

    sides = models(member.value())
    layers = [side.body.each for side in sides]
    return {
        "member": member.name,
        "paper": member.paper,
        "size": member.size,
        "pattern": [_several(_brief(one.attention.pattern) for one in each if one.attention) for each in layers],
        "score mods": [
            _several(_name(score_mod) for one in each if one.attention for score_mod in one.attention.score_mods)
            for each in layers
        ],
        "residual": [_name(side.body.residual) for side in sides],
        "depth": [_name(side.body) + " + cross" * any(one.cross for one in side.body.each) for side in sides],
        "cache": _past(sides[-1]) if sides[-1].body.is_causal() else NOTHING,
        "sizes": {
            size: {**given, "parameters": parameters(member.value(size))} for size, given in member.sizes.items()
        },
    }


def _past(value: Model) -> str:
    return "memory" if value.memory else "keys" if value.body.each else "state"


def _name(value: object) -> str:
    return snake(type(value).__name__).replace("_", "-")


def _brief(pattern: Pattern) -> str:
    """Of many patterns that heads have in turn the first."""
    from everyformer.attention.pattern import ByHead

    return (
        f"by_head({pattern.patterns[0]}, ...)"
        if isinstance(pattern, ByHead) and len(pattern.patterns) > 2
        else str(pattern)
    )


def _several(names: Iterator[str]) -> str:
    return ", ".join(dict.fromkeys(names)) or NOTHING


def _cells(row: dict[str, Any], between_sizes: str) -> list[str]:
    sides = [" → ".join(dict.fromkeys(row[column])) for column in ("pattern", "score mods", "residual", "depth")]
    sizes = between_sizes.join(f"{name} {human(size['parameters'])}" for name, size in row["sizes"].items())
    return [row["member"], row["paper"], *sides, row["cache"], sizes]


def human(count: int) -> str:
    """A count in three figures: 124M."""
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
    """The same for a terminal too narrow for the table: one block a member."""
    blocks = Table.grid(padding=(0, 2, 0, 0))
    blocks.add_column(no_wrap=True)
    blocks.add_column(overflow="fold")
    for number, row in enumerate(rows):
        if number:
            blocks.add_row()
        name, *cells = _cells(row, ", ")
        blocks.add_row(Text(COLUMNS[0], "dim"), Text(name, "bold"))
        for label, cell in zip(COLUMNS[1:], cells, strict=True):
            blocks.add_row(Text(label.split()[0], "dim"), cell)
    return blocks


def _find(text: str, size: str | None = None) -> tuple[str, Model | EncoderDecoder]:
    """NAME or NAME:SIZE as the full NAME:SIZE and its value."""
    from everyformer.family.table import find

    name, colon, own = text.partition(":")
    if colon and size:
        raise ValueError(f"{text} names a size and --size {size} another; give one of them")
    member = find(name)
    size = own or size or member.size
    return f"{name}:{size}", member.value(size)


def _one(screen: Console, text: str, size: str | None, as_json: bool) -> None:
    from everyformer.family.table import find, parameters

    title, value = _find(text, size)
    if as_json:
        print(to_json(value))
        return
    name = title.partition(":")[0]
    screen.print(f"{title}  {find(name).paper}, {parameters(value):,} parameters\n", style="bold", soft_wrap=True)
    lines = dict(flatten(_tree(value)))
    wide = max(map(len, lines))
    for path, leaf in lines.items():
        screen.print(f"{path:<{wide}}  {_show(leaf)}", soft_wrap=True)
    other = "bert" if name != "bert" else "gpt2"
    next_command(screen, "family", "--diff", title, other)


def _compare(screen: Console, one: str, two: str, as_json: bool) -> None:
    (first, a), (second, b) = _find(one), _find(two)
    found = differences(a, b)
    groups = {
        "architecture": {path: pair for path, pair in found.items() if not _is_number(path, pair)},
        "sizes and rates": {path: pair for path, pair in found.items() if _is_number(path, pair)},
    }
    if as_json:
        print(json.dumps({"members": [first, second], **groups}, indent=2))
        return
    if not found:
        screen.print(f"{first} and {second} do not differ.")
    else:
        table = Table("", first, second, **STYLE)
        for column in table.columns:
            column.overflow = "fold"
        for (title, lines), style in zip(groups.items(), ("bold", "dim"), strict=True):
            if lines:
                table.add_section()
                table.add_row(Text(title, f"{style} italic"))
            for path, pair in lines.items():
                table.add_row(Text(path, style), *(Text(_show(leaf), style) for leaf in pair))
        screen.print(table)
    next_command(screen, "family", first)


def differences(a: Model | EncoderDecoder, b: Model | EncoderDecoder) -> dict[str, tuple[Any, Any]]:
    """The paths at which two values differ, with both leaves; None where a value has nothing there.

    Absent and switched off are the same. Inside a part that the other lacks altogether, nothing is listed.
    """
    one, two = _leaves(a, b), _leaves(b, a)
    found: dict[str, tuple[Any, Any]] = {}
    for path in sorted(one | two, key=lambda path: (path != "model", path)):
        pair = one.get(path), two.get(path)
        lacking = any(path.startswith(f"{above}.") and None in found[above] for above in found)
        if pair[0] != pair[1] and not lacking:
            found[path] = pair
    return found


def _leaves(value: Model | EncoderDecoder, other: Model | EncoderDecoder) -> dict[str, Any]:
    """A value's lines. A single model beside a pair is compared with the side that is like it."""
    from everyformer.network.model import EncoderDecoder, Model

    tree = _tree(value)
    if isinstance(value, Model) and isinstance(other, EncoderDecoder):
        tree = {"type": tree["type"], "decoder" if value.body.is_causal() else "encoder": tree}
    return {path: leaf or None for path, leaf in flatten(tree)}


def _tree(part: Any) -> Any:
    """A value as plain parts, with patterns as the text they are written in."""
    from everyformer.attention.pattern import Pattern

    if isinstance(part, Pattern):
        return str(part)
    if isinstance(part, Value):
        return {"type": snake(type(part).__name__)} | {
            name: _tree(getattr(part, name)) for name in part.__struct_fields__
        }
    return [_tree(one) for one in part] if isinstance(part, tuple) else part


def _is_number(path: str, pair: tuple[Any, Any]) -> bool:
    return path.rpartition(".")[2] in NUMBERS and not any(isinstance(leaf, str) for leaf in pair)


def _show(leaf: Any) -> str:
    if isinstance(leaf, bool):
        return "yes" if leaf else "no"
    return NOTHING if leaf is None or leaf == [] else str(leaf)
