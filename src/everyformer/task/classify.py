"""Classify: texts, sets of vectors, images, or the nodes of a graph.

Texts are cut to the context; padding is masked in attention and in what is read from the sequence. The number that counts is
the accuracy: the share of examples whose most likely class is theirs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import SideInputs
from everyformer.data import tokenizer as tokenizers
from everyformer.data.datasets import dataset_name
from everyformer.data.encode import batched
from everyformer.data.files import existing_path, read_json
from everyformer.data.graphs import Graph, open_graph
from everyformer.data.images import has_images, open_labelled_images
from everyformer.data.labelled import Labelled, open_labelled, take
from everyformer.data.records import is_records, read_rows
from everyformer.data.tokenizer import Ids, Kind
from everyformer.network.embed import Features, Nodes, Patches
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify as ClassifyHead
from everyformer.network.output_head import OutputHead, PerToken
from everyformer.task.work import (
    Batch,
    Task,
    Work,
    check_split,
    check_tokens,
    draw,
    epoch_rows,
    pad,
    sequence,
    which,
)
from everyformer.value import Count, Share, Size, Value

CONTEXT = 512  # where neither the member nor the recipe says
MULTIPLE = 16
ENCODED = 1024  # texts at a time: whole ones take memory before they are cut
EVALUATED = 64  # examples at a time
KINDS = {"imdb": "text", "mnist": "images", "cora": "graph"}


class Classify(Task, Value, frozen=True):
    """Tell the class of an example."""

    kind: Literal["text", "sets", "images", "graph"] | None = None  # None: what the data are; text where there are none
    tokenizer: Kind = "wordpiece"
    vocabulary: Size = 8192
    tokenizer_files: str | None = None  # gpt2: the folder with encoder.json and vocab.bpe
    column: str | None = None  # of records, with the input; None: text, or set
    label: str = "label"  # the column with the class
    valid: Share = 0.1  # the share of the training examples kept for validation, where there is no split for it
    shift: Count = 0  # points by which training images are moved at random, each way

    def open(self, data: str | None, context: int | None, folder: Path | None = None) -> Work:
        kind = self.kind or _kind(data, self.column)
        if kind == "graph":
            return GraphWork(open_graph(data, self.valid))
        if kind == "images":
            return ImageWork(self, open_labelled_images(data, self.valid), folder)
        found = open_labelled(data, "text" if kind == "text" else "sets", self.column, self.label, self.valid)
        return SetWork(found, folder) if kind == "sets" else TextWork(self, found, context, folder)

    def reopen(self, data: str | None, context: int | None, folder: Path) -> Work:
        known = _kept(folder)
        if known.get("kind") != "text":
            raise ValueError(f"{folder} is of a model that does not write; use evaluate")
        classes = tuple(known["classes"])
        return TextWork(self, Labelled(str(data), {}, classes, ""), context, folder)


def _kind(data: str | None, column: str | None) -> str:
    """What some data are."""
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


def _kept(folder: Path | None) -> dict[str, Any]:
    """What a run's folder says of its classes, if anything."""
    found = None if folder is None else read_json(folder / "classes.json")
    if found is None:
        return {}
    return found if isinstance(found, dict) else {"kind": "text", "classes": found}  # a list: of an older run


