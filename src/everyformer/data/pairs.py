"""Opens pairs of sentences: Multi30k, a folder of line-aligned files (train.en, train.de, ...) or of records, TSV, records, embedded
sentences."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from everyformer.data import synthetic
from everyformer.data.datasets import dataset_files, dataset_name
from everyformer.data.files import (
    digest,
    existing_path,
    list_files,
    memory_map,
    read_text,
    split_from_name,
    uncompressed_name,
)
from everyformer.data.labelled import hold_out, take
from everyformer.data.records import IsHeader, Table, is_records, open_records, read_tsv

Sides = tuple[list[str], list[str]]  # sources and targets
HEADER_WORDS = {
    "source", "target", "src", "tgt", "trg", "input", "output", "sentence", "translation", "original", "english",
    "german", "french", "spanish", "italian", "dutch", "portuguese", "russian", "chinese", "japanese", "korean",
    "arabic", "turkish", "polish", "czech", "swedish", "danish", "finnish", "greek", "hindi", "en", "de", "fr", "es",
    "it", "nl", "pt", "ru", "zh", "ja", "ko", "ar", "tr", "pl", "cs", "sv", "da", "fi", "el", "hi",
}  # fmt: skip


@dataclass(frozen=True)
class Pairs:
    """Sources and targets by split: train, valid, and each test set by its name."""

    name: str
    splits: dict[str, Sides]
    fingerprint: str
    notes: tuple[str, ...] = ()  # what was decided about the columns, for the user


def open_pairs(data: str | None, source: str, target: str, valid: float) -> Pairs:
    """Opens the pairs that `data` names; `source` and `target` are the extensions of the files, or the columns of the records.

    `valid` is the fraction held out for validation where the data have no validation split.
    """
    name = dataset_name(data)
    if name not in (None, "multi30k"):
        raise ValueError(f"{name} does not hold pairs of sentences; give multi30k, a folder, or a .tsv file")
    if data is None:
        if {source, target} != {"en", "de"}:
            raise ValueError(
                f"the embedded sentences are in en and de, not in {source} and {target}; give your own data"
            )
        splits = {split: sides if source == "en" else sides[::-1] for split, sides in synthetic.sentences().items()}
        return _make_pairs("the embedded sentences", splits, valid)
    if data == "-":
        table = read_tsv(sys.stdin.buffer, "standard input", _is_header(source, target), unsure=False)
        return _from_table(table, source, target, valid)
    if name == "multi30k":
        return _make_pairs(name, _read_aligned(dataset_files(name, data), source, target, name), valid)
    return _open_path(existing_path(data), source, target, valid)


def _open_path(path: Path, source: str, target: str, valid: float) -> Pairs:
    if path.is_dir():
        listed = list_files(path)
        if any(split_from_name(file) == "train" and is_records(file) for file in listed):
            return _from_folder(path, listed, source, target, valid)
        files = {uncompressed_name(file): file for file in listed}
        return _make_pairs(str(path), _read_aligned(files, source, target, str(path)), valid)
    if is_records(path):
        return _from_table(open_records(path, _is_header(source, target), unsure=False), source, target, valid)
    raw = memory_map(path).tobytes()
    return _from_table(
        read_tsv(raw.splitlines(keepends=True), str(path), _is_header(source, target), False), source, target, valid
    )


def _from_folder(path: Path, files: Sequence[Path], source: str, target: str, valid: float) -> Pairs:
    """Reads pairs from files of records that are named after splits, as those of a saved data set."""
    splits: dict[str, Sides] = {}
    notes: list[str] = []
    for file in files:
        if (split := split_from_name(file)) and is_records(file):
            sides, said = _sides(open_records(file, _is_header(source, target), unsure=False), source, target)
            before = splits.setdefault(split, ([], []))
            before[0].extend(sides[0])
            before[1].extend(sides[1])
            notes += said
    return replace(_make_pairs(str(path), splits, valid), notes=tuple(notes))


def _is_header(source: str, target: str) -> IsHeader:
    """Returns whether both cells of a line name columns: the two given names, or words that headers of pairs usually have."""
    known = {source.casefold(), target.casefold(), *HEADER_WORDS}

    def is_header(cells: Sequence[str]) -> bool:
        names = {cell.strip().casefold() for cell in cells}
        return len(names) > 1 and (names <= known or {source.casefold(), target.casefold()} <= names)

    return is_header


def _from_table(table: Table, source: str, target: str, valid: float) -> Pairs:
    sides, notes = _sides(table, source, target)
    return replace(_make_pairs(table.name, {"train": sides}, valid), notes=notes)


def _sides(table: Table, source: str, target: str) -> tuple[Sides, tuple[str, ...]]:
    """Returns the pairs of a table, and what was decided about its columns."""
    columns: tuple[str, str] = (source, target)
    notes: tuple[str, ...] = ()
    names = table.columns
    if names is not None and not {source, target} <= set(names):
        if len(names) != 2:
            raise ValueError(
                f"the first line of {table.name} has {len(names)} columns; give source, tab, target, or a header with the columns "
                f"{source} and {target}"
            )
        columns = (names[0], names[1])
        if table.has_header:
            notes = (f"the header of {table.name} is {names[0]}, {names[1]}: the first column is the source",)
        elif table.name.lower().endswith(".csv"):
            notes = (f"{table.name} has no header, so its first line is a pair: the first column is the source",)
    sides: Sides = ([], [])
    for record in table.records:
        for side, column, setting in zip(sides, columns, ("source", "target"), strict=True):
            side.append(str(record.cell(column, f"task.{setting}=...")))
    return sides, notes


def _read_aligned(files: dict[str, Path], source: str, target: str, name: str) -> dict[str, Sides]:
    """Reads pairs from files whose names differ only in the extension: train.en and train.de."""
    stems = {file.removesuffix(f".{source}") for file in files if file.endswith(f".{source}")}
    splits: dict[str, Sides] = {}
    for stem in sorted(stems):
        if f"{stem}.{target}" not in files:
            continue
        sides = tuple(_lines(read_text(files[f"{stem}.{extension}"])) for extension in (source, target))
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{stem}.{source} of {name} has {len(sides[0])} lines, but {stem}.{target} has {len(sides[1])}; line n of one must "
                "be the translation of line n of the other"
            )
        splits[{"val": "valid", "dev": "valid"}.get(stem, stem)] = (sides[0], sides[1])
    if "train" not in splits:
        listed = ", ".join(sorted(files)[:6])
        raise ValueError(
            f"{name} has no train.{source} and train.{target} (it has {listed}); rename the files, or set task.source and "
            "task.target to their extensions"
        )
    return splits


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]


def _make_pairs(name: str, splits: dict[str, Sides], valid: float) -> Pairs:
    """Checks the pairs, and holds out a validation split where there is none."""
    for split, (sources, targets) in splits.items():
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), 1):
            if not source.strip() or not target.strip():
                raise ValueError(
                    f"pair {number} of {split} of {name} has an empty side; fill it in, or remove the pair"
                )
    if len(splits["train"][0]) < 2:
        raise ValueError(f"{name} has {len(splits['train'][0])} training pair; give at least 2, one per line")
    if "valid" not in splits:
        sides = splits["train"]
        train, held_out = hold_out(len(sides[0]), valid)
        splits = splits | {
            "train": (take(sides[0], train), take(sides[1], train)),
            "valid": (take(sides[0], held_out), take(sides[1], held_out)),
        }
    return Pairs(name, splits, digest(*(one for split, sides in splits.items() for one in (split, *chain(*sides)))))
