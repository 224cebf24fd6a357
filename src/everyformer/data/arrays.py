"""Reads examples that are arrays of numbers: a folder with features.npy and labels.npy, or with such folders named after splits.

`features` are N rows of numbers, or N sets of as many rows each; `labels` are N words or numbers.
"""

from __future__ import annotations

from pathlib import Path
from tokenize import TokenError  # numpy reads the header of an array as Python
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import SPLITS
from everyformer.data.labelled_records import Examples

FEATURES, LABELS = "features.npy", "labels.npy"


def has_arrays(path: Path) -> bool:
    """Returns whether a folder has features in arrays."""
    return path.is_dir() and any((folder / FEATURES).is_file() for folder in (path, *(path / name for name in SPLITS)))


def read_arrays(path: Path) -> dict[str, Examples]:
    """Returns the examples by split: sets of vectors with their labels. A row of numbers is a set of one vector."""
    folders = {split: path / name for name, split in SPLITS.items() if (path / name / FEATURES).is_file()}
    if (path / FEATURES).is_file():
        if folders:
            raise ValueError(f"{path} has {FEATURES} itself and in its folders; keep one of them")
        folders = {"train": path}
    if "train" not in folders:
        raise ValueError(f"{path} has no training examples; put {FEATURES} and {LABELS} into {path / 'train'}")
    return {split: _read(folder) for split, folder in folders.items()}


def read_features(path: Path) -> NDArray[np.float32]:
    """Returns the sets of a file: N, T, F."""
    array = _load(path)
    if array.ndim not in (2, 3) or 0 in array.shape or array.dtype.kind not in "iufb":
        raise ValueError(
            f"{path} has {array.dtype} of the shape {array.shape}; give numbers, as rows N x F or as sets of rows N x T x F"
        )
    feature_NTF: NDArray[np.float32] = (array[:, None] if array.ndim == 2 else array).astype(np.float32)
    if not np.isfinite(feature_NTF).all():
        raise ValueError(f"{path} has NaN or infinite numbers; remove or replace them")
    return feature_NTF


def _read(folder: Path) -> Examples:
    feature_NTF, label_N = read_features(folder / FEATURES), _load(folder / LABELS)
    if label_N.shape != feature_NTF.shape[:1]:
        raise ValueError(
            f"{folder / LABELS} has the shape {label_N.shape}, but {folder / FEATURES} has {len(feature_NTF)} examples; give one label "
            "for each"
        )
    return list(feature_NTF), label_N.tolist()


def _load(path: Path) -> NDArray[Any]:
    if not path.is_file():
        raise ValueError(f"there is no {path}; write it with numpy.save")
    try:
        array = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError, TokenError) as error:
        raise ValueError(f"{path} cannot be read as an array ({error}); write it with numpy.save") from None
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{path} has several arrays; write one array into each file with numpy.save")
    return array
