"""Finds the input and the label in records, and checks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import list_files, split_from_name
from everyformer.data.records import Record, Table, are_numbers, is_number, is_records, names_any, open_records

Examples = tuple[Any, Sequence[Any]]  # inputs and the names of their classes, or their numbers
INPUTS = {
    "text": ("text",),
    "sets": ("set",),
    "images": ("image", "file_name", "file", "path"),
}  # usual names of columns


@dataclass(frozen=True)
class Columns:
    """The columns of records with the input and the label, and whether labels are numbers to predict."""

    input: str | None = None  # None: the usual name for the kind of input
    label: str = "label"
    numbers: bool = False


@dataclass(frozen=True)
class Found:
    """Examples by split, the column of their inputs, and what was decided about the columns, for the user."""

    examples: dict[str, Examples] = field(default_factory=dict)
    column: str | None = None
    notes: tuple[str, ...] = ()


def labelled_tables(path: Path, kind: str, columns: Columns) -> dict[str, list[Table]]:
    """Returns the records of a folder by split, from files that are named after splits. Empty if there are none."""
    tables: dict[str, list[Table]] = {}
    files = [file for file in list_files(path) if split_from_name(file) and is_records(file)]
    for file in files:
        tables.setdefault(split_from_name(file) or "", []).append(open_table(file, kind, columns))
    if files and "train" not in tables:
        raise ValueError(f"{path} has no training examples; name their file train{files[0].suffix}")
    return tables


def open_table(path: Path, kind: str, columns: Columns) -> Table:
    names = (columns.input, columns.label)
    return open_records(path, names_any(*names, *INPUTS[kind]), numbered=are_numbers(*names))


def read_labelled(
    tables: dict[str, list[Table]], kind: str, columns: Columns, parse: Callable[[Any, str], Any] | None = None
) -> Found:
    """Returns the examples of some tables. `parse` makes an input from a cell and its location; default: a text or token ids."""
    examples: dict[str, Examples] = {}
    notes: list[str] = []
    chosen: tuple[str, str] | None = None  # of tables without a header
    column = columns.input or INPUTS[kind][0]
    for split in sorted(tables, key=lambda name: name != "train"):
        inputs: list[Any] = []
        labels: list[Any] = []
        for table in tables[split]:
            records = list(table.records)
            column, label = _names(records, kind, columns), columns.label
            if not table.has_header:
                chosen = chosen or _choose(table, records, columns)
                column, label = chosen
                notes.append(
                    f"{table.name} has no header, so its first line is an example; column {column} is the input and column {label} "
                    "the label (task.column and task.label choose others)"
                )
            for record in records:
                cell, where = record.cell(column, "task.column=..."), f"{column!r} on {record.location}"
                inputs.append(text_or_ids(cell, where) if parse is None else parse(cell, where))
                labels.append(_label(record, label, columns.numbers))
        examples[split] = inputs, labels
    return Found(examples, column, tuple(notes))


def _names(records: Sequence[Record], kind: str, columns: Columns) -> str:
    """Returns the name of the input's column: the given one, or the usual name that the first record has."""
    usual = INPUTS[kind]
    return columns.input or next((name for name in usual if records and name in records[0].cells), usual[0])


def _choose(table: Table, records: Sequence[Record], columns: Columns) -> tuple[str, str]:
    """Returns the columns of the input and the label of a table without a header.

    Of two columns the label is the one with numbers, if numbers are predicted, else the one with fewer different cells.
    """
    names = table.columns or ()
    given = [name if name in names else None for name in (columns.input, columns.label)]
    if len(names) != 2 and None in given:
        raise ValueError(
            f"{table.name} has no header and {len(names)} columns; name the input with task.column=1 and the label with "
            f"task.label={max(2, len(names))}"
        )
    if None not in given:
        return str(given[0]), str(given[1])
    first, last = names
    if given[0] or given[1]:
        label = given[1] or (last if given[0] == first else first)
    elif columns.numbers:
        label = last if all(is_number(record.cells[last]) for record in records) else first
    else:
        different = {name: len({record.cells[name] for record in records}) for name in names}
        label = first if different[first] < different[last] else last
    return (first if label == last else last), label


def _label(record: Record, label: str, numbers: bool) -> Any:
    name = record.cell(label, "task.label=...")
    if numbers:
        return parse_number(name, f"{label!r} on {record.location}")
    if not isinstance(name, str | int) or name == "":
        more = ", or use --task regress to predict numbers" if is_number(name) else ""
        raise ValueError(f"{label!r} on {record.location} is {name!r}; give a word or an integer{more}")
    return name


def text_or_ids(cell: Any, where: str) -> Any:
    """Returns a text, or an array of token ids. Raises ValueError if the cell is neither."""
    if is_token_ids(cell):
        return np.array(cell, dtype=np.int64)
    if not isinstance(cell, str):
        raise ValueError(f"{where} is of type {type(cell).__name__}; give a string, or a list of token ids")
    return cell


def find_file(folder: Path, cell: Any, where: str) -> Path:
    """Returns the path in a cell, which is relative to the folder. Raises ValueError if there is no such file."""
    if not isinstance(cell, str):
        raise ValueError(f"{where} is of type {type(cell).__name__}; save the images as files, and give their paths")
    path = folder / cell
    if not path.is_file():
        raise ValueError(f"{where} is {cell!r}, but there is no file {path}; give paths from {folder} on")
    return path


def is_token_ids(cell: Any) -> bool:
    """Returns whether a cell is a list of integers of at least 0."""
    return isinstance(cell, list) and all(type(one) is int and one >= 0 for one in cell) and bool(cell)


def parse_number(value: Any, where: str) -> float:
    """Returns a label as a finite number. Raises ValueError if it is anything else."""
    if not is_number(value) or not np.isfinite(float(value)):
        raise ValueError(f"{where} is {value!r}; give a finite number, or use --task classify to predict words")
    return float(value)


def parse_sets() -> Callable[[Any, str], NDArray[np.float32]]:
    """Returns a function that makes an array from a list of vectors, all as wide as those of its first call."""
    width: int | None = None

    def parse(value: Any, where: str) -> NDArray[np.float32]:
        nonlocal width
        try:
            vector_TF = np.array(value, dtype=np.float32)
        except (TypeError, ValueError, OverflowError):
            vector_TF = np.empty(0, np.float32)
        if vector_TF.ndim != 2 or 0 in vector_TF.shape or width not in (None, vector_TF.shape[1]):
            raise ValueError(
                f"{where} is not a set; give a list of vectors, all of {width or 'the same count of'} numbers"
            )
        if not np.isfinite(vector_TF).all():
            raise ValueError(f"{where} has NaN or infinite numbers; remove or replace them")
        width = vector_TF.shape[1]
        return vector_TF

    return parse
