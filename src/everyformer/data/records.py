"""Records: JSON lines, CSV or TSV with a header, one record a line; packed or not."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everyformer.data.files import decoded, plain_name, unpacked
from everyformer.value import nearest

JSON = (".jsonl", ".ndjson")
TABLE = {".csv": ",", ".tsv": "\t"}
MARKS = {",": "a comma", ";": "a semicolon", "\t": "a tab"}  # between cells


@dataclass(frozen=True)
class Record:
    """Cells by the names of their columns."""

    cells: dict[str, Any]
    place: str  # such as: line 3 of rows.csv
    mark: str | None = None  # what is between cells; None in JSON

    def cell(self, wanted: str, option: str) -> Any:
        """One that is there; `option` is the setting that names the column."""
        if wanted not in self.cells:
            remedy = _wrong_mark(list(self.cells), self.mark) or (
                f"{nearest(wanted, self.cells)}; name the column with {option}"
            )
            raise ValueError(f"{self.place} has no {wanted!r} (it has {', '.join(self.cells) or 'nothing'}): {remedy}")
        if self.cells[wanted] is None:
            raise ValueError(f"{wanted!r} on {self.place} is null; fill it, or take the record out")
        return self.cells[wanted]

    def text(self, wanted: str) -> str:
        found = self.cell(wanted, "task.column=...")
        if not isinstance(found, str):
            raise ValueError(f"{wanted!r} on {self.place} is a {type(found).__name__}; give text")
        return found


def is_records(path: Path) -> bool:
    return _suffix(path) in (*JSON, *TABLE)


def _suffix(path: Path) -> str:
    return Path(plain_name(path)).suffix.lower()


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The cells of a file's records."""
    return (record.cells for record in read(path))


def read(path: Path) -> Iterator[Record]:
    """The records of a file, read line by line."""
    suffix, name = _suffix(path), str(path)
    try:
        with unpacked(path).open("rb") as file:
            if suffix in TABLE:
                yield from _table(_lines(file, name), TABLE[suffix], name)
            else:
                yield from json_lines(file, name)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give a file that can be read") from None


def json_lines(file: Iterable[bytes], name: str) -> Iterator[Record]:
    for number, line in enumerate(_lines(file, name), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {name} is not JSON ({error}); give one JSON object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {name} is a {type(row).__name__}; give one JSON object a line")
        yield Record(row, f"line {number} of {name}")


def _lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    place = 0
    for line in file:
        yield decoded(line, name, place)
        place += len(line)


def _table(lines: Iterator[str], mark: str, name: str) -> Iterator[Record]:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(lines, delimiter=mark, strict=True)
    try:
        head = next(reader, None)
        for row in reader:
            if not row:
                continue
            place = f"line {reader.line_num} of {name}"
            if head is None or len(row) != len(head):
                remedy = _wrong_mark(head or [], mark) or f"quote cells with {mark!r}"
                raise ValueError(f"{place} has {len(row)} columns, its header {len(head or [])}; {remedy}")
            yield Record(dict(zip(head, row, strict=True)), place, mark)
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {name} cannot be read: {error}; check its quotes") from None


def _wrong_mark(head: list[str], mark: str | None) -> str | None:
    """What to say of a header that is one cell with another mark in it."""
    if mark is None or len(head) != 1:
        return None
    found = next((one for one in MARKS if one != mark and one in head[0]), None)
    return f"the separator must be {MARKS[mark]}, not {MARKS[found]}; write the file so" if found else None


def texts(path: Path, wanted: str | None) -> Iterator[str]:
    """One column of all records as texts."""
    for record in read(path):
        yield record.text(wanted or "text")
