"""Classification and regression: predict the class, or a number, of texts, sets of vectors, images, or the nodes of a graph.

The metric of classes is the accuracy: the share of examples whose most likely class is the right one. Those of numbers are the mean
squared error, R2 and Pearson's correlation, see `everyformer.task.target`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from everyformer.data.arrays import has_arrays
from everyformer.data.datasets import dataset_name
from everyformer.data.files import existing_path
from everyformer.data.graphs import Graph, open_graph
from everyformer.data.images import ImageSize, has_images, is_image, open_labelled_images
from everyformer.data.labelled import Labelled, open_labelled
from everyformer.data.labelled_records import INPUTS, Columns
from everyformer.data.records import is_records, read_rows
from everyformer.data.tokenizer import Kind
from everyformer.task.classify_data import ClassifyData, GraphData, SetData, TextData, saved_classes
from everyformer.task.classify_images import LabelledImageData
from everyformer.task.target import ClassTarget, NumberTarget, Target
from everyformer.task.task import Task
from everyformer.value import Count, Share, Size, Value

KINDS = {"imdb": "text", "mnist": "images", "cora": "graph"}
InputKind = Literal["text", "sets", "images", "graph"]


class ExampleTask(Value, frozen=True):
    """The settings of a task that predicts one thing of each example, and how its data are opened."""

    numbers: ClassVar[bool] = False  # whether labels are numbers to predict

    kind: InputKind | None = None  # kind of the inputs; None: found from the data, or text
    tokenizer: Kind = "wordpiece"  # tokenizer of texts
    vocabulary: Size = 8192  # largest number of tokens that a tokenizer learns
    tokenizer_files: str | None = None  # gpt2: the folder with encoder.json and vocab.bpe
    context: Size | None = None  # tokens of a text, which is truncated to them; None: the model's positions, or 512
    column: str | None = None  # column of records with the input; None: the column "text", "set" or "image"
    label: str = "label"  # column of records with the class or the number
    valid: Share = 0.1  # share of the training examples held out for validation, if the data have no such split
    size: Size | None = None  # height and width to which images are resized; None: squares of one size stay as they are
    mixed_size: Size = 224  # height and width of images that are not squares of one size, if size is None
    augment: Literal["auto", "none", "crop", "flip", "both"] = (
        "auto"  # random changes of training images; auto: both for photographs (color images) in classes, else none
    )
    shift: Count = 0  # largest random shift of training images, in pixels in each direction; 0: an eighth if cropped

    def target(self, classes: tuple[str, ...], train_N: Any, saved: Mapping[str, Any]) -> Target:
        """Returns what is predicted: of the given classes, or of the training labels `train_N`; of a run, as it was saved."""
        raise NotImplementedError

    def open(self, data: str | None, folder: Path | None = None) -> ClassifyData:
        kind, numbers = self.kind or kind_of(data, self.column), self.numbers
        if kind == "graph":
            return GraphData(self, open_graph(data, self.valid, numbers), folder)
        if kind == "images":
            columns, size = Columns(self.column, self.label, numbers), ImageSize(self.size, self.mixed_size)
            return LabelledImageData(self, open_labelled_images(data, self.valid, columns, size), folder)
        labelled = open_labelled(
            data, "text" if kind == "text" else "sets", self.column, self.label, self.valid, numbers
        )
        return SetData(self, labelled, folder) if kind == "sets" else TextData(self, labelled, folder)

    def open_for_inference(self, data: str | None, folder: Path) -> ClassifyData:
        saved = saved_classes(folder)
        if "kind" not in saved:
            raise ValueError(
                f"{folder} has no classes.json, so it takes no prompt; use evaluate, or restore the file that train wrote"
            )
        kind, classes = saved["kind"], tuple(saved.get("classes", ()))
        if kind == "graph":
            none = np.zeros((0, 0), np.float32)
            return GraphData(self, Graph(str(data), none, none > 0, np.zeros(0, np.int64), {}, classes, ""), folder)
        labelled = Labelled(str(data), {}, classes, "")
        if kind == "images":
            return LabelledImageData(self, labelled, folder)
        return SetData(self, labelled, folder) if kind == "sets" else TextData(self, labelled, folder)


class Classify(ExampleTask, Task, frozen=True):
    """Predict the class of an example."""

    def target(self, classes: tuple[str, ...], train_N: Any, saved: Mapping[str, Any]) -> Target:
        return ClassTarget(classes, saved)


class Regress(ExampleTask, Task, frozen=True):
    """Predict a number of an example."""

    numbers: ClassVar[bool] = True

    def target(self, classes: tuple[str, ...], train_N: Any, saved: Mapping[str, Any]) -> Target:
        if "mean" in saved:
            return NumberTarget(saved["mean"], saved["std"])
        return NumberTarget(float(np.mean(train_N)), float(np.std(train_N)))


def kind_of(data: str | None, column: str | None) -> str:
    """Returns the kind of examples in the data."""
    name = dataset_name(data)
    if name is not None:
        return KINDS.get(name, "text")
    if data in (None, "-"):
        return "text"
    path = existing_path(str(data))
    if has_arrays(path):
        return "sets"
    if has_images(path):
        return "images"
    if path.is_file() and is_records(path):
        first = next(read_rows(path), {})
        if any(is_image(Path(str(first.get(name, "")))) for name in (column, *INPUTS["images"]) if name):
            return "images"
        cell = first.get(column or "set")
        return "sets" if isinstance(cell, list) and cell and isinstance(cell[0], list) else "text"
    return "graph" if ".json" in map(str.lower, path.suffixes) else "text"
