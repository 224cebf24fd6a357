"""Opens labelled examples: texts, sets of vectors or images by split, each with the index of its class or with a number.

They come from records (see `everyformer.data.records`) with an input and a label, a folder with one subfolder per class (below train/
and test/, or directly), standard input (JSON lines), or a named data set. Without a validation split some training examples are held
out, by a fixed permutation.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from everyformer.data import synthetic
from everyformer.data.arrays import has_arrays, read_arrays
from everyformer.data.datasets import dataset_files, dataset_name
from everyformer.data.files import digest, existing_path, list_files, read_text, split_from_name
from everyformer.data.imdb import read_reviews
from everyformer.data.labelled_records import (
    Columns,
    Examples,
    Found,
    labelled_tables,
    open_table,
    parse_number,
    parse_sets,
    read_labelled,
)
from everyformer.data.records import Table, is_number, is_records, read_json_lines
from everyformer.value import nearest

Labels = NDArray[Any]
MANY = 20  # different integers that are taken as classes without a note


@dataclass(frozen=True)
class Labelled:
    """Inputs and labels by split: class indices, or numbers if there are no classes.

    Inputs are texts, lists of token ids, arrays of vectors, or one array of images.
    """

    name: str
    splits: dict[str, tuple[Sequence[Any] | NDArray[Any], Labels]]
    classes: tuple[str, ...]
    fingerprint: str
    notes: tuple[str, ...] = ()  # what was decided about the data, for the user
    column: str | None = None  # of records, with the input


def make_labelled(name: str, examples: dict[str, Examples], valid: float, numbers: bool = False) -> Labelled:
    """Numbers the classes, and holds out the fraction `valid` for validation where there is no such split.

    With `numbers` the labels are numbers to predict, and there are no classes.
    """
    splits: dict[str, tuple[Any, Labels]] = {}
    if numbers:
        classes: tuple[str, ...] = ()
        for split, (inputs, labels) in examples.items():
            found = [
                parse_number(one, f"the label of example {n} of {split} of {name}") for n, one in enumerate(labels, 1)
            ]
            splits[split] = inputs, np.array(found, dtype=np.float64)
    else:
        classes, splits = _index_classes(name, examples)
    if "valid" not in splits:
        inputs, label_N = splits["train"]
        train, held_out = hold_out(len(label_N), valid)
        splits["train"] = take(inputs, train), label_N[train]
        splits["valid"] = take(inputs, held_out), label_N[held_out]
    if numbers:
        check_numbers(splits["train"][1], name)
    return Labelled(name, splits, classes, digest(*classes, splits_fingerprint(splits)), number_notes(classes, name))


def check_numbers(label_N: NDArray[np.float64], name: str) -> None:
    """Raises ValueError if all training labels are the same number."""
    if label_N.min() == label_N.max():
        raise ValueError(
            f"the {len(label_N)} training labels of {name} are all {label_N[0]:g}, so there is nothing to predict; give examples with "
            "other numbers"
        )


def number_notes(classes: Sequence[str], name: str) -> tuple[str, ...]:
    """Returns a sentence if the classes are numbers that may be meant as numbers: fractions, or many integers."""
    if not classes or not all(map(is_number, classes)):
        return ()
    if len(classes) <= MANY and all(float(one).is_integer() for one in classes):
        return ()
    return (
        f"the labels of {name} are {len(classes)} different numbers, which are taken as {len(classes)} classes; to predict the number "
        "itself, use --task regress",
    )


def _index_classes(name: str, examples: dict[str, Examples]) -> tuple[tuple[str, ...], dict[str, tuple[Any, Labels]]]:
    """Returns the names of the classes, sorted, and the examples by split with the indices of their classes."""
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
    return tuple(map(str, ordered)), splits


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
    data: str | None, kind: Literal["text", "sets"], column: str | None, label: str, valid: float, numbers: bool = False
) -> Labelled:
    """Opens labelled texts or labelled sets of vectors. `column` and `label` are the columns of records.

    With `numbers` the labels are numbers to predict.
    """
    columns, found = Columns(column, label, numbers), Found()
    if (name := dataset_name(data)) == "imdb":
        reviews = read_reviews(dataset_files(name, data))
        examples: dict[str, Examples] = {split: _transpose(rows) for split, rows in reviews.items()}
        return make_labelled(name, examples, valid, numbers)
    if name is not None:
        raise ValueError(f"{name} does not hold labelled {kind}; give records, a folder of classes, or imdb")
    if data is None and kind == "text":
        name, examples = "the embedded plays", synthetic.years() if numbers else synthetic.plays()
    elif data is None:
        name, examples = "the embedded sets", synthetic.mean_points() if numbers else synthetic.sets()
    elif data == "-":
        name = "standard input"
        found = _read_tables({"train": [Table(name, read_json_lines(sys.stdin.buffer, name))]}, kind, columns)
        examples = found.examples
    else:
        path = existing_path(data)
        name = str(path)
        found = _read_path(path, kind, columns)
        examples = found.examples
    for split, (inputs, _) in examples.items():
        least = 2 if split == "train" else 1
        if len(inputs) < least:
            raise ValueError(f"{name} has {len(inputs)} examples for {split}; give at least {least}")
    labelled = make_labelled(name, examples, valid, numbers)
    return replace(labelled, notes=(*found.notes, *labelled.notes), column=found.column)


def _read_path(path: Path, kind: str, columns: Columns) -> Found:
    if path.is_file():
        if not is_records(path):
            raise ValueError(
                f"{path} has no labels; give .jsonl or .csv with a label column, or a folder with one subfolder per class"
            )
        return _read_tables({"train": [open_table(path, kind, columns)]}, kind, columns)
    if kind == "sets" and has_arrays(path):
        return Found(read_arrays(path))
    if tables := labelled_tables(path, kind, columns):
        return _read_tables(tables, kind, columns)
    if kind == "sets":
        raise ValueError(f"{path} has no sets; give train.jsonl with a list of vectors and a label in each record")
    return Found(
        {
            split: ([read_text(file) for file, _ in rows], [name for _, name in rows])
            for split, rows in class_files(path).items()
        }
    )


def _read_tables(tables: dict[str, list[Table]], kind: str, columns: Columns) -> Found:
    return read_labelled(tables, kind, columns, parse_sets() if kind == "sets" else None)


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
