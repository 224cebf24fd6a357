"""Reads IMDb's reviews (Maas et al. 2011) from the original archive or from JSON lines; both give the same texts and labels."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import numpy as np

from everyformer.data.records import read_rows

CLASSES = ("neg", "pos")
Rows = list[tuple[str, str]]  # text and class


def read_reviews(files: dict[str, Path]) -> dict[str, Rows]:
    """Returns texts and classes by split, shuffled with a fixed seed. The original's <br /> become line breaks."""
    if "aclImdb_v1.tar.gz" in files:
        splits = _read_archive(files["aclImdb_v1.tar.gz"])
    else:
        splits = {
            split: [(row["text"], CLASSES[row["label"]]) for row in read_rows(files[f"imdb_{split}.jsonl"])]
            for split in ("train", "test")
        }
    clean = {split: [(text.replace("<br />", "\n"), label) for text, label in rows] for split, rows in splits.items()}
    # The files list all negative reviews before all positive ones; a contiguous validation split needs both.
    return {split: [rows[n] for n in np.random.RandomState(0).permutation(len(rows))] for split, rows in clean.items()}


def _read_archive(path: Path) -> dict[str, Rows]:
    """Reads aclImdb/<split>/<class>/<number>_<rating>.txt, sorted by class and number."""
    texts: dict[tuple[str, str, int], str] = {}
    with tarfile.open(path) as archive:
        for member in archive:
            match = re.fullmatch(r"aclImdb/(train|test)/(neg|pos)/(\d+)_\d+\.txt", member.name)
            file = archive.extractfile(member) if match else None
            if match and file is not None:
                texts[match[1], match[2], int(match[3])] = file.read().decode("utf-8")
    return {split: [(texts[key], key[1]) for key in sorted(texts) if key[0] == split] for split in ("train", "test")}
