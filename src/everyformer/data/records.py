"""Reads records: JSON lines, a JSON list, CSV, TSV, Parquet, Arrow or Feather, compressed or not.

The first line of CSV and TSV is a header, unless it looks like the lines below it; then columns are named 1, 2, ... Cells of CSV may be
quoted. TSV has no quotes: a quotation mark is text.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from everyformer.data.arrow import ARROW, read_table
from everyformer.data.files import decode_utf8, decompress, parse_json, read_text, uncompressed_name
from everyformer.value import nearest

JSON_LINES = (".jsonl", ".ndjson")
COLUMNAR = (".parquet", *ARROW)
DELIMITERS = {".csv": ",", ".tsv": "\t"}
DELIMITER_NAMES = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
LOOKED_AT = 50  # rows from which a header is recognised
Row = tuple[int, list[str]]  # the number of the line on which a row ends, and its cells
IsHeader = Callable[
    [Sequence[str]], bool
]  # whether the cells of the first line are names of columns that are looked for


@dataclass(frozen=True)
class Record:
    """One record: its cells by column name."""

    cells: dict[str, Any]
    location: str  # for error messages: "line 3 of rows.csv"
    delimiter: str | None = None  # between cells; None in JSON
    bare: str | None = None  # the type of a JSON value that is not an object; it is the cell "text"

    def cell(self, column: str, setting: str) -> Any:
        """Returns the cell of a column. Raises ValueError, naming the `setting` that selects the column, if it is missing or null."""
        if column not in self.cells:
            if self.bare:
                raise ValueError(f"{self.location} is a {self.bare}; give one JSON object per line or item")
            remedy = _delimiter_remedy(list(self.cells), self.delimiter) or (
                f"{nearest(column, self.cells)}; name the column with {setting}{' (1, 2, ... without a header)' * bool(self.delimiter)}"
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


@dataclass(frozen=True)
class Table:
    """The records of a file."""

    name: str
    records: Iterator[Record]
    columns: tuple[str, ...] | None = None  # of CSV and TSV; None: each record has its own
    has_header: bool = True


def is_records(path: Path) -> bool:
    """Returns whether the file's name is that of JSON lines, CSV, TSV, Parquet, Arrow or Feather, or of JSON that is a list."""
    suffix = _suffix(path)
    return suffix in (*JSON_LINES, *DELIMITERS, *COLUMNAR) or (suffix == ".json" and _is_json_list(path))


def _suffix(path: Path) -> str:
    return Path(uncompressed_name(path)).suffix.lower()


def _is_json_list(path: Path) -> bool:
    try:
        with decompress(path).open("rb") as file:
            return file.read(256).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give a readable file") from None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the cells of each record of a file."""
    return (record.cells for record in read_records(path))


def read_records(path: Path) -> Iterator[Record]:
    """Yields the records of a file."""
    return open_records(path).records


def names_any(*names: str | None) -> IsHeader:
    """Returns whether one of the cells is one of the names; case does not matter."""
    known = {name.casefold() for name in names if name}
    return lambda cells: any(cell.strip().casefold() in known for cell in cells)


def are_numbers(*names: str | None) -> bool:
    """Returns whether a column is named by its number, as those of a table without a header are."""
    return any(name is not None and name.isdigit() for name in names)


def open_records(path: Path, is_header: IsHeader = names_any(), unsure: bool = True, numbered: bool = False) -> Table:
    """Opens a file of records, which are read one by one.

    `unsure` is whether the first line of CSV or TSV is a header if neither `is_header` nor the lines below it show that. With
    `numbered` it is one only if `is_header` says so.
    """
    suffix, name = _suffix(path), str(path)
    if suffix in COLUMNAR:
        return Table(name, _read_arrow(path))
    if suffix == ".json":
        return Table(name, _read_json_list(path))
    lines = _decode_lines(_open_lines(path), name)
    if suffix in JSON_LINES:
        return Table(name, _parse_json_lines(lines, name))
    return _table(lines, DELIMITERS[suffix], name, is_header, unsure, numbered)


def read_tsv(lines: Iterable[bytes], name: str, is_header: IsHeader, unsure: bool) -> Table:
    """Returns the records of tab-separated lines, as of standard input."""
    return _table(_decode_lines(lines, name), "\t", name, is_header, unsure)


def read_json_lines(file: Iterable[bytes], name: str) -> Iterator[Record]:
    """Yields a record for each line that is not blank."""
    return _parse_json_lines(_decode_lines(file, name), name)


def _open_lines(path: Path) -> Iterator[bytes]:
    try:
        with decompress(path).open("rb") as file:
            yield from file
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give a readable file") from None


def _decode_lines(file: Iterable[bytes], name: str) -> Iterator[str]:
    offset = 0
    for line in file:
        yield decode_utf8(line, name, offset)
        offset += len(line)


