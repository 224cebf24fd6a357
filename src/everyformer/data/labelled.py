"""Labelled examples: texts, sets or images by split, each with the number of its class.

From records (JSON lines or CSV with an input and a label), a folder with one subfolder per class (below train/ and test/,
or not), standard input (JSON lines), or a named set. Without a split for validation some of the training examples are taken,
by a permutation that is always the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from everyformer.data import made
from everyformer.data.files import digest, existing, files_in, read_text, split_of
from everyformer.data.named import find, name_of
from everyformer.data.records import Record, is_records, json_lines, read
from everyformer.data.reviews import reviews
from everyformer.value import nearest

Labels = NDArray[np.int64]
Part = tuple[Any, Sequence[str | int]]  # inputs and the names of their classes


@dataclass(frozen=True)
class Labelled:
    """Inputs and the numbers of their classes by split. Inputs are texts, arrays of vectors, or one array of images."""

    name: str
    splits: dict[str, tuple[Sequence[Any] | NDArray[Any], Labels]]
    classes: tuple[str, ...]
    fingerprint: str


def labelled(name: str, parts: dict[str, Part], valid: float) -> Labelled:
    """Number the classes, and hold out a part for validation where there is none."""
    names = set(parts["train"][1])
    ordered = sorted(names, key=lambda one: (0, one, "") if isinstance(one, int) else (1, 0, str(one)))
    if len(ordered) < 2:
        raise ValueError(
            f"{name} has {len(parts['train'][1])} training examples of {len(ordered)} class; give examples of at least two classes"
        )
    number = {one: place for place, one in enumerate(ordered)}
    splits: dict[str, tuple[Any, Labels]] = {}
    for split, (inputs, labels) in parts.items():
        if wrong := set(labels) - names:
            raise ValueError(
                f"the class {sorted(map(str, wrong))[0]!r} of {name} is in {split} but not in train: "
                f"{nearest(str(min(map(str, wrong))), map(str, names))}; give training examples of it"
            )
        splits[split] = inputs, np.array([number[one] for one in labels], dtype=np.int64)
    if "valid" not in splits:
        inputs, label_N = splits["train"]
        kept, held = hold_out(len(label_N), valid)
        splits["train"], splits["valid"] = (take(inputs, kept), label_N[kept]), (take(inputs, held), label_N[held])
    classes = tuple(map(str, ordered))
    return Labelled(name, splits, classes, digest(*classes, mark(splits)))


def hold_out(count: int, share: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The examples that stay, and those held out for validation: always the same ones."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    size = max(1, round(count * share))
    return np.sort(order[size:]), np.sort(order[:size])


def take(inputs: Sequence[Any] | NDArray[Any], rows: NDArray[np.int64]) -> Any:
    return inputs[rows] if isinstance(inputs, np.ndarray) else [inputs[row] for row in rows]


def mark(splits: Mapping[str, tuple[Sequence[Any] | NDArray[Any], Labels]]) -> str:
    """A checksum of all inputs and labels, and of which are held out."""
    found = hashlib.sha256()
    for split, (inputs, label_N) in splits.items():
        found.update(f"{split} {len(inputs)} {label_N.tolist()}".encode())
        for one in [inputs] if isinstance(inputs, np.ndarray) else inputs:
            found.update(one.encode() if isinstance(one, str) else np.ascontiguousarray(one).tobytes())
    return found.hexdigest()


def open_labelled(
    data: str | None, kind: Literal["text", "sets"], inputs: str | None, label: str, valid: float
) -> Labelled:
    """Labelled texts, or labelled sets of vectors."""
    if (name := name_of(data)) == "imdb":
        found = reviews(find(name, data))
        parts: dict[str, Part] = {split: _columns(rows) for split, rows in found.items()}
        return labelled(name, parts, valid)
    if name is not None:
        raise ValueError(f"{name} does not hold labelled {kind}; give records, a folder of classes, or imdb")
    if data is None:
        name, parts = ("the embedded plays", made.plays()) if kind == "text" else ("the embedded sets", made.sets())
    elif data == "-":
        name = "standard input"
        parts = {"train": _rows(json_lines(sys.stdin.buffer, name), kind, inputs, label)}
    else:
        path = existing(data)
        name = str(path)
        parts = _path(path, kind, inputs, label)
    for split, (some, _) in parts.items():
        if len(some) < (2 if split == "train" else 1):
            raise ValueError(
                f"{name} has {len(some)} examples for {split}; give at least {2 if split == 'train' else 1}"
            )
    return labelled(name, parts, valid)


def _path(path: Path, kind: str, inputs: str | None, label: str) -> dict[str, Part]:
    if path.is_file():
        if not is_records(path):
            raise ValueError(
                f"{path} does not tell the classes of its examples; give .jsonl or .csv with a label, or a folder with "
                "one subfolder per class"
            )
        return {"train": _rows(read(path), kind, inputs, label)}
    files = [one for one in files_in(path) if is_records(one) and split_of(one)]
    if files:
        found: dict[str, Part] = {}
        for one in files:
            found[split_of(one) or ""] = _rows(read(one), kind, inputs, label)
        if "train" not in found:
            raise ValueError(f"{path} has no training examples; name their file train{files[0].suffix}")
        return found
    if kind == "sets":
        raise ValueError(f"{path} has no sets; give train.jsonl with a list of vectors and a label in each record")
    return {
        split: ([read_text(one) for one, _ in rows], [name for _, name in rows])
        for split, rows in class_files(path).items()
    }


def class_files(path: Path) -> dict[str, list[tuple[Path, str]]]:
    """Files and their classes by split: path/<class>/file or path/<split>/<class>/file."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for file in files_in(path):
        parts = file.relative_to(path).parts
        split = split_of(Path(parts[0])) if len(parts) > 2 else None
        parts = parts[1:] if split else parts
        if len(parts) < 2 or parts[0].startswith("unsup"):  # IMDb's folder of reviews without a class
            continue
        found.setdefault(split or "train", []).append((file, parts[0]))
    if "train" not in found:
        raise ValueError(
            f"{path} has no training examples: give a folder with one subfolder per class, or train/<class>/"
        )
    return found


def _columns(rows: Sequence[tuple[Any, str | int]]) -> Part:
    return [one for one, _ in rows], [label for _, label in rows]


def _rows(rows: Iterable[Record], kind: str, inputs: str | None, label: str) -> Part:
    found: list[tuple[Any, str | int]] = []
    wanted = inputs or ("text" if kind == "text" else "set")
    for row in rows:
        given = row.text(wanted) if kind == "text" else row.cell(wanted, "task.column=...")
        if kind == "sets":
            given = _set(given, found[0][0].shape[1] if found else None, f"{wanted!r} on {row.place}")
        of = row.cell(label, "task.label=...")
        if not isinstance(of, str | int) or of == "":
            raise ValueError(f"{label!r} on {row.place} is {of!r}; give a word or a whole number")
        found.append((given, of))
    return _columns(found)


def _set(given: Any, width: int | None, name: str) -> NDArray[np.float32]:
    try:
        vector_TF = np.array(given, dtype=np.float32)
    except (TypeError, ValueError):
        vector_TF = np.empty(0, np.float32)
    if vector_TF.ndim != 2 or 0 in vector_TF.shape or width not in (None, vector_TF.shape[1]):
        raise ValueError(f"{name} is not a set: give a list of vectors, all of {width or 'the same'} numbers")
    if not np.isfinite(vector_TF).all():
        raise ValueError(f"{name} has a number that is not finite; leave it out or replace it")
    return vector_TF
