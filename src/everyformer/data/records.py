"""Records: JSON lines, CSV or TSV with a header, one record a line; packed or not."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from everyformer.data.files import decoded, plain_name, unpacked
from everyformer.value import nearest

JSON = (".jsonl", ".ndjson")
TABLE = {".csv": ",", ".tsv": "\t"}


def is_records(path: Path) -> bool:
    return Path(plain_name(path)).suffix in (*JSON, *TABLE)


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a file, read line by line."""
    suffix, name = Path(plain_name(path)).suffix, str(path)
    try:
        with unpacked(path).open("rb") as file:
            if suffix in TABLE:
                yield from _table(_lines(file, name), TABLE[suffix], name)
            else:
                yield from json_lines(file, name)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give a file that can be read") from None


def json_lines(file: Iterable[bytes], name: str) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(_lines(file, name), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number} of {name} is not JSON ({error}); give one JSON object a line") from None
        if not isinstance(row, dict):
            raise ValueError(f"line {number} of {name} is a {type(row).__name__}; give one JSON object a line")
        yield row


def _lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    place = 0
    for line in file:
        yield decoded(line, name, place)
        place += len(line)


def _table(lines: Iterator[str], mark: str, name: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(lines, delimiter=mark, strict=True)
    try:
        head = next(reader, None)
        for row in reader:
            if not row:
                continue
            if head is None or len(row) != len(head):
                raise ValueError(
                    f"line {reader.line_num} of {name} has {len(row)} columns, its header {len(head or [])}; quote cells with {mark!r}"
                )
            yield dict(zip(head, row, strict=True))
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {name} cannot be read: {error}; check its quotes") from None


def column(row: dict[str, Any], wanted: str, name: str, option: str) -> Any:
    """A cell; `option` is the setting that names the column."""
    if wanted not in row or row[wanted] is None:
        raise ValueError(
            f"a record of {name} has no {wanted!r} (it has {', '.join(row) or 'nothing'}): {nearest(wanted, row)}; "
            f"name the column with {option}"
        )
    return row[wanted]


def texts(path: Path, wanted: str | None) -> Iterator[str]:
    """One column of all records as texts."""
    for row in records(path):
        text = column(row, wanted or "text", str(path), "task.column=...")
        if not isinstance(text, str):
            raise ValueError(f"{wanted or 'text'!r} of a record of {path} is a {type(text).__name__}; give text")
        yield text