def _parse_json_lines(lines: Iterable[str], name: str) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise ValueError(f"line {number} of {name} is not JSON ({error}); give one JSON object per line") from None
        yield _json_record(row, f"line {number} of {name}")


def _read_json_list(path: Path) -> Iterator[Record]:
    text = read_text(path)
    try:
        tree = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); give a list of objects") from None
    if tree and all(isinstance(one, int) for one in tree):  # one list of token ids
        tree = [tree]
    for number, row in enumerate(tree, 1):
        yield _json_record(row, f"item {number} of {path}")


def _json_record(row: Any, location: str) -> Record:
    if not isinstance(row, dict):
        return Record({"text": row}, location, bare=type(row).__name__)
    return Record(_flat(row), location)


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row whose cell `translation`, in which `datasets` has a sentence in each language, is one cell per language."""
    sentences = row.get("translation")
    if not isinstance(sentences, dict):
        return row
    return {name: cell for name, cell in row.items() if name != "translation"} | sentences


def _read_arrow(path: Path) -> Iterator[Record]:
    for number, row in enumerate(read_table(path), 1):
        yield Record(_flat(row), f"row {number} of {path}")


def _table(
    lines: Iterable[str], delimiter: str, name: str, is_header: IsHeader, unsure: bool, numbered: bool = False
) -> Table:
    rows = _split_csv(lines, name) if delimiter == "," else _split_tsv(lines)
    first = list(islice(rows, LOOKED_AT))
    if not first:
        return Table(name, iter(()), ())
    has_header = is_header(first[0][1]) or (not numbered and _looks_like_header([cells for _, cells in first], unsure))
    columns = first[0][1] if has_header else [str(number) for number in range(1, len(first[0][1]) + 1)]

    def records() -> Iterator[Record]:
        for line, cells in chain(first[has_header:], rows):
            location = f"line {line} of {name}"
            if len(cells) != len(columns):
                remedy = _delimiter_remedy(columns, delimiter) or (
                    f"quote cells that contain {delimiter!r}" if delimiter == "," else "separate cells with one tab"
                )
                where = "header" if has_header else "first line"
                raise ValueError(f"{location} has {len(cells)} columns, but the {where} has {len(columns)}; {remedy}")
            yield Record(dict(zip(columns, cells, strict=True)), location, delimiter)

    return Table(name, records(), tuple(columns), has_header)


def _split_csv(lines: Iterable[str], name: str) -> Iterator[Row]:
    csv.field_size_limit(1 << 30)
    reader = csv.reader(lines, strict=True)
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num} of {name} cannot be parsed: {error}; check its quotes") from None


def _split_tsv(lines: Iterable[str]) -> Iterator[Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line.rstrip("\r\n").split("\t")


def _looks_like_header(rows: list[list[str]], unsure: bool) -> bool:
    """Returns whether the first row names columns.

    It does if it has a word above numbers. It does not if it has a number, or a cell that occurs again below.
    """
    below = [[row[index] for row in rows[1:] if index < len(row)] for index in range(len(rows[0]))]
    if any(is_number(cell) for cell in rows[0]):
        return False
    if any(cells and all(map(is_number, cells)) for cells in below):
        return True
    if any(cell in cells for cell, cells in zip(rows[0], below, strict=True)):
        return False
    return unsure


def is_number(cell: Any) -> bool:
    """Returns whether a cell is a number, or the text of one."""
    try:
        return not isinstance(cell, bool) and float(cell) == float(cell)
    except (TypeError, ValueError):
        return False


def _delimiter_remedy(header: Sequence[str], delimiter: str | None) -> str | None:
    """Returns a remedy if the header is one cell that contains another delimiter."""
    if delimiter is None or len(header) != 1:
        return None
    other = next((one for one in DELIMITER_NAMES if one != delimiter and one in header[0]), None)
    if other is None:
        return None
    return f"separate cells with {DELIMITER_NAMES[delimiter]}, not with {DELIMITER_NAMES[other]}"


def read_column(path: Path, column: str | None) -> Iterator[str]:
    """Yields the text in one column of each record. Default: the column "text", or the only column of a file without a header."""
    table = open_records(path, names_any(column or "text"), numbered=are_numbers(column))
    column = column or only_column(table, "text", "the text with task.column=1")
    for record in table.records:
        yield record.text(column)


def only_column(table: Table, name: str, remedy: str) -> str:
    """Returns `name`; of a table without a header, its only column. Raises ValueError if that has several."""
    if table.has_header:
        return name
    if table.columns is None or len(table.columns) != 1:
        raise ValueError(f"{table.name} has no header and {len(table.columns or ())} columns; name {remedy}")
    return table.columns[0]
