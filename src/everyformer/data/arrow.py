"""Reads tables of Arrow: Parquet, Arrow and Feather files, and data sets that Hugging Face's `datasets` saved to disk.

A saved data set is a folder with `state.json`, which names its Arrow files; several splits are folders beside `dataset_dict.json`. Of
all these files the labels that `datasets` stores as numbers get the names that it stores with them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from everyformer.data.files import decompress

ARROW = (".arrow", ".feather")
ROWS = 1024  # that are converted at a time


def read_table(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the rows of a file. Raises ValueError if it is damaged, or if pyarrow is missing."""
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise ValueError(f"{path} needs pyarrow; install it with pip install 'everyformer[parquet]'") from None
    kind = "Arrow" if path.suffix.lower() in ARROW else "Parquet"
    try:
        batches, schema = _open(decompress(path), kind)
        names = _class_names(schema)
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                for row in batch.slice(start, ROWS).to_pylist():
                    yield row | {column: _name(row[column], classes) for column, classes in names.items()}
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as {kind} ({error}); write it again") from None


def _open(path: Path, kind: str) -> tuple[Iterator[Any], Any]:
    """Returns the batches of a file and its schema."""
    import pyarrow
    from pyarrow import ipc
    from pyarrow.parquet import ParquetFile

    if kind == "Parquet":
        file = ParquetFile(path)
        return file.iter_batches(batch_size=ROWS), file.schema_arrow
    source = pyarrow.memory_map(str(path))
    try:
        reader = ipc.open_file(source)
        return (reader.get_batch(index) for index in range(reader.num_record_batches)), reader.schema
    except pyarrow.ArrowInvalid:  # a stream, as `datasets` writes it
        source.seek(0)
        stream = ipc.open_stream(source)
        return iter(stream), stream.schema


def _class_names(schema: Any) -> dict[str, list[str]]:
    """Returns the names of the classes of each column that `datasets` describes as one of labels."""
    raw = (schema.metadata or {}).get(b"huggingface")
    try:
        features = json.loads(raw)["info"]["features"] if raw else {}
        return {
            column: list(feature["names"])
            for column, feature in features.items()
            if isinstance(feature, dict) and feature.get("_type") == "ClassLabel" and column in schema.names
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # not as `datasets` writes it
        return {}


def _name(label: Any, classes: list[str]) -> Any:
    """Returns the name of a label; null for -1, with which `datasets` marks one that is unknown."""
    if not isinstance(label, int) or label >= len(classes):
        return label
    return classes[label] if label >= 0 else None
