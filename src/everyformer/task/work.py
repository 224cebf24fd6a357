"""What a task gives to the loop.

A `Task` is a value (what to learn, and how the data are read). Opened on data it becomes `Work`: batches, losses and
metrics. Batches are a pure function of (seed, step), so a run that goes on after a crash, or on another number of
processes, sees exactly the data it would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from everyformer.attention.pattern import SameDocument
from everyformer.data.tokenizer import Ids
from everyformer.network.cache import Cache
from everyformer.network.embed import Tokens
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import OutputHead


@dataclass(frozen=True)
class Batch:
    """Tensors with the same first axis."""

    tensors: Mapping[str, Tensor]
    shared: Mapping[str, Tensor] | None = None  # what belongs to all rows, such as the edges of one graph

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def rows(self, start: int, end: int) -> Batch:
        return Batch({name: x[start:end] for name, x in self.tensors.items()}, self.shared)

    def to(self, device: torch.device) -> Batch:
        def move(x: Tensor) -> Tensor:
            quick = device.type == "cuda" and x.device.type == "cpu"
            return x.pin_memory().to(device, non_blocking=True) if quick else x.to(device)

        return Batch(
            {name: move(x) for name, x in self.tensors.items()},
            None if self.shared is None else {name: x.to(device) for name, x in self.shared.items()},
        )


class Task:
    """A value that opens data. `data` is a path, a named set, '-' for standard input, or None for the embedded set."""

    __slots__ = ()

    def open(self, data: str | None, context: int | None, folder: Path | None = None) -> Work:
        """The work on these data. A tokenizer found in `folder` (a run's) is used, not made anew."""
        raise NotImplementedError

    def reopen(self, data: str | None, context: int | None, folder: Path) -> Work:
        """The work of a run, for whoever only writes: the data are read only where a model is shown some of them."""
        return self.open(None, context, folder)


class Work:
    """A task on its data."""

    fingerprint: str  # of the data: a run refuses to go on with others
    metric: str  # the number that says how good a model is, by its name in `evaluate`
    higher_is_better: bool = False
    writes: bool = False  # can a model of this task generate?
    paints: bool = False  # is it pictures that it generates?
    file: str = "samples.png"  # where they go unless told otherwise, in the run's folder
    hint: str = "--prompt 'Once'"  # what to add to `generate` for something to look at
    done: float = 0.0  # the share of the training that is behind: the loop says so before each step
    bytes_per_target: float | None = None  # of a text: how many bytes of it a target is, on average

    def changes(self) -> dict[str, Any]:
        """What the data ask of the member: `vocabulary=`, `classes=`, ..."""
        return {}

    def adapt(self, value: Model | EncoderDecoder) -> Model | EncoderDecoder:
        """The model with the heads that the task needs: a pretrained body gets a new one."""
        return value

    def fit(self, value: Model | EncoderDecoder) -> None:
        """Take from the model what the data must follow, such as its context."""

    def examples(self) -> int:
        """How many training examples there are; a batch may not be larger."""
        raise NotImplementedError

    def gather(self, network: Network | PairNetwork, seed: int, kernel: str) -> None:
        """Before the batch of a step: do what its data take of the network as it is now, such as an agent's steps."""

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The whole batch of a step, on the CPU."""
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """How many targets of a batch count in the loss."""
        raise NotImplementedError

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        """The sum of the losses of the batch's targets, in float32; `count` of the whole batch makes it a mean."""
        raise NotImplementedError

    def read(
        self, network: Network | PairNetwork, batch: Batch, kernel: str, cache: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        """The loss with what the step before left (None at the start), and what this one leaves for the next.

        Only work whose batches go on row by row where those before ended has anything to carry over.
        """
        return self.loss(network, batch, kernel), None

    def evaluate(self, network: Network | PairNetwork, split: str, limit: int | None, kernel: str) -> dict[str, Any]:
        """Metrics on a split ("valid" or "test"), on at most `limit` examples; says how they were computed."""
        raise NotImplementedError

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        """Something a person can look at, or None."""
        return None

    # What may be asked of these three are the parameters that a work gives them; **choices are ways to draw tokens.

    def write(self, network: Network | PairNetwork, prompt: str, **choices: Any) -> str:
        """The prompt and what follows it, or what the model makes of it."""
        raise ValueError("this model does not write; use evaluate, or paint where it makes pictures")

    def stream(self, network: Network | PairNetwork, prompt: str, **choices: Any) -> Iterator[str]:
        """What follows a prompt, piece by piece."""
        raise ValueError("this model does not write token by token; leave --stream out")

    def paint(self, network: Network | PairNetwork, file: Path, **choices: Any) -> str:
        """Paint into a file; says what is in it."""
        raise ValueError("this model does not paint; leave --out out")

    def facts(self) -> dict[str, Any]:
        """What the record of a step tells besides its loss."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep of the work; nothing where batches follow from (seed, step) alone."""
        return {}

    def restore(self, found: Mapping[str, Tensor], seed: int) -> None:
        """Go on from a state."""

    def save(self, folder: Path) -> None:
        """Write what is needed to use the model later, such as the tokenizer."""


def shuffled(count: int, epoch: int, seed: int) -> Tensor:
    """The order of the examples in an epoch."""
    return torch.randperm(count, generator=draw(seed, epoch))


def epoch_rows(count: int, first: int, size: int, seed: int) -> Tensor:
    """The examples number `first` to `first + size` of a run: epochs, each in an order of its own, without a gap while the
    batch keeps its size."""
    place_B = torch.arange(first, first + size)
    row_B = torch.empty(size, dtype=torch.long)
    for epoch in range(first // count, (first + size - 1) // count + 1):
        here = place_B // count == epoch
        row_B[here] = shuffled(count, epoch, seed)[place_B[here] % count]
    return row_B


def draw(seed: int, step: int) -> torch.Generator:
    """Where the random numbers of a step's batch come from."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step) % (1 << 63))


def pad(rows: Sequence[Ids], multiple: int) -> tuple[Tensor, Tensor]:
    """Rows as one batch, and which tokens are real. Lengths are rounded up, so that there are few shapes."""
    length = -(-max(map(len, rows)) // multiple) * multiple
    token_BT = np.zeros((len(rows), length), dtype=np.int64)
    visible_BT = np.zeros((len(rows), length), dtype=bool)
    for row, ids in enumerate(rows):
        token_BT[row, : len(ids)], visible_BT[row, : len(ids)] = ids, True
    return torch.from_numpy(token_BT), torch.from_numpy(visible_BT)


def sequence(value: Model | EncoderDecoder, task: str) -> Model:
    """The model, if it reads one sequence."""
    if not isinstance(value, Model):
        raise ValueError(f"{task} needs a model of one sequence, not an encoder and a decoder; try bert or gpt2")
    return value


def which(value: Model, kind: type[OutputHead], task: str) -> int:
    """The number of the head of a kind."""
    for number, head in enumerate(value.outputs):
        if isinstance(head, kind):
            return number
    have = ", ".join(type(head).__name__ for head in value.outputs) or "none"
    raise ValueError(
        f"{task} needs a head {kind.__name__}, the model has {have}; choose another member, or give it that head"
    )


def check_tokens(value: Model, vocabulary: int, name: str) -> None:
    """Are the tokens of a text all that the model reads, and does it know them?"""
    if any(isinstance(part, SameDocument) for part in value.body.patterns()):
        raise ValueError(
            f"the model keeps the documents of a sequence apart (same_document), but {name} marks none; choose a member without "
            "it, or leave model.episodes out"
        )
    embed = value.embed
    if not isinstance(embed, Tokens):
        raise ValueError(
            f"{name} gives tokens, but the model's inputs are {type(embed).__name__.lower()}; choose a member that reads tokens"
        )
    if embed.vocabulary < vocabulary:
        raise ValueError(
            f"the tokenizer of {name} has {vocabulary} tokens, but the model knows {embed.vocabulary}; set model.vocabulary to "
            f"{vocabulary}, or lower task.vocabulary"
        )


def check_split(split: str, splits: Mapping[str, Any], name: str) -> None:
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")
