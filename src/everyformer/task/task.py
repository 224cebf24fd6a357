"""The interface between tasks and training.

    data = task.open("my.txt")                                     # TaskData: splits, batches, fingerprint
    model = data.adapt(member.value(**data.member_settings()))     # the model that the data need
    fitted = data.fit(model)                                       # FittedTask: .data, .objective, .inference

A `Task` is a value: what to train, and how the data are read. Its three parts have no knowledge of the training loop:
`TaskData` makes batches, `Objective` makes losses and metrics from a network and a batch, and `Inference` uses a trained
network. Each task has one subclass of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from everyformer.attention.context import Probe
from everyformer.data.inputs import Inputs
from everyformer.infer.estimate import Progress
from everyformer.infer.predict import Predictions
from everyformer.infer.score import Score
from everyformer.network.cache import Cache
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Reading
from everyformer.network.residual import PostNorm
from everyformer.task.batch import Batch
from everyformer.task.probe_input import ProbeInput

LR_TIMES_WIDTH = 0.5  # of pre-norm layers; see docs/results/rates.md
MAX_LR = 4e-3
RECURRENT_LR = 2e-3  # of a recurrent net at least
MAX_TARGETS = 1 << 18  # of an evaluation, unless more are asked for


class Task:
    """A value that opens data: a path, the name of a known data set, '-' for standard input, or None for embedded data."""

    __slots__ = ()
    recurrent_rate: ClassVar[float] = 1.0  # the default learning rate of a recurrent net, in times that of attention

    def open(self, data: str | None, folder: Path | None = None) -> TaskData:
        """Open the data. If `folder` (of a run) has a tokenizer, it is used instead of training a new one."""
        raise NotImplementedError

    def default_lr(self, model: Model) -> float:
        """Returns the peak learning rate of AdamW by default.

        It falls with the width of the model. Post-norm layers, which diverge at rates that pre-norm ones can take, get half of it, less
        with the square root of their depth. Recurrent nets take higher rates than attention.
        """
        body, post_norm = model.body, isinstance(model.body.residual, PostNorm)
        lr = min(MAX_LR, LR_TIMES_WIDTH / model.width / (2 if post_norm else 1))
        if any(one.carries == "recurrent state" for one in body.sublayers()) and not any(body.patterns()):
            return max(self.recurrent_rate * lr, RECURRENT_LR)
        depth = getattr(body, "num_layers", 0) or getattr(body, "steps", 0) * len(body.layers)
        return lr / math.sqrt(max(1, depth / 2)) if post_norm else lr

    def open_for_inference(self, data: str | None, folder: Path) -> TaskData:
        """Open the data of a run for generation. The data are only read if generation needs examples of them."""
        return self.open(None, folder)


class TaskData:
    """The data of a task."""

    fingerprint: str  # of all data: equal fingerprints mean equal data
    notes: tuple[str, ...] = ()  # what was decided when the data were read, as sentences for the user
    context: int | None = None  # tokens of a row, once the task is fitted; None: the rows are no tokens
    context_schedule: tuple[
        tuple[int, int], ...
    ] = ()  # pairs (step, context): from this step on, rows have fewer tokens
    pads: bool = False  # whether rows may have fewer tokens than that
    has_state: bool = False  # whether batches depend on more than (seed, step), such as an agent's episodes

    @property
    def fingerprints(self) -> dict[str, str]:
        """Returns a checksum of each split, which tells what has changed; of all data as "data" if they have no splits."""
        return {"data": self.fingerprint}

    def context_at(self, step: int) -> int | None:
        """Returns the number of tokens of a row in a step."""
        reached = [context for start, context in self.context_schedule if step >= start]
        return reached[-1] if reached else self.context

    def member_settings(self) -> dict[str, Any]:
        """Returns the settings of a member that follow from the data, such as `vocabulary` or `classes`."""
        return {}

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        """Returns the model with the output heads that the task needs."""
        return model

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        """Take the context and the like from the model. Raises ValueError if the model cannot read these data."""
        raise NotImplementedError

    def examples(self) -> int:
        """Returns the number of training examples; a batch may not be larger."""
        raise NotImplementedError

    def collect(self, network: Network | PairNetwork, seed: int, kernel: str) -> None:
        """Called before each batch: collect data that depend on the network, such as an agent's episodes. Default: nothing."""

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Returns the whole batch of a step, on the CPU."""
        raise NotImplementedError

    def count(self, batch: Batch) -> int:
        """Returns the number of targets of a batch: the loss is divided by it."""
        raise NotImplementedError

    def statistics(self) -> dict[str, Any]:
        """Returns numbers for the record of a step, such as the mean return of recent episodes."""
        return {}

    def state(self) -> dict[str, Tensor]:
        """Returns what a checkpoint must hold of the data; empty if batches follow from (seed, step) alone."""
        return {}

    def load_state(self, state: Mapping[str, Tensor], seed: int) -> None:
        """Continue from a state."""

    def save(self, folder: Path) -> None:
        """Write what `Task.open` reads again from a run's folder, such as the tokenizer."""


