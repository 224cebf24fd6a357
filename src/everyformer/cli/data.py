"""`everyformer data`: the data sets that have a name, and examples of a generated problem."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table

from everyformer.cli.options import AsJson
from everyformer.cli.tables import print_blocks, print_labelled, width_of
from everyformer.cli.terminal import console, escape_controls, next_command
from everyformer.value import nearest

EXAMPLES = 3
FILES = {  # data sets of files, and what they are
    "enwik8": "text: 100 million bytes of Wikipedia",
    "imdb": "texts and classes: 50,000 film reviews",
    "multi30k": "pairs: 31,000 captions in English, German and French",
    "mnist": "images and classes: 70,000 digits",
    "cora": "a graph: 2,708 papers and their citations",
}


def data(name: str | None = None, /, *, as_json: AsJson = False) -> None:
    """List the data sets that have a name, with what each generated problem tests, or show one.

    Parameters
    ----------
    name
        A data set; of a generated problem, examples are shown.
    """
    from everyformer.data.problems import PROBLEMS

    screen, names = console(), [*PROBLEMS, *FILES]
    if name is not None and name not in names:
        raise ValueError(f"there is no data set {name!r}; {nearest(name, names)}")
    rows = [_row(one) for one in names if name in (None, one)]
    if as_json:
        print(json.dumps(rows if name is None else rows[0], indent=2, ensure_ascii=False))
    elif name is None:
        _list(screen, rows)
    else:
        print_labelled(
            screen, {key: _shown(value) for key, value in rows[0].items() if value is not None and key != "examples"}
        )
        for example in rows[0].get("examples", []):
            screen.print("")
            for line in example.splitlines():
                screen.print(escape_controls(line), soft_wrap=True)
    if name is None:
        next_command(screen, "data", "mqar")
    elif name in PROBLEMS:
        next_command(screen, "train", "gpt2", "--size", "tiny", "--data", name)


def _row(name: str) -> dict[str, Any]:
    from everyformer.data.problems import PROBLEMS

    if name in FILES:
        return {"name": name, "content": FILES[name]}
    problem = PROBLEMS[name]
    pieces = problem.examples("train", 0, range(EXAMPLES), problem.length)
    return {
        "name": name,
        "tests": problem.tests,
        "chance": problem.chance,
        "train length": problem.length,
        "test lengths": list(problem.test_length),
        "answers": "one character, or a class" if problem.is_label else "several characters",
        "examples": [_example(one) for one in pieces],
    }


def _example(pieces: tuple[str, ...]) -> str:
    """The characters of an example, with those to answer in brackets."""
    return "".join(f"[{piece}]" if number % 2 else piece for number, piece in enumerate(pieces))


def _shown(value: Any) -> str:
    return (
        ", ".join(map(str, value))
        if isinstance(value, list)
        else f"{value:.3g}"
        if isinstance(value, float)
        else str(value)
    )


def _list(screen: Console, rows: list[dict[str, Any]]) -> None:
    keys = ("name", "tests", "chance", "train length", "test lengths")
    table = Table(*keys, box=None, padding=(0, 2, 0, 0), pad_edge=False)
    problems, files = ([row for row in rows if ("content" in row) == is_file] for is_file in (False, True))
    for row in problems:
        table.add_row(*(_shown(row[key]) for key in keys))
    if width_of(screen, table) <= screen.width:
        screen.print(table)
    else:
        details = [
            (row["name"], [row["tests"], *(f"{key} {_shown(row[key])}" for key in keys[2:])]) for row in problems
        ]
        print_blocks(screen, details)
    screen.print("")
    print_labelled(screen, {row["name"]: row["content"] for row in files})
