"""Examples of four kinds with a class or a number: texts, sets of vectors, images, and the nodes of a graph."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from everyformer.data import tokenizer as tokenizers
from everyformer.data.encode import batched
from everyformer.data.files import read_json
from everyformer.data.graphs import Graph, graph_inputs, read_graph
from everyformer.data.inputs import Inputs, read_inputs
from everyformer.data.labelled import Labelled, splits_fingerprint, take
from everyformer.data.labelled_records import INPUTS, parse_sets
from everyformer.data.tokenizer import Ids
from everyformer.network.embed import Features, Nodes
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.output_head import OutputHead
from everyformer.task.batch import Batch, epoch_rows, pad, step_generator
from everyformer.task.check import check_tokens, context_of, context_setting, head_index, single_sequence
from everyformer.task.classify_objective import (
    ClassifyInference,
    ClassifyObjective,
    NodeInference,
    NodeObjective,
    TextClassifierInference,
)
from everyformer.task.target import Target
from everyformer.task.task import FittedTask, TaskData

if TYPE_CHECKING:
    from everyformer.task.classify import ExampleTask

CONTEXT = 512  # default for a model without a limit of positions
MULTIPLE = 16
ENCODED = 1024  # texts encoded at a time: before truncation they take more memory


def saved_classes(folder: Path | None) -> dict[str, Any]:
    """Returns the kind of examples and the target that a run saved in its folder; empty if there are none."""
    saved = None if folder is None else read_json(folder / "classes.json")
    return saved or {}


class ClassifyData(TaskData):
    """What the four kinds have in common."""

    kind: str
    inputs: str  # the tensor of a batch that the network reads
    name: str
    target: Target
    column: str | None = None  # of records, with the input
    rows: Mapping[str, int]  # number of examples of each split

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; empty if a number is predicted."""
        return self.target.classes

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns the tensors of some examples, with `label_B`. With a generator they may be augmented for training."""
        raise NotImplementedError

    def encode(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Returns new inputs as `collate` takes them."""
        raise NotImplementedError

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        """Returns the tensors of a batch of encoded inputs."""
        raise NotImplementedError

    def shared(self) -> dict[str, Tensor] | None:
        return None

    def output_head(self, model: Model) -> OutputHead:
        """Returns the head that predicts the target; it reads the sequence as the model's own head does."""
        return self.target.head(model)

    def input_settings(self) -> dict[str, Any]:
        """Returns the settings of a member that follow from this kind of input."""
        raise NotImplementedError

    def check_model(self, model: Model) -> None:
        """Raises ValueError if the model cannot read this kind of input."""
        raise NotImplementedError

    def parts(self, head: int) -> tuple[ClassifyObjective, ClassifyInference]:
        objective = ClassifyObjective(self, head)
        return objective, ClassifyInference(self, objective)

    def member_settings(self) -> dict[str, Any]:
        return {"classes": self.target.outputs} | self.input_settings()

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = single_sequence(model, self.target.task)
        return replace(one, outputs=(self.output_head(one),), auxiliary=None, generator=None)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        one = single_sequence(model, self.target.task)
        wanted: Any = self.output_head(one)
        index = head_index(one, type(wanted), self.target.task)
        field = wanted.__struct_fields__[0]  # the number of outputs
        outputs = getattr(one.outputs[index], field)
        if outputs < self.target.outputs:
            raise ValueError(
                f"{self.name} has {self.target.outputs} classes, but the model has {outputs}; set model.classes to "
                f"{self.target.outputs}"
            )
        self.check_model(one)
        return FittedTask(self, *self.parts(index))

    def examples(self) -> int:
        return self.rows["train"]

    def batch(self, step: int, size: int, seed: int) -> Batch:
        row_B = epoch_rows(self.rows["train"], step * size, size, seed)
        return Batch(self.tensors("train", row_B, step_generator(seed, step)), self.shared())

    def count(self, batch: Batch) -> int:
        return len(batch)

    def read_inputs(self, data: str, column: str | None) -> Inputs:
        """Opens examples without labels."""
        return read_inputs(data, self.kind, (column,) if column else (self.column, *INPUTS[self.kind]))

    def saved(self) -> dict[str, Any]:
        """Returns what prediction needs of the data."""
        return {"kind": self.kind, **self.target.saved(), "column": self.column}

    def save(self, folder: Path) -> None:
        (folder / "classes.json").write_text(json.dumps(self.saved()) + "\n")


