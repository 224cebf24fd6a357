"""Reads examples without labels, for prediction: texts, sets of vectors or images, with the cells that describe each.

Texts are the lines of standard input or of a text file, the files of a folder, or a column of records; images are a file, the files of
a folder, or the paths in a column of records. A folder may have records, such as a data set that `datasets` saved.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from everyformer.data.arrays import read_features
from everyformer.data.files import decode_utf8, list_files, read_text
from everyformer.data.images import is_image
from everyformer.data.labelled_records import find_file, parse_sets, text_or_ids
from everyformer.data.records import are_numbers, is_records, names_any, open_records

Row = tuple[dict[str, Any], Any]  # the cells to write beside the prediction, and the input


@dataclass(frozen=True)
class Inputs:
    """Examples in their order."""

    name: str
    rows: Iterator[Row]
    total: int | None = None  # None: unknown, as of standard input


def read_inputs(data: str, kind: str, columns: tuple[str | None, ...]) -> Inputs:
    """Opens examples of a kind: "text", "sets" or "images". `columns` are names of the input's column of records, best first."""
    if data == "-":
        if kind != "text":
            raise ValueError(f"{kind} cannot be read from standard input; give a file or a folder")
        return Inputs("standard input", _lines(sys.stdin.buffer, "standard input"))
    path = Path(data).expanduser()
    if not path.exists():
        raise ValueError(f"there is no file or folder {path}; give a path, or - for standard input")
    if kind == "sets" and path.suffix == ".npy":
        feature_NTF = read_features(path)
        return Inputs(str(path), (({"example": n}, x_TF) for n, x_TF in enumerate(feature_NTF)), len(feature_NTF))
    names = tuple(name for name in columns if name)
    if path.is_dir():
        return _read_folder(path, kind, names)
    if kind == "images" and is_image(path):
        return Inputs(str(path), iter([({"file": str(path)}, path)]), 1)
    if is_records(path):
        return _read_tables(path, [path], kind, names)
    if kind != "text":
        raise ValueError(
            f"{path} has no {kind}; give records (.jsonl, .csv, ...){' or images' if kind == 'images' else ''}"
        )
    with path.open("rb") as file:
        total = sum(1 for _ in _lines(file, str(path)))

    def lines() -> Iterator[Row]:
        with path.open("rb") as file:
            yield from _lines(file, str(path))

    return Inputs(str(path), lines(), total)


def _read_tables(path: Path, files: Sequence[Path], kind: str, names: tuple[str, ...]) -> Inputs:
    """The records of some files, one after the other."""
    parsers: dict[str, Callable[[Any, str], Any]] = {"text": text_or_ids, "sets": parse_sets()}

    def rows() -> Iterator[Row]:
        for file in files:
            yield from _rows(file, names, parsers.get(kind, partial(find_file, file.parent)))

    total = sum(1 for _ in rows())  # also checks every record before the first prediction
    return Inputs(str(path), rows(), total)


def _read_folder(path: Path, kind: str, names: tuple[str, ...]) -> Inputs:
    listed = list_files(path)
    files = [file for file in listed if is_image(file) == (kind == "images")]
    if (kind != "images" or not files) and (records := [file for file in listed if is_records(file)]):
        return _read_tables(path, records, kind, names)
    if not files or kind == "sets":
        raise ValueError(f"the folder {path} has no {kind}; give another folder, or a file")
    rows = (({"file": str(file)}, file if kind == "images" else read_text(file)) for file in files)
    return Inputs(str(path), rows, len(files))


def _lines(file: Any, name: str) -> Iterator[Row]:
    offset = 0
    for raw in file:
        text = decode_utf8(raw, name, offset).rstrip("\r\n")
        offset += len(raw)
        if text.strip():
            yield {"text": text}, text


def _rows(path: Path, names: tuple[str, ...], parse: Callable[[Any, str], Any]) -> Iterator[Row]:
    table = open_records(path, names_any(*names), numbered=are_numbers(names[0]))
    columns = table.columns
    only = columns[0] if columns is not None and len(columns) == 1 else names[0]
    for record in table.records:
        column = next((name for name in names if name in record.cells), only)
        if column not in record.cells and not table.has_header:
            raise ValueError(
                f"{table.name} has no header and {len(columns or ())} columns; name the input with --column 1"
            )
        yield record.cells, parse(record.cell(column, "--column"), f"{column!r} on {record.location}")
