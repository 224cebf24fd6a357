"""Opens labelled examples: texts, sets of vectors or images by split, each with the index of its class.

They come from records (JSON lines or CSV with an input and a label), a folder with one subfolder per class (below train/ and test/,
or directly), standard input (JSON lines), or a named data set. Without a validation split some training examples are held out, by
a fixed permutation.
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

from everyformer.data import synthetic
from everyformer.data.datasets import dataset_files, dataset_name
from everyformer.data.files import digest, existing_path, list_files, read_text, split_from_name
from everyformer.data.imdb import read_reviews
from everyformer.data.records import Record, is_records, read_json_lines, read_records
from everyformer.value import nearest

Labels = NDArray[np.int64]
Examples = tuple[Any, Sequence[str | int]]  # inputs and the names of their classes


@dataclass(frozen=True)
class Labelled:
    """Inputs and class indices by split. Inputs are texts, arrays of vectors, or one array of images."""

    name: str
    splits: dict[str, tuple[Sequence[Any] | NDArray[Any], Labels]]
    classes: tuple[str, ...]
    fingerprint: str


def make_labelled(name: str, examples: dict[str, Examples], valid: float) -> Labelled:
    """Numbers the classes, and holds out the fraction `valid` for validation where there is no such split."""
    names = set(examples["train"][1])
    ordered = sorted(names, key=lambda one: (0, one, "") if isinstance(one, int) else (1, 0, str(one)))
    if len(ordered) < 2:
        raise ValueError(
            f"the {len(examples['train'][1])} training examples of {name} are of {len(ordered)} class; give examples of at least "
            "two classes"
        )
    index = {one: number for number, one in enumerate(ordered)}
    splits: dict[str, tuple[Any, Labels]] = {}
    for split, (inputs, labels) in examples.items():
        if unknown := set(labels) - names:
            first = min(map(str, unknown))
            raise ValueError(
                f"the class {first!r} of {name} is in {split} but not in train: {nearest(first, map(str, names))}; give training "
                "examples of it"
            )
        splits[split] = inputs, np.array([index[one] for one in labels], dtype=np.int64)
    if "valid" not in splits:
        inputs, label_N = splits["train"]
        train, held_out = hold_out(len(label_N), valid)
        splits["train"] = take(inputs, train), label_N[train]
        splits["valid"] = take(inputs, held_out), label_N[held_out]
    classes = tuple(map(str, ordered))
    return Labelled(name, splits, classes, digest(*classes, splits_fingerprint(splits)))


def hold_out(count: int, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the sorted indices to train on and those to hold out for validation. They depend on the arguments only."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0)).numpy()
    size = max(1, round(count * fraction))
    return np.sort(order[size:]), np.sort(order[:size])


def take(inputs: Sequence[Any] | NDArray[Any], indices: NDArray[np.int64]) -> Any:
    """Returns the inputs at the given indices, as an array or a list."""
    return inputs[indices] if isinstance(inputs, np.ndarray) else [inputs[index] for index in indices]


def splits_fingerprint(splits: Mapping[str, tuple[Sequence[Any] | NDArray[Any], Labels]]) -> str:
    """Returns a checksum of all inputs and labels and of the split that each is in."""
    hasher = hashlib.sha256()
    for split, (inputs, label_N) in splits.items():
        hasher.update(f"{split} {len(inputs)} {label_N.tolist()}".encode())
        for one in [inputs] if isinstance(inputs, np.ndarray) else inputs:
            hasher.update(one.encode() if isinstance(one, str) else np.ascontiguousarray(one).tobytes())
    return hasher.hexdigest()


def open_labelled(
    data: str | None, kind: Literal["text", "sets"], column: str | None, label: str, valid: float
) -> Labelled:
    """Opens labelled texts or labelled sets of vectors. `column` and `label` are the columns of records."""
    if (name := dataset_name(data)) == "imdb":
        reviews = read_reviews(dataset_files(name, data))
        examples: dict[str, Examples] = {split: _transpose(rows) for split, rows in reviews.items()}
        return make_labelled(name, examples, valid)
    if name is not None:
        raise ValueError(f"{name} does not hold labelled {kind}; give records, a folder of classes, or imdb")
    if data is None and kind == "text":
        name, examples = "the embedded plays", synthetic.plays()
    elif data is None:
        name, examples = "the embedded sets", synthetic.sets()
    elif data == "-":
        name = "standard input"
        examples = {"train": _read_examples(read_json_lines(sys.stdin.buffer, name), kind, column, label)}
    else:
        path = existing_path(data)
        name = str(path)
        examples = _read_path(path, kind, column, label)
    for split, (inputs, _) in examples.items():
        least = 2 if split == "train" else 1
        if len(inputs) < least:
            raise ValueError(f"{name} has {len(inputs)} examples for {split}; give at least {least}")
    return make_labelled(name, examples, valid)


def _read_path(path: Path, kind: str, column: str | None, label: str) -> dict[str, Examples]:
    if path.is_file():
        if not is_records(path):
            raise ValueError(
                f"{path} has no labels; give .jsonl or .csv with a label column, or a folder with one subfolder per class"
            )
        return {"train": _read_examples(read_records(path), kind, column, label)}
    files = [file for file in list_files(path) if is_records(file) and split_from_name(file)]
    if files:
        examples: dict[str, Examples] = {}
        for file in files:
            examples[split_from_name(file) or ""] = _read_examples(read_records(file), kind, column, label)
        if "train" not in examples:
            raise ValueError(f"{path} has no training examples; name their file train{files[0].suffix}")
        return examples
    if kind == "sets":
        raise ValueError(f"{path} has no sets; give train.jsonl with a list of vectors and a label in each record")
    return {
        split: ([read_text(file) for file, _ in rows], [name for _, name in rows])
        for split, rows in class_files(path).items()
    }


def class_files(path: Path) -> dict[str, list[tuple[Path, str]]]:
    """Returns files and their classes by split: path/<class>/file or path/<split>/<class>/file."""
    files: dict[str, list[tuple[Path, str]]] = {}
    for file in list_files(path):
        parts = file.relative_to(path).parts
        split = split_from_name(Path(parts[0])) if len(parts) > 2 else None
        parts = parts[1:] if split else parts
        if len(parts) < 2 or parts[0].startswith("unsup"):  # IMDb's folder of unlabelled reviews
            continue
        files.setdefault(split or "train", []).append((file, parts[0]))
    if "train" not in files:
        raise ValueError(
            f"{path} has no training examples; give a folder with one subfolder per class, or train/<class>/"
        )
    return files


def _transpose(rows: Sequence[tuple[Any, str | int]]) -> Examples:
    return [one for one, _ in rows], [label for _, label in rows]


def _read_examples(records: Iterable[Record], kind: str, column: str | None, label: str) -> Examples:
    rows: list[tuple[Any, str | int]] = []
    column = column or ("text" if kind == "text" else "set")
    for record in records:
        value = record.text(column) if kind == "text" else record.cell(column, "task.column=...")
        if kind == "sets":
            value = _parse_set(value, rows[0][0].shape[1] if rows else None, f"{column!r} on {record.location}")
        name = record.cell(label, "task.label=...")
        if not isinstance(name, str | int) or name == "":
            raise ValueError(f"{label!r} on {record.location} is {name!r}; give a word or an integer")
        rows.append((value, name))
    return _transpose(rows)


def _parse_set(value: Any, width: int | None, name: str) -> NDArray[np.float32]:
    try:
        vector_TF = np.array(value, dtype=np.float32)
    except (TypeError, ValueError):
        vector_TF = np.empty(0, np.float32)
    if vector_TF.ndim != 2 or 0 in vector_TF.shape or width not in (None, vector_TF.shape[1]):
        raise ValueError(f"{name} is not a set; give a list of vectors, all of {width or 'the same count of'} numbers")
    if not np.isfinite(vector_TF).all():
        raise ValueError(f"{name} has NaN or infinite numbers; remove or replace them")
    return vector_TF