class LabelledData(ClassifyData):
    """Separate examples with one label each."""

    def __init__(self, task: ExampleTask, labelled: Labelled, folder: Path | None):
        self.task, self.labelled, self.name, self.fingerprint = task, labelled, labelled.name, labelled.fingerprint
        saved = saved_classes(folder)
        self.target = task.target(labelled.classes, labelled.splits.get("train", (None, None))[1], saved)
        self.notes, self.column = labelled.notes, task.column or labelled.column or saved.get("column")
        self.rows = {split: len(label_N) for split, (_, label_N) in labelled.splits.items()}
        self.label = {split: self.target.labels(label_N) for split, (_, label_N) in labelled.splits.items()}

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        return {split: splits_fingerprint({split: sides}) for split, sides in self.labelled.splits.items()}

    def examples_of(self, split: str, row_B: Tensor) -> Any:
        return take(self.labelled.splits[split][0], row_B.numpy())


class TextData(LabelledData):
    """Texts, truncated to the context. Padding is masked."""

    kind = "text"
    inputs = "token_BT"
    pads = True

    def __init__(self, task: ExampleTask, labelled: Labelled, folder: Path | None):
        super().__init__(task, labelled, folder)
        inputs = [one for rows, _ in labelled.splits.values() for one in rows]
        ids = [one for one in inputs if not isinstance(one, str)]
        if ids and len(ids) < len(inputs):
            raise ValueError(
                f"{labelled.name} has {len(ids)} lists of token ids among {len(inputs)} inputs; give one or the other"
            )
        self.tokenizer = (
            tokenizers.load_ids(ids, folder)
            if ids
            else tokenizers.load_or_train(
                task.tokenizer,
                lambda: labelled.splits["train"][0],
                task.vocabulary,
                labelled.fingerprint,
                folder,
                task.tokenizer_files,
            )
        )
        self.first, self.last = self.tokenizer.marks  # a model may read its class from [CLS]
        self.encoded: dict[str, list[Ids]] = {}  # by split, encoded on first use

    def parts(self, head: int) -> tuple[ClassifyObjective, ClassifyInference]:
        objective = ClassifyObjective(self, head)
        return objective, TextClassifierInference(self, objective)

    def input_settings(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary} | context_setting(self.task.context)

    def check_model(self, model: Model) -> None:
        self.context = context_of(self.task.context, model, CONTEXT)
        if self.context <= (marks := len(self.first + self.last)):
            raise ValueError(f"a context of {self.context} is too short for a text; give at least {marks + 1}")
        check_tokens(model, self.tokenizer.vocabulary, self.name)

    def encode(self, texts: Sequence[Any]) -> list[Ids]:
        """Returns the tokens of each text, truncated to the context."""
        assert self.context is not None
        if self.tokenizer.kind != "ids" and (other := [one for one in texts if not isinstance(one, str)]):
            raise ValueError(f"{other[0]!r} is not a text, which this model reads; give a str")
        length = self.context - len(self.first + self.last)
        rows = []
        for group in batched(texts, ENCODED):
            for ids in self.tokenizer.encode_all(group):
                ids = ids[:length] if len(ids) else np.zeros(1, np.uint32)  # an empty text becomes one token
                rows.append(np.concatenate((self.first, ids, self.last)).astype(np.uint32))
        return rows

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        if split not in self.encoded:
            self.encoded[split] = self.encode(list(self.labelled.splits[split][0]))
        rows = [self.encoded[split][row] for row in row_B.tolist()]
        return self.collate(rows) | {"label_B": self.label[split][row_B]}

    def as_text(self, one: Any) -> str:
        """Returns an input as a text: itself, or its token ids."""
        return one if isinstance(one, str) else " ".join(map(str, one.tolist()))

    def collate(self, rows: Sequence[Ids]) -> dict[str, Tensor]:
        assert self.context is not None
        token_BT, visible_BT = pad(rows, MULTIPLE)
        return {"token_BT": token_BT[:, : self.context], "visible_BT": visible_BT[:, : self.context]}

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.tokenizer.save(folder)