class ClassWork(Work):
    """What all kinds have in common. A kind says what goes into the network."""

    kind: str
    metric = "accuracy"
    higher_is_better = True
    name: str
    classes: tuple[str, ...]
    rows: Mapping[str, int]  # examples by split
    head: int = 0

    def inputs(self, split: str, row_B: Tensor, random: torch.Generator | None) -> dict[str, Tensor]:
        """Tensors of some examples, with `label_B`; with random numbers they may be changed for training."""
        raise NotImplementedError

    def call(self, network: Any, batch: Batch, kernel: str) -> Any:
        raise NotImplementedError

    def answer(self, output: Any, batch: Batch) -> Tensor:
        """B, classes."""
        return output.logits_of(self.head).float()

    def shared(self) -> dict[str, Tensor] | None:
        return None

    def wanted(self, value: Model) -> OutputHead:
        """The head that tells the class: the model's own, made for these classes, or a new one."""
        own = next((head for head in value.outputs if isinstance(head, ClassifyHead)), None)
        if own is not None:
            return replace(own, classes=len(self.classes))
        return ClassifyHead(len(self.classes), "last" if value.body.is_causal() else "mean")

    def asks(self) -> dict[str, Any]:
        """What this kind asks of the member, besides its classes."""
        raise NotImplementedError

    def check(self, value: Model) -> None:
        """Raise a ValueError if the model cannot read this kind of input."""
        raise NotImplementedError

    def changes(self) -> dict[str, Any]:
        return {"classes": len(self.classes)} | self.asks()

    def adapt(self, value: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = sequence(value, "classify")
        return replace(one, outputs=(self.wanted(one),), auxiliary=None)

    def fit(self, value: Model | EncoderDecoder) -> None:
        one = sequence(value, "classify")
        self.head = which(one, type(self.wanted(one)), "classify")
        head: Any = one.outputs[self.head]
        told = head.outputs if isinstance(head, PerToken) else head.classes
        if told < len(self.classes):
            raise ValueError(
                f"{self.name} has {len(self.classes)} classes, the model tells {told}; set model.classes to "
                f"{len(self.classes)}"
            )
        self.check(one)

    def examples(self) -> int:
        return self.rows["train"]

    def batch(self, step: int, size: int, seed: int) -> Batch:
        row_B = epoch_rows(self.rows["train"], step * size, size, seed)
        return Batch(self.inputs("train", row_B, draw(seed, step)), self.shared())

    def count(self, batch: Batch) -> int:
        return len(batch)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output = self.call(network, batch, kernel)
        loss = F.cross_entropy(self.answer(output, batch), batch["label_B"], reduction="sum")
        return loss + sum(output.aux.values()) * len(batch)

    @torch.no_grad()
    def evaluate(self, network: Network | PairNetwork, split: str, limit: int | None, kernel: str) -> dict[str, Any]:
        check_split(split, self.rows, self.name)
        device = next(network.parameters()).device
        # Spread over the split, so that a part has all classes even where they are in order.
        count = self.rows[split] if limit is None else min(limit, self.rows[split])
        row_N = torch.arange(count) * self.rows[split] // count
        right, total = 0, 0.0
        for row_B in row_N.split(EVALUATED):
            batch = Batch(self.inputs(split, row_B, None), self.shared()).to(device)
            answer_BC = self.answer(self.call(network, batch, kernel), batch)
            right += int((answer_BC.argmax(-1) == batch["label_B"]).sum())
            total += float(F.cross_entropy(answer_BC, batch["label_B"], reduction="sum"))
        return {"accuracy": right / count, "loss": total / count, "split": split, "examples": count}

    def save(self, folder: Path) -> None:
        kept = {"kind": self.kind, "classes": self.classes}
        (folder / "classes.json").write_text(json.dumps(kept) + "\n")


class LabelledWork(ClassWork):
    """Examples with classes, one by one. The classes of a run that goes on keep their numbers."""

    def __init__(self, data: Labelled, folder: Path | None):
        self.data, self.name, self.fingerprint = data, data.name, data.fingerprint
        self.rows = {split: len(label_N) for split, (_, label_N) in data.splits.items()}
        known = tuple(_kept(folder).get("classes", ()))
        self.classes = known if set(data.classes) <= set(known) else data.classes
        number_C = np.array([self.classes.index(name) for name in data.classes])
        self.label = {split: torch.from_numpy(number_C[label_N]) for split, (_, label_N) in data.splits.items()}

    def taken(self, split: str, row_B: Tensor) -> Any:
        return take(self.data.splits[split][0], row_B.numpy())


class TextWork(LabelledWork):
    kind = "text"

    def __init__(self, task: Classify, data: Labelled, context: int | None, folder: Path | None):
        super().__init__(data, folder)
        self.context = context
        self.tokenizer = tokenizers.load_or_train(
            task.tokenizer,
            lambda: data.splits["train"][0],
            task.vocabulary,
            data.fingerprint,
            folder,
            task.tokenizer_files,
        )
        # What knows these marks gets them, as in BERT; [CLS] is what a model may read.
        ends = [self.tokenizer.special_id(name) for name in ("[CLS]", "[SEP]")]
        self.ends = [number for number in ends if number is not None]
        self.encoded: dict[str, list[Ids]] = {}  # by split, when it is first needed

    def asks(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary}

    def check(self, value: Model) -> None:
        limit = value.limit()
        self.context = self.context or (limit - value.class_token if limit else CONTEXT)
        if self.context <= len(self.ends):
            raise ValueError(f"a context of {self.context} has no room for a text; give at least {len(self.ends) + 1}")
        check_tokens(value, self.tokenizer.vocabulary, self.name)

    def tokens(self, texts: Sequence[str]) -> list[Ids]:
        """The beginning of each text, as long as the context allows."""
        assert self.context is not None
        room = self.context - len(self.ends)
        found = []
        for some in batched(texts, ENCODED):
            for ids in self.tokenizer.encode_all(some):
                cut = ids[:room] if len(ids) else np.zeros(1, np.uint32)  # an empty text is one token of padding
                found.append(np.concatenate((self.ends[:1], cut, self.ends[1:])) if self.ends else cut)
        return found

    def inputs(self, split: str, row_B: Tensor, random: torch.Generator | None) -> dict[str, Tensor]:
        if split not in self.encoded:
            self.encoded[split] = self.tokens(list(self.data.splits[split][0]))
        return self.tensors([self.encoded[split][row] for row in row_B.tolist()]) | {
            "label_B": self.label[split][row_B]
        }

    def tensors(self, rows: Sequence[Ids]) -> dict[str, Tensor]:
        assert self.context is not None
        token_BT, visible_BT = pad(rows, MULTIPLE)
        return {"token_BT": token_BT[:, : self.context], "visible_BT": visible_BT[:, : self.context]}

    def call(self, network: Any, batch: Batch, kernel: str) -> Any:
        return network(batch["token_BT"], visible=batch["visible_BT"], kernel=kernel)

    @torch.no_grad()
    def write(self, network: Network | PairNetwork, prompt: str) -> str:  # type: ignore[override]
        """The classes of a text, the most likely first."""
        if not prompt.strip():
            raise ValueError(f"there is nothing to classify in {prompt!r}; give a text with --prompt")
        batch = Batch(self.tensors(self.tokens([prompt]))).to(next(network.parameters()).device)
        share_C = self.answer(self.call(network, batch, "auto"), batch)[0].softmax(-1)
        order = share_C.argsort(descending=True).tolist()
        return ", ".join(f"{self.classes[number]} {share_C[number]:.1%}" for number in order[:5])

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        texts, label_N = self.data.splits["valid"]
        text = str(texts[seed % len(texts)])
        shown = " ".join(text.split())
        told = self.write(network, text)
        return f"{shown[:160]}{'...' if len(shown) > 160 else ''}\n-> {told} (it is {self.data.classes[label_N[seed % len(texts)]]})"

    def save(self, folder: Path) -> None:
        super().save(folder)
        self.tokenizer.save(folder)


class SetWork(LabelledWork):
    """Sets of vectors: no order, so the model should have no positions."""

    kind = "sets"

    def asks(self) -> dict[str, Any]:
        return {"inputs": self.data.splits["train"][0][0].shape[1]}

    def check(self, value: Model) -> None:
        _check_features(value, self.asks()["inputs"], self.name)

    def inputs(self, split: str, row_B: Tensor, random: torch.Generator | None) -> dict[str, Tensor]:
        rows = self.taken(split, row_B)
        _, visible_BT = pad([np.zeros(len(row)) for row in rows], 4)
        feature_BTF = torch.zeros(*visible_BT.shape, rows[0].shape[1])
        feature_BTF[visible_BT] = torch.from_numpy(np.concatenate(rows))
        return {"feature_BTF": feature_BTF, "visible_BT": visible_BT, "label_B": self.label[split][row_B]}

    def call(self, network: Any, batch: Batch, kernel: str) -> Any:
        return network(batch["feature_BTF"], visible=batch["visible_BT"], kernel=kernel)


class ImageWork(LabelledWork):
    """Images, with the mean 0 and the deviation 1 of the training images in each channel."""

    kind = "images"

    def __init__(self, task: Classify, data: Labelled, folder: Path | None):
        super().__init__(data, folder)
        self.shift = task.shift
        image_NCYX = data.splits["train"][0]
        assert isinstance(image_NCYX, np.ndarray)
        _, self.channels, self.height, self.width = image_NCYX.shape
        if self.height != self.width:
            raise ValueError(
                f"the images of {self.name} have {self.width} x {self.height} points; crop or pad them to squares"
            )
        if self.shift >= self.height:
            raise ValueError(f"task.shift={self.shift} moves images of {self.height} points out of sight; give less")
        # In pieces: the mean of bytes needs no copy of them all as floats.
        pieces = [image_NCYX[start : start + 4096].astype(np.float64) for start in range(0, len(image_NCYX), 4096)]
        points = len(image_NCYX) * self.height * self.width
        mean_C = sum(piece.sum((0, 2, 3)) for piece in pieces) / points
        square_C = sum((piece**2).sum((0, 2, 3)) for piece in pieces) / points
        self.mean_C11 = torch.tensor(mean_C, dtype=torch.float32)[:, None, None]
        scale_C = torch.tensor(square_C - mean_C**2).clamp(min=1e-6).sqrt()
        self.scale_C11 = scale_C.float()[:, None, None]

    def asks(self) -> dict[str, Any]:
        return {"image": self.height, "channels": self.channels}

    def check(self, value: Model) -> None:
        embed = value.embed
        if not isinstance(embed, Patches) or embed.channels != self.channels:
            raise ValueError(
                f"{self.name} gives images of {self.channels} channels, but the model's inputs are {embed}; choose vit, with "
                f"model.channels={self.channels}"
            )
        side, rest = divmod(self.height, embed.size)
        tokens, limit = side**2 + value.class_token, value.limit()
        if rest or tokens != (limit or tokens):
            raise ValueError(
                f"the images of {self.name} have {self.height} x {self.height} points, which patches of {embed.size} x {embed.size} "
                f"do not divide into the {limit or 'whole'} tokens of the model; set model.image={self.height}, and model.patch to "
                f"what divides {self.height}"
            )

    def inputs(self, split: str, row_B: Tensor, random: torch.Generator | None) -> dict[str, Tensor]:
        image_BCYX = torch.from_numpy(self.taken(split, row_B)).float()
        image_BCYX = (image_BCYX - self.mean_C11) / self.scale_C11
        if random is not None and self.shift:
            image_BCYX = _moved(image_BCYX, self.shift, random)
        return {"image_BCYX": image_BCYX, "label_B": self.label[split][row_B]}

    def call(self, network: Any, batch: Batch, kernel: str) -> Any:
        return network(batch["image_BCYX"], kernel=kernel)


def _moved(image_BCYX: Tensor, most: int, random: torch.Generator) -> Tensor:
    """Each image moved by up to `most` points; what comes in at the edges is the image's own edge."""
    size = image_BCYX.shape[2]
    at_B2 = torch.randint(0, 2 * most + 1, (len(image_BCYX), 2), generator=random).tolist()
    wide_BCYX = F.pad(image_BCYX, (most,) * 4, mode="replicate")
    return torch.stack([one[:, y : y + size, x : x + size] for one, (y, x) in zip(wide_BCYX, at_B2, strict=True)])


class GraphWork(ClassWork):
    """The nodes of one graph. The model always sees the whole graph; a batch is which of its training nodes count."""

    kind = "graph"

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

    def shared(self) -> dict[str, Tensor] | None:
        return self.whole

    def wanted(self, value: Model) -> OutputHead:
        return PerToken(len(self.classes))

    def asks(self) -> dict[str, Any]:
        return {"inputs": self.graph.feature_NF.shape[1]}

    def check(self, value: Model) -> None:
        _check_features(value, self.asks()["inputs"], self.name)

    def inputs(self, split: str, row_B: Tensor, random: torch.Generator | None) -> dict[str, Tensor]:
        node_B = self.node[split][row_B]
        return {"node_B": node_B, "label_B": self.label_N[node_B]}

    def call(self, network: Any, batch: Batch, kernel: str) -> Any:
        assert batch.shared is not None
        return network(
            batch.shared["feature_1NF"], side_inputs=SideInputs(edges=batch.shared["edge_NN"]), kernel=kernel
        )

    def answer(self, output: Any, batch: Batch) -> Tensor:
        return output.logits_of(self.head)[0, batch["node_B"]].float()


def _check_features(value: Model, width: int, name: str) -> None:
    embed = value.embed
    if not isinstance(embed, Features | Nodes) or embed.inputs != width or (isinstance(embed, Nodes) and embed.kinds):
        raise ValueError(
            f"{name} has vectors of {width} numbers, but the model's inputs are {embed}; set model.inputs to {width}, or choose a "
            "member that reads features"
        )
