"""Classification of texts, sets of vectors, images, or the nodes of a graph.

The metric is the accuracy: the share of examples whose most likely class is the right one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from everyformer.data.datasets import dataset_name
from everyformer.data.files import existing_path
from everyformer.data.graphs import open_graph
from everyformer.data.images import has_images, open_labelled_images
from everyformer.data.labelled import Labelled, open_labelled
from everyformer.data.records import is_records, read_rows
from everyformer.data.tokenizer import Kind
from everyformer.task.classify_data import (
    ClassifyData,
    GraphData,
    LabelledImageData,
    SetData,
    TextData,
    saved_classes,
)
from everyformer.task.task import Task
from everyformer.value import Count, Share, Size, Value

KINDS = {"imdb": "text", "mnist": "images", "cora": "graph"}


class Classify(Task, Value, frozen=True):
    """Predict the class of an example."""

    kind: Literal["text", "sets", "images", "graph"] | None = None  # of the inputs; None: found from the data, or text
    tokenizer: Kind = "wordpiece"
    vocabulary: Size = 8192  # largest number of tokens that a tokenizer learns
    tokenizer_files: str | None = None  # gpt2: the folder with encoder.json and vocab.bpe
    context: Size | None = None  # tokens of a text, which is truncated to them; None: the model's positions, or 512
    column: str | None = None  # of records, with the input; None: the column "text", or "set"
    label: str = "label"  # of records, the column with the class
    valid: Share = 0.1  # share of the training examples held out for validation, if the data have no such split
    shift: Count = 0  # largest random shift of training images, in pixels in each direction

    def open(self, data: str | None, folder: Path | None = None) -> ClassifyData:
        kind = self.kind or kind_of(data, self.column)
        if kind == "graph":
            return GraphData(open_graph(data, self.valid))
        if kind == "images":
            return LabelledImageData(self, open_labelled_images(data, self.valid), folder)
        labelled = open_labelled(data, "text" if kind == "text" else "sets", self.column, self.label, self.valid)
        return SetData(labelled, folder) if kind == "sets" else TextData(self, labelled, folder)

    def open_for_inference(self, data: str | None, folder: Path) -> ClassifyData:
        saved = saved_classes(folder)
        if saved.get("kind") != "text":
            raise ValueError(
                f"{folder} has a classifier of other inputs than texts, so it takes no prompt; use evaluate"
            )
        return TextData(self, Labelled(str(data), {}, tuple(saved["classes"]), ""), folder)


def kind_of(data: str | None, column: str | None) -> str:
    """Returns the kind of examples in the data."""
    name = dataset_name(data)
    if name is not None:
        return KINDS.get(name, "text")
    if data in (None, "-"):
        return "text"
    path = existing_path(str(data))
    if has_images(path):
        return "images"
    if ".json" in map(str.lower, path.suffixes):
        return "graph"
    first = next(read_rows(path), {}) if path.is_file() and is_records(path) else {}
    return "sets" if isinstance(first.get(column or "set"), list) else "text"