class SetData(LabelledData):
    """Sets of vectors: they have no order, so the model should have no positions."""

    kind = "sets"
    inputs = "feature_BTF"

    def input_settings(self) -> dict[str, Any]:
        return {"inputs": self.labelled.splits["train"][0][0].shape[1]}

    def check_model(self, model: Model) -> None:
        if self.labelled.splits:  # else it is opened for prediction alone
            check_features(model, self.input_settings()["inputs"], self.name)

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        return self.collate(self.examples_of(split, row_B)) | {"label_B": self.label[split][row_B]}

    def encode(self, inputs: Sequence[Any]) -> Sequence[Any]:
        parse = parse_sets()
        return [parse(one, f"input {number}") for number, one in enumerate(inputs, 1)]

    def collate(self, rows: Sequence[Any]) -> dict[str, Tensor]:
        _, visible_BT = pad([np.zeros(len(row)) for row in rows], 4)
        feature_BTF = torch.zeros(*visible_BT.shape, rows[0].shape[1])
        feature_BTF[visible_BT] = torch.from_numpy(np.concatenate(rows))
        return {"feature_BTF": feature_BTF, "visible_BT": visible_BT}


class GraphData(ClassifyData):
    """The nodes of one graph. The network always reads the whole graph; a batch is a set of nodes that have a loss."""

    kind = "graph"
    inputs = "node_B"

    def __init__(self, task: ExampleTask, graph: Graph, folder: Path | None):
        self.graph, self.name, self.fingerprint, self.notes = graph, graph.name, graph.fingerprint, graph.notes
        train_N = graph.label_N[graph.splits["train"]] if graph.splits else None
        self.target = task.target(graph.classes, train_N, saved_classes(folder))
        self.rows = {split: len(node_N) for split, node_N in graph.splits.items()}
        self.node = {split: torch.from_numpy(node_N) for split, node_N in graph.splits.items()}
        self.label_N = self.target.labels(graph.label_N)
        self.whole = _whole(graph.feature_NF, graph.edge_NN)

    def parts(self, head: int) -> tuple[ClassifyObjective, ClassifyInference]:
        objective = NodeObjective(self, head)
        return objective, NodeInference(self, objective)

    def shared(self) -> dict[str, Tensor] | None:
        return self.whole

    def output_head(self, model: Model) -> OutputHead:
        return self.target.node_head()

    def input_settings(self) -> dict[str, Any]:
        return {"inputs": self.graph.feature_NF.shape[1]}

    def check_model(self, model: Model) -> None:
        self.model = model
        if self.graph.splits:  # else it is opened for prediction alone
            check_features(model, self.input_settings()["inputs"], self.name)

    def read_whole(self, data: Any) -> dict[str, Tensor]:
        """Returns the tensors of a graph: the JSON file or data set that `data` names, or its JSON tree."""
        name, tree = read_graph(str(data)) if isinstance(data, str | Path) else ("the graph", data)
        feature_NF, edge_NN = graph_inputs(name, tree)
        check_features(self.model, feature_NF.shape[1], name)
        return _whole(feature_NF, edge_NN)

    def read_inputs(self, data: str, column: str | None) -> Inputs:
        nodes = len(self.read_whole(data)["edge_NN"])
        return Inputs(data, (({"node": node}, node) for node in range(nodes)), nodes)

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        node_B = self.node[split][row_B]
        return {"node_B": node_B, "label_B": self.label_N[node_B]}


def _whole(feature_NF: Any, edge_NN: Any) -> dict[str, Tensor]:
    return {"feature_1NF": torch.from_numpy(feature_NF)[None], "edge_NN": torch.from_numpy(edge_NN)}


def check_features(model: Model, width: int, name: str) -> None:
    embed = model.embed
    if not isinstance(embed, Features | Nodes) or embed.inputs != width or (isinstance(embed, Nodes) and embed.kinds):
        raise ValueError(
            f"{name} has vectors of {width} numbers, but the model's inputs are {embed}; set model.inputs to {width}, or choose a "
            "member that reads features"
        )
