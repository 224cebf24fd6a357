"""Labelled data of the four kinds: texts, sets of vectors, images, and the nodes of a graph."""

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
from torch.nn import functional as F

from everyformer.data import tokenizer as tokenizers
from everyformer.data.encode import batched
from everyformer.data.files import read_json
from everyformer.data.graphs import Graph
from everyformer.data.labelled import Labelled, splits_fingerprint, take
from everyformer.data.tokenizer import Ids
from everyformer.network.embed import Features, Nodes, Patches
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.output_head import Classify as ClassifyHead
from everyformer.network.output_head import OutputHead, PerToken
from everyformer.task.batch import Batch, epoch_rows, pad, step_generator
from everyformer.task.check import check_tokens, context_of, context_setting, head_index, single_sequence
from everyformer.task.classify_objective import ClassifyObjective, NodeObjective, TextClassifierInference
from everyformer.task.task import FittedTask, Inference, TaskData

if TYPE_CHECKING:
    from everyformer.task.classify import Classify

CONTEXT = 512  # default for a model without a limit of positions
MULTIPLE = 16
ENCODED = 1024  # texts encoded at a time: before truncation they take more memory


def saved_classes(folder: Path | None) -> dict[str, Any]:
    """Returns the kind and the classes that a run saved in its folder; empty if there are none."""
    saved = None if folder is None else read_json(folder / "classes.json")
    return saved or {}


