"""Reads records: JSON lines, or CSV or TSV with a header, one record per line, compressed or not."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyformer.data.files import decode_utf8, decompress, uncompressed_name
from everyformer.value import nearest

JSON_LINES = (".jsonl", ".ndjson")
DELIMITERS = {".csv": ",", ".tsv": "\t"}
DELIMITER_NAMES = {",": "a comma", ";": "a semicolon", "\t": "a tab"}


@dataclass(frozen=True)
class Record:
    """One record: its cells by column name."""

    cells: dict[str, Any]
    location: str  # for error messages: "line 3 of rows.csv"
    delimiter: str | None = None  # between cells; None in JSON

    def cell(self, column: str, setting: str) -> Any:
        """Returns the cell of a column. Raises ValueError, naming the `setting` that selects the column, if it is missing or null."""
        if column not in self.cells:
            remedy = _delimiter_remedy(list(self.cells), self.delimiter) or (
                f"{nearest(column, self.cells)}; name the column with {setting}"
            )
            columns = ", ".join(self.cells) or "no columns"
            raise ValueError(f"{self.location} has no column {column!r} (it has {columns}): {remedy}")
        if self.cells[column] is None:
            raise ValueError(f"{column!r} on {self.location} is null; fill it in, or remove the record")
        return self.cells[column]

    def text(self, column: str) -> str:
        """Returns the cell of a column. Raises ValueError if it is not a string."""
        cell = self.cell(column, "task.column=...")
        if not isinstance(cell, str):
            raise ValueError(f"{column!r} on {self.location} is of type {type(cell).__name__}; give a string")
        return cell


def is_records(path: Path) -> bool:
    """Returns whether the file's name is that of JSON lines, CSV or TSV."""
    return _suffix(path) in (*JSON_LINES, *DELIMITERS)


def _suffix(path: Path) -> str:
    return Path(uncompressed_name(path)).suffix.lower()


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the cells of each record of a file."""
    return (record.cells for record in read_records(path))


def read_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file, reading it line by line."""
    suffix, name = _suffix(path), str(path)
    try:
        with decompress(path).open("rb") as file:
            if suffix in DELIMITERS:
                yield from _read_table(_decode_lines(file, name), DELIMITERS[suffix], name)
            else:
                yield from read_json_lines(file, name)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give a readable file") from None


def read_json_lines(file: Iterable[bytes], name: str) -> Iterator[Record]:
    """Yields a record for each line that is not blank."""
    for number, line in enumerate(_decode_lines(file, name), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {name} is not JSON ({error}); give one JSON object per line") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {name} is a {type(row).__name__}; give one JSON object per line")
        yield Record(row, f"line {number} of {name}")


def _decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    offset = 0
    for line in file:
        yield decode_utf8(line, name, offset)
        offset += len(line)


def _read_table(lines: Iterator[str], delimiter: str, name: str) -> Iterator[Record]:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(reader, None)
        for row in reader:
            if not row:
                continue
            location = f"line {reader.line_num} of {name}"
            if header is None or len(row) != len(header):
                remedy = _delimiter_remedy(header or [], delimiter) or f"quote cells that contain {delimiter!r}"
                raise ValueError(f"{location} has {len(row)} columns, but the header has {len(header or [])}; {remedy}")
            yield Record(dict(zip(header, row, strict=True)), location, delimiter)
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {name} cannot be parsed: {error}; check its quotes") from None


def _delimiter_remedy(header: list[str], delimiter: str | None) -> str | None:
    """Returns a remedy if the header is one cell that contains another delimiter."""
    if delimiter is None or len(header) != 1:
        return None
    other = next((one for one in DELIMITER_NAMES if one != delimiter and one in header[0]), None)
    if other is None:
        return None
    return f"separate cells with {DELIMITER_NAMES[delimiter]}, not with {DELIMITER_NAMES[other]}"


def read_column(path: Path, column: str | None) -> Iterator[str]:
    """Yields the text in one column of each record. Default: the column "text"."""
    for record in read_records(path):
        yield record.text(column or "text")
