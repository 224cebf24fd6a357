"""Reads lists of token ids: a .npy file (N ids, or rows of ids), or a column of JSON or Parquet records with lists of integers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tokenize import TokenError  # numpy reads the header of an array as Python

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import decompress, uncompressed_name
from everyformer.data.labelled_records import is_token_ids
from everyformer.data.records import DELIMITERS, is_records, read_records

Ids = NDArray[np.uint32]


def has_token_ids(path: Path, column: str | None) -> bool:
    """Returns whether a file has token ids instead of text: by its name, or by its first record."""
    name = uncompressed_name(path).lower()
    if name.endswith(".npy"):
        return True
    if not is_records(path) or name.endswith(tuple(DELIMITERS)):
        return False
    first = next(read_records(path), None)
    return first is not None and is_token_ids(first.cells.get(column or "text"))


def read_token_ids(path: Path, column: str | None) -> Iterator[Ids]:
    """Yields the token ids of each document that is not empty."""
    if uncompressed_name(path).lower().endswith(".npy"):
        yield from (_checked(row, str(path)) for row in _load(path) if len(row))
        return
    for record in read_records(path):
        cell = record.cell(column or "text", "task.column=...")
        where = f"{column or 'text'!r} on {record.location}"
        if cell != [] and not is_token_ids(cell):
            raise ValueError(
                f"{where} is not a list of token ids, as the first record has; give integers of at least 0"
            )
        if cell:
            yield _checked(np.array(cell), where)


def _load(path: Path) -> list[NDArray[np.int64]]:
    try:
        array = np.load(decompress(path), allow_pickle=False)
    except (ValueError, OSError, EOFError, SyntaxError, TokenError) as error:
        raise ValueError(f"{path} cannot be read as an array ({error}); write it with numpy.save") from None
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.size:
        what = f"{array.dtype} of the shape {array.shape}" if isinstance(array, np.ndarray) else "several arrays"
        raise ValueError(f"{path} has {what}; give integers, as one list of token ids or as rows of them")
    return list(array.reshape(-1, array.shape[-1]))


def _checked(ids: NDArray[np.int64], where: str) -> Ids:
    if not 0 <= ids.min() <= ids.max() < 1 << 31:
        raise ValueError(
            f"the token ids of {where} are from {ids.min()} to {ids.max()}; give integers from 0 to {(1 << 31) - 1}"
        )
    return ids.astype(np.uint32)