class Objective:
    """The loss and the metrics of a task. The network's outputs are read from the heads that the task was fitted to."""

    metric: str  # the metric by which checkpoints are compared, a key of `evaluate`
    higher_is_better: bool = False
    progress: float = 0.0  # the share of the training steps that are done; the training loop sets it before each step
    bytes_per_target: float | None = None  # of a text, on average: converts the loss to bits per byte
    targets_per_example: float = 1  # on average
    includes: str = ""  # what else the training loss contains, besides the loss of the targets that is evaluated
    whole_logits: bool = False  # whether `loss` stores the logits of all targets at once; the training loop sets it

    def probe(self) -> Probe | None:
        """Returns the probe of a training step: with it the heads return a `LogitMap`, unless the loss takes whole logits."""
        return None if self.whole_logits else Probe(records_weights=False, logits=False)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        """Returns the sum of the losses of the batch's targets and its auxiliary losses, in float32."""
        raise NotImplementedError

    def loss_with_cache(
        self, network: Network | PairNetwork, batch: Batch, kernel: str, cache: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        """Returns the loss given the cache of the step before (None at the start), and the cache for the next step.

        Only batches whose rows continue those of the step before carry a cache over.
        """
        return self.loss(network, batch, kernel), None

    @property
    def default_limit(self) -> int | None:
        """The number of examples of an evaluation if none is given: those with about MAX_TARGETS targets; None: all."""
        return max(1, math.ceil(MAX_TARGETS / self.targets_per_example))

    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Returns metrics on a split ("valid" or "test") and how they were computed.

        At most `limit` examples (None: all) are evaluated, spread evenly over the split. `low` and `high` are the bounds of the 95 %
        confidence interval of the metric; `targets` of the `targets_in_split` were scored.
        """
        raise NotImplementedError


class Inference:
    """What a trained network of a task is used for.

    The parameters of `generate_text`, `stream` and `generate_images` are the options that a user may give; parameters
    `**sampling` stand for the options of `everyformer.infer.sample` and a seed.
    """

    can_generate: bool = False
    can_predict: bool = False
    classes: tuple[str, ...] = ()  # names of the classes that `predict` predicts
    predicts_targets: bool = False  # classes or numbers; a translation is a text, which `generate` writes
    reads_examples: bool = True  # whether `probe_input` takes the number of an example
    takes_graph: bool = False  # whether `predict` takes a graph instead of a list of examples
    generates_images: bool = False
    file: str = "samples.png"  # default name of the file of `generate_images`, in the run's folder
    example: str = "--prompt 'Once'"  # options of `everyformer generate` for a first try

    def predict(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> Predictions:
        """Returns the classes, numbers or translations of some inputs."""
        raise ValueError("this model predicts no class, number or translation of an example; use generate, or evaluate")

    def read_inputs(self, data: str, column: str | None = None) -> Inputs:
        """Opens a file, a folder or standard input ("-") with examples to predict. `column` of records has the input."""
        raise ValueError("this model predicts no class, number or translation of an example; use generate, or evaluate")

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        """Returns a short text that shows what the network does, for the log; None if the task has none."""
        return None

    def probe_input(
        self, network: Network | PairNetwork, text: str | None = None, example: int | None = None
    ) -> ProbeInput:
        """Returns a text, or an example of the validation data, as the network reads it, with labels for its positions."""
        if example is not None and not self.reads_examples:
            raise ValueError("this model reads no examples by number; give a text")
        if example is not None and text is not None:
            raise ValueError("a text and an example are given, and a model reads one of them; leave one out")
        return self._probe_input(network, text, example)

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        raise ValueError("this task has no example that can be drawn; give the run of another one")

    def generate_text(self, network: Network | PairNetwork, prompt: str, **options: Any) -> str:
        """Returns the prompt with its continuation, or its translation, or its class."""
        raise ValueError("this model does not generate text; use evaluate, or generate images if it is an image model")

    def generate_texts(self, network: Network | PairNetwork, prompts: Sequence[Any], **options: Any) -> list[str]:
        """Returns what `generate_text` returns, for several prompts."""
        return [self.generate_text(network, prompt, **options) for prompt in prompts]

    def score(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> list[Score]:
        """Returns the log-likelihood of each text, or list of token ids."""
        raise ValueError("this model gives texts no probability")

    def embed(
        self, network: Network | PairNetwork, inputs: Sequence[Any], pooling: Reading = "mean", normalize: bool = False
    ) -> NDArray[np.float32]:
        """Returns one vector of each input: N, D, the last layer pooled over the positions that are not padding."""
        raise ValueError("this model gives its inputs no vector each")

    def stream(self, network: Network | PairNetwork, prompt: str, **options: Any) -> Iterator[str]:
        """Yields the continuation of a prompt piece by piece."""
        raise ValueError("this model does not generate text token by token")

    def generate_images(self, network: Network | PairNetwork, file: Path, **options: Any) -> str:
        """Write images, or an episode of an agent, to a file. Returns a description of its content."""
        raise ValueError("this model does not generate images; leave --out out")


@dataclass(frozen=True)
class FittedTask:
    """A task on its data, fitted to a model."""

    data: TaskData
    objective: Objective
    inference: Inference
