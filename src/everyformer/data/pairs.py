"""Pairs: sentences (Multi30k, a folder of line-aligned files train.en, train.de, ..., TSV, records; else made ones), or digits to copy,
reverse or add, made anew and the same each time."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from everyformer.data import made
from everyformer.data.files import decoded, digest, existing, files_in, plain_name, read_text
from everyformer.data.labelled import hold_out, take
from everyformer.data.named import find, name_of
from everyformer.data.records import is_records, read

Sides = tuple[list[str], list[str]]


@dataclass(frozen=True)
class Pairs:
    """Sources and targets by split: train, valid, and each test set by its name."""

    name: str
    splits: dict[str, Sides]
    fingerprint: str
    exact: bool = False  # is there one right answer, to the character? Then nothing is cut, and tests are by length


def open_pairs(data: str | None, source: str, target: str, valid: float) -> Pairs:
    """`source` and `target` are the endings of the files, or the columns of the records."""
    if data in made.ALGORITHMS and not Path(data).exists():
        return replace(_pairs(data, made.algorithm(data), valid), exact=True)
    name = name_of(data)
    if name not in (None, "multi30k"):
        raise ValueError(
            f"{name} does not hold pairs of sentences; give multi30k, copy, reverse, addition, a folder, or a .tsv file"
        )
    if data is None:
        if {source, target} != {"en", "de"}:
            raise ValueError(
                f"the embedded sentences are in en and de, not {source} and {target}; give data of your own"
            )
        parts = {split: sides if source == "en" else sides[::-1] for split, sides in made.sentences().items()}
        return _pairs("the embedded sentences", parts, valid)
    if data == "-":
        name = "standard input"
        return _pairs(name, {"train": _tabs(decoded(sys.stdin.buffer.read(), name), name)}, valid)
    if name == "multi30k":
        return _pairs(name, _aligned(find(name, data), source, target, name), valid)
    path = existing(data)
    if path.is_dir():
        return _pairs(
            str(path), _aligned({plain_name(one): one for one in files_in(path)}, source, target, str(path)), valid
        )
    if is_records(path) and not plain_name(path).lower().endswith(".tsv"):
        sides: Sides = ([], [])
        for record in read(path):
            for side, wanted, option in zip(sides, (source, target), ("source", "target"), strict=True):
                side.append(str(record.cell(wanted, f"task.{option}=...")))
    else:
        sides = _tabs(read_text(path), str(path))
    return _pairs(str(path), {"train": sides}, valid)


def _tabs(text: str, name: str) -> Sides:
    """A source, a tab and a target on each line that is not blank."""
    sources: list[str] = []
    targets: list[str] = []
    for number, line in enumerate(io.StringIO(text, newline=None), 1):
        if not line.strip():
            continue
        cells = line.rstrip("\n").split("\t")
        if len(cells) != 2:
            raise ValueError(f"line {number} of {name} has {len(cells)} columns; give source, tab, target")
        sources.append(cells[0])
        targets.append(cells[1])
    return sources, targets


def _aligned(files: dict[str, Path], source: str, target: str, name: str) -> dict[str, Sides]:
    """Pairs from files whose names differ only in the ending: train.en and train.de."""
    stems = {one.removesuffix(f".{source}") for one in files if one.endswith(f".{source}")}
    parts: dict[str, Sides] = {}
    for stem in sorted(stems):
        if f"{stem}.{target}" not in files:
            continue
        sides = tuple(_lines(read_text(files[f"{stem}.{end}"])) for end in (source, target))
        if len(sides[0]) != len(sides[1]):
            raise ValueError(
                f"{stem}.{source} of {name} has {len(sides[0])} lines, {stem}.{target} {len(sides[1])}; line n of one must be "
                "the translation of line n of the other"
            )
        parts[{"val": "valid", "dev": "valid"}.get(stem, stem)] = (sides[0], sides[1])
    if "train" not in parts:
        found = ", ".join(sorted(files)[:6])
        raise ValueError(
            f"{name} has no train.{source} and train.{target} (it has {found}); name the files so, or set task.source and "
            "task.target to their endings"
        )
    return parts


def _lines(text: str) -> list[str]:
    return [line.removesuffix("\r") for line in text.rstrip("\r\n").split("\n")]


def _pairs(name: str, parts: dict[str, Sides], valid: float) -> Pairs:
    for split, (sources, targets) in parts.items():
        for number, (one, other) in enumerate(zip(sources, targets, strict=True), 1):
            if not one.strip() or not other.strip():
                raise ValueError(f"pair {number} of {split} of {name} has an empty side; fill it or take the pair out")
    if len(parts["train"][0]) < 2:
        raise ValueError(f"{name} has {len(parts['train'][0])} pair for training; give at least 2, one a line")
    if "valid" not in parts:
        sides = parts["train"]
        kept, held = hold_out(len(sides[0]), valid)
        parts = parts | {
            "train": (take(sides[0], kept), take(sides[1], kept)),
            "valid": (take(sides[0], held), take(sides[1], held)),
        }
    return Pairs(name, parts, digest(*(one for split, sides in parts.items() for one in (split, *chain(*sides)))))
