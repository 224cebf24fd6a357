"""`everyformer settings`: every setting of a run with its type, default, meaning and an example."""

from __future__ import annotations

import json
from typing import Any

from rich.table import Table
from rich.text import Text

from everyformer.cli.options import AsJson
from everyformer.cli.settings_listing import read_listing, settings_of
from everyformer.cli.tables import print_blocks
from everyformer.cli.terminal import console, next_command
from everyformer.study.family_listing import NOTHING
from everyformer.value import nearest


def settings(member: str, /, *, size: str | None = None, task: str | None = None, as_json: AsJson = False) -> int:
    """List the settings of a member and its task: type, default, meaning and an example of each.

    Parameters
    ----------
    member
        A member of the family, or a .json file with a model of your own.
    size
        The size whose defaults are shown. Default: the member's own.
    task
        The task. Default: the member's.
    """
    listing = read_listing()
    if not member.endswith(".json") and member not in listing["members"]:
        raise ValueError(f"no member of the family is named {member!r}; {nearest(member, listing['members'])}")
    sizes = listing["members"].get(member, {"sizes": {}})["sizes"]
    if size is not None and size not in sizes:
        raise ValueError(f"{member} has no size {size!r}; {nearest(size, sizes) if sizes else 'leave --size out'}")
    task = "control" if task and ":" in task else task
    if task is not None and task not in listing["tasks"]:
        raise ValueError(f"there is no task {task!r}; {nearest(task, listing['tasks'])}")
    rows = settings_of(member, size, task)
    if as_json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return 0
    screen = console()
    if screen.width >= 110:
        screen.print(_table(rows))
    else:  # a setting with its default, and below it what it means
        entries = (
            (Text(f"{row['name']}={_default(row)}", "bold"), [f"{row['meaning']} ({row['type']})"]) for row in rows
        )
        print_blocks(screen, entries)
    next_command(screen, "train", member, *(["--size", size] if size else []), rows[0]["example"])
    return 0


def _default(row: dict[str, Any]) -> str:
    default = row["default"]
    if default is None or default == []:
        return "none" if default is None else NOTHING
    return default if isinstance(default, str) else json.dumps(default)


def _table(rows: list[dict[str, Any]]) -> Table:
    """One line per setting where the width allows: long cells fold."""
    table = Table("setting", "type", "default", "meaning", "example", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(row["name"], row["type"], _default(row), row["meaning"], row["example"])
    return table