class ClassifyData(TaskData):
    """What the four kinds have in common."""

    kind: str
    inputs: str  # the tensor of a batch that the network reads
    name: str
    classes: tuple[str, ...]
    rows: Mapping[str, int]  # number of examples of each split

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Returns the tensors of some examples, with `label_B`. With a generator they may be augmented for training."""
        raise NotImplementedError

    def shared(self) -> dict[str, Tensor] | None:
        return None

    def output_head(self, model: Model) -> OutputHead:
        """Returns the head that predicts the class: the model's own with the right number of classes, or a new one."""
        own = next((head for head in model.outputs if isinstance(head, ClassifyHead)), None)
        if own is not None:
            return replace(own, classes=len(self.classes))
        return ClassifyHead(len(self.classes), "last" if model.body.is_causal() else "mean")

    def input_settings(self) -> dict[str, Any]:
        """Returns the settings of a member that follow from this kind of input."""
        raise NotImplementedError

    def check_model(self, model: Model) -> None:
        """Raises ValueError if the model cannot read this kind of input."""
        raise NotImplementedError

    def parts(self, head: int) -> tuple[ClassifyObjective, Inference]:
        return ClassifyObjective(self, head), Inference()

    def member_settings(self) -> dict[str, Any]:
        return {"classes": len(self.classes)} | self.input_settings()

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = single_sequence(model, "classify")
        return replace(one, outputs=(self.output_head(one),), auxiliary=None)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        one = single_sequence(model, "classify")
        index = head_index(one, type(self.output_head(one)), "classify")
        head: Any = one.outputs[index]
        classes = head.outputs if isinstance(head, PerToken) else head.classes
        if classes < len(self.classes):
            raise ValueError(
                f"{self.name} has {len(self.classes)} classes, but the model has {classes}; set model.classes to "
                f"{len(self.classes)}"
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

    def save(self, folder: Path) -> None:
        (folder / "classes.json").write_text(json.dumps({"kind": self.kind, "classes": self.classes}) + "\n")


class LabelledData(ClassifyData):
    """Separate examples with one class each. The classes of a resumed run keep their indices."""

    def __init__(self, labelled: Labelled, folder: Path | None):
        self.labelled, self.name, self.fingerprint = labelled, labelled.name, labelled.fingerprint
        self.rows = {split: len(label_N) for split, (_, label_N) in labelled.splits.items()}
        saved = tuple(saved_classes(folder).get("classes", ()))
        self.classes = saved if set(labelled.classes) <= set(saved) else labelled.classes
        index_C = np.array([self.classes.index(name) for name in labelled.classes])
        self.label = {split: torch.from_numpy(index_C[label_N]) for split, (_, label_N) in labelled.splits.items()}

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

    def __init__(self, task: Classify, labelled: Labelled, folder: Path | None):
        super().__init__(labelled, folder)
        self.task = task
        self.tokenizer = tokenizers.load_or_train(
            task.tokenizer,
            lambda: labelled.splits["train"][0],
            task.vocabulary,
            labelled.fingerprint,
            folder,
            task.tokenizer_files,
        )
        # A tokenizer that has BERT's marks adds them; a model may read its class from [CLS].
        marks = [self.tokenizer.special_id(name) for name in ("[CLS]", "[SEP]")]
        self.marks = [token for token in marks if token is not None]
        self.encoded: dict[str, list[Ids]] = {}  # by split, encoded on first use

    def parts(self, head: int) -> tuple[ClassifyObjective, Inference]:
        objective = ClassifyObjective(self, head)
        return objective, TextClassifierInference(self, objective)

    def input_settings(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary} | context_setting(self.task.context)

    def check_model(self, model: Model) -> None:
        self.context = context_of(self.task.context, model, CONTEXT)
        if self.context <= len(self.marks):
            raise ValueError(
                f"a context of {self.context} is too short for a text; give at least {len(self.marks) + 1}"
            )
        check_tokens(model, self.tokenizer.vocabulary, self.name)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Returns the tokens of each text, truncated to the context."""
        assert self.context is not None
        length = self.context - len(self.marks)
        rows = []
        for group in batched(texts, ENCODED):
            for ids in self.tokenizer.encode_all(group):
                ids = ids[:length] if len(ids) else np.zeros(1, np.uint32)  # an empty text becomes one token
                rows.append(np.concatenate((self.marks[:1], ids, self.marks[1:])) if self.marks else ids)
        return rows

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        if split not in self.encoded:
            self.encoded[split] = self.encode(list(self.labelled.splits[split][0]))
        rows = [self.encoded[split][row] for row in row_B.tolist()]
        return self.pad(rows) | {"label_B": self.label[split][row_B]}

    def pad(self, rows: Sequence[Ids]) -> dict[str, Tensor]:
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
        _check_features(model, self.input_settings()["inputs"], self.name)

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        rows = self.examples_of(split, row_B)
        _, visible_BT = pad([np.zeros(len(row)) for row in rows], 4)
        feature_BTF = torch.zeros(*visible_BT.shape, rows[0].shape[1])
        feature_BTF[visible_BT] = torch.from_numpy(np.concatenate(rows))
        return {"feature_BTF": feature_BTF, "visible_BT": visible_BT, "label_B": self.label[split][row_B]}


class LabelledImageData(LabelledData):
    """Images, normalized to mean 0 and std 1 of the training images in each channel."""

    kind = "images"
    inputs = "image_BCYX"

    def __init__(self, task: Classify, labelled: Labelled, folder: Path | None):
        super().__init__(labelled, folder)
        self.shift = task.shift
        image_NCYX = labelled.splits["train"][0]
        assert isinstance(image_NCYX, np.ndarray)
        _, self.channels, self.height, self.width = image_NCYX.shape
        if self.height != self.width:
            raise ValueError(
                f"the images of {self.name} have {self.width} x {self.height} pixels; crop or pad them to squares"
            )
        if self.shift >= self.height:
            raise ValueError(f"task.shift={self.shift} moves images of {self.height} pixels out of view; give less")
        # In pieces, so that no float copy of all images is needed.
        pieces = [image_NCYX[start : start + 4096].astype(np.float64) for start in range(0, len(image_NCYX), 4096)]
        pixels = len(image_NCYX) * self.height * self.width
        mean_C = sum(piece.sum((0, 2, 3)) for piece in pieces) / pixels
        square_C = sum((piece**2).sum((0, 2, 3)) for piece in pieces) / pixels
        self.mean_C11 = torch.tensor(mean_C, dtype=torch.float32)[:, None, None]
        std_C = torch.tensor(square_C - mean_C**2).clamp(min=1e-6).sqrt()
        self.std_C11 = std_C.float()[:, None, None]

    def input_settings(self) -> dict[str, Any]:
        return {"image": self.height, "channels": self.channels}

    def check_model(self, model: Model) -> None:
        embed = model.embed
        if not isinstance(embed, Patches) or embed.channels != self.channels:
            raise ValueError(
                f"{self.name} has images of {self.channels} channels, but the model's inputs are {embed}; choose vit, with "
                f"model.channels={self.channels}"
            )
        side, rest = divmod(self.height, embed.size)
        tokens, limit = side**2 + model.class_token, model.limit()
        if rest or tokens != (limit or tokens):
            raise ValueError(
                f"the images of {self.name} have {self.height} x {self.height} pixels, which patches of {embed.size} x {embed.size} "
                f"do not divide into the {limit or 'whole'} tokens of the model; set model.image={self.height}, and model.patch to "
                f"a divisor of {self.height}"
            )

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        image_BCYX = torch.from_numpy(self.examples_of(split, row_B)).float()
        image_BCYX = (image_BCYX - self.mean_C11) / self.std_C11
        if generator is not None and self.shift:
            image_BCYX = _random_shift(image_BCYX, self.shift, generator)
        return {"image_BCYX": image_BCYX, "label_B": self.label[split][row_B]}


def _random_shift(image_BCYX: Tensor, largest: int, generator: torch.Generator) -> Tensor:
    """Returns each image shifted by up to `largest` pixels in each direction; its edges are replicated."""
    size = image_BCYX.shape[2]
    offset_B2 = torch.randint(0, 2 * largest + 1, (len(image_BCYX), 2), generator=generator).tolist()
    padded_BCYX = F.pad(image_BCYX, (largest,) * 4, mode="replicate")
    return torch.stack(
        [image[:, y : y + size, x : x + size] for image, (y, x) in zip(padded_BCYX, offset_B2, strict=True)]
    )


class GraphData(ClassifyData):
    """The nodes of one graph. The network always reads the whole graph; a batch is a set of nodes that have a loss."""

    kind = "graph"
    inputs = "node_B"

    def __init__(self, graph: Graph):
        self.graph, self.name, self.fingerprint = graph, graph.name, graph.fingerprint
        self.classes = graph.classes
        self.rows = {split: len(node_N) for split, node_N in graph.splits.items()}
        self.node = {split: torch.from_numpy(node_N) for split, node_N in graph.splits.items()}
        self.label_N = torch.from_numpy(graph.label_N)
        self.whole = {
            "feature_1NF": torch.from_numpy(graph.feature_NF)[None],
            "edge_NN": torch.from_numpy(graph.edge_NN),
        }

    def parts(self, head: int) -> tuple[ClassifyObjective, Inference]:
        return NodeObjective(self, head), Inference()

    def shared(self) -> dict[str, Tensor] | None:
        return self.whole

    def output_head(self, model: Model) -> OutputHead:
        return PerToken(len(self.classes))

    def input_settings(self) -> dict[str, Any]:
        return {"inputs": self.graph.feature_NF.shape[1]}

    def check_model(self, model: Model) -> None:
        _check_features(model, self.input_settings()["inputs"], self.name)

    def tensors(self, split: str, row_B: Tensor, generator: torch.Generator | None) -> dict[str, Tensor]:
        node_B = self.node[split][row_B]
        return {"node_B": node_B, "label_B": self.label_N[node_B]}


def _check_features(model: Model, width: int, name: str) -> None:
    embed = model.embed
    if not isinstance(embed, Features | Nodes) or embed.inputs != width or (isinstance(embed, Nodes) and embed.kinds):
        raise ValueError(
            f"{name} has vectors of {width} numbers, but the model's inputs are {embed}; set model.inputs to {width}, or choose a "
            "member that reads features"
        )
