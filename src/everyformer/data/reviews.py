"""IMDb's reviews, from the original archive or from JSON lines: the same texts and classes from both."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np

from everyformer.data.records import records

CLASSES = ("neg", "pos")
Rows = list[tuple[str, str]]  # text and class


def reviews(files: dict[str, Path]) -> dict[str, Rows]:
    """Texts and classes by split, in an order that mixes the classes. The marks <br /> of the original become line ends."""
    if "aclImdb_v1.tar.gz" in files:
        found = _archive(files["aclImdb_v1.tar.gz"])
    else:
        found = {
            split: [(row["text"], CLASSES[row["label"]]) for row in records(files[f"imdb_{split}.jsonl"])]
            for split in ("train", "test")
        }
    clean = {split: [(text.replace("<br />", "\n"), label) for text, label in rows] for split, rows in found.items()}
    # All bad ones come before all good ones; a part of the text for validation needs both.
    return {split: [rows[n] for n in np.random.RandomState(0).permutation(len(rows))] for split, rows in clean.items()}


def _archive(path: Path) -> dict[str, Rows]:
    """aclImdb/<split>/<class>/<number>_<rating>.txt, in the order of class and number."""
    found: dict[tuple[str, str, int], str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            match = re.fullmatch(r"aclImdb/(train|test)/(neg|pos)/(\d+)_\d+\.txt", member.name)
            file = archive.extractfile(member) if match else None
            if match and file is not None:
                found[match[1], match[2], int(match[3])] = file.read().decode("utf-8")
    return {split: [(found[key], key[1]) for key in sorted(found) if key[0] == split] for split in ("train", "test")}
