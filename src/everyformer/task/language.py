"""Language modelling: predict the next token of a text.

Batches are windows that start anywhere in the text (Bloem 2019, source B). The windows of the first steps may be shorter
(`context_schedule`), which are cheaper (Press et al. 2021, Shortformer); with run.batch_schedule a step has as many tokens as
later. For a model with a segment memory the batches are
contiguous instead (Dai et al. 2019): the text is a ring, the rows of a batch start at equal distances, and each row continues
where it ended in the step before. After `restart` segments a row begins anew, with an empty memory, as every text does that the
model is given later; the rows take turns. In a text of several documents it then begins with the next document, if one starts
within as many segments.

With `prefix` the model becomes a prefix language model (Raffel et al. 2019): it attends to the first tokens of a window in full, and has
no loss there. The first target is the token after the prefix. In evaluation the prefix is what is not scored, in generation the prompt.

Every position is a target. Two auxiliary losses serve training alone (Al-Rfou et al. 2018; the training loss includes them):
    extra_targets     the tokens after the next one are predicted too, each with the weight `extra_target_weight` (1/2)
    auxiliary_layers  every layer l of n predicts them too, until l/n of the share `auxiliary_until` (1/2) of the steps: l/(2n)
"""

from __future__ import annotations

from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import SideInputs
from everyformer.attention.pattern import Prefix
from everyformer.data import tokenizer as tokenizers
from everyformer.data.encode import COUNTED, encode_split, token_offsets
from everyformer.data.text import Text, open_text
from everyformer.data.tokenizer import Ids
from everyformer.infer.estimate import Estimate, Progress
from everyformer.infer.evaluate import (
    adaptive_metrics,
    bits_per_byte,
    perplexity,
    streaming_nll,
    streaming_rows,
    window_nll,
)
from everyformer.infer.prompts import fixed_prefix
from everyformer.network.auxiliary import AuxiliaryNetwork, AuxiliaryPredictions, Prediction
from everyformer.network.cache import Cache
from everyformer.network.depth import Stack
from everyformer.network.linear_cross_entropy import NO_TARGET, cross_entropy
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language as LanguageHead
from everyformer.task.batch import Batch, step_generator
from everyformer.task.check import (
    check_split,
    check_tokens,
    context_of,
    context_setting,
    head_index,
    single_sequence,
)
from everyformer.task.language_inference import CONTEXT, LanguageInference
from everyformer.task.layer_losses import LayerLosses
from everyformer.task.prefix_model import with_prefix
from everyformer.task.task import FittedTask, Objective, Task, TaskData
from everyformer.value import Count, Share, Size, Value

MAX_SEGMENT = 1024  # default for a model with a longer memory
RESTART = 4  # times that its memory is filled, by default, before a row begins anew
STARTS = (  # how an evaluation begins
    "with an empty memory, then carried over",
    "with an empty memory, then carried over; each row reads its lead first",
    "anew in each window",
)


class Language(Task, Value, frozen=True):
    """Predict the next token of a text."""

    tokenizer: Literal["bytes", "characters", "bpe", "gpt2"] = "bytes"  # tokenizer; all of them are lossless
    vocabulary: Size = 8192  # largest number of tokens that a bpe tokenizer learns
    tokenizer_files: str | None = None  # gpt2: the folder with encoder.json and vocab.bpe
    column: str | None = None  # column of records with the text; None: the column "text"
    valid: Share = 0.1  # share of the text held out for validation, if the data have no such split
    test: Share = 0.0  # share of the text held out for testing, after that for validation
    stride: Size | None = None  # stride of the window in evaluation; None: half the window, or a whole segment
    context: Size | None = None  # tokens of a window or segment; None: the model's positions or memory length, or 256
    context_schedule: tuple[
        tuple[Count, Size], ...
    ] = ()  # pairs (step, context): from this step on, these shorter windows
    restart: Count | None = None  # segments after which a row begins anew; 0: never; None: 4 times the memory's
    memory: Size | None = None  # memory length in evaluation, for a model with a segment memory; None: as in training
    prefix: Count | Literal["random"] | None = (
        None  # first tokens of a window that are given; random: up to all of them
    )
    extra_targets: Count | None = None  # tokens after the next one to predict in training; None: as the model has it
    auxiliary_layers: bool | None = None  # predict from every layer in training; None: as the model has it
    extra_target_weight: Share = 0.5  # weight of the loss of each extra target
    auxiliary_until: Share = 0.5  # share of the steps after which only the last layer has a loss

    recurrent_rate: ClassVar[float] = 4.0  # see docs/results/rates.md

    def open(self, data: str | None, folder: Path | None = None) -> LanguageData:
        held_out = (self.valid, *([self.test] if self.test else []))
        return LanguageData(self, open_text(data, (1 - sum(held_out), *held_out), self.column), folder)


class LanguageData(TaskData):
    """Windows of a text, or contiguous segments for a model with a segment memory."""

    contiguous = False
    restart = 0  # segments after which a row begins anew; 0: never
    prefix: int | Literal["random"] | None = None  # first tokens of a window without a loss, once fitted
    reads_prefix = False  # whether the model is given their number

    def __init__(self, task: Language, text: Text, folder: Path | None):
        self.task, self.text = task, text
        self.fingerprint = text.fingerprint
        # The set of characters is taken from all splits; which characters exist is not what is learned.
        splits = text.splits if task.tokenizer == "characters" else ["train"]
        self.tokenizer = (
            tokenizers.load_ids(text.splits.values(), folder)
            if text.is_token_ids
            else tokenizers.load_or_train(
                task.tokenizer,
                lambda: chain.from_iterable(map(text.chunks, splits)),
                task.vocabulary,
                text.fingerprint,
                folder,
                task.tokenizer_files,
            )
        )
        self.bytes_per_token = tokenizers.bytes_per_token(self.tokenizer)

    @cached_property
    def splits(self) -> dict[str, Ids]:
        """The tokens of each split, encoded on first use: generation needs none of them."""
        splits = {split: encode_split(self.text, split, self.tokenizer) for split in self.text.splits}
        for split, token_N in splits.items():
            if len(token_N) < 2:
                remedy = "give more text, or another task.valid" if split == "valid" else "give more text"
                raise ValueError(f"{self.text.name} has {len(token_N)} tokens for {split}; {remedy}")
        return splits

    @property
    def fingerprints(self) -> dict[str, str]:
        return self.text.fingerprints

    def member_settings(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary} | context_setting(self.task.context)

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        settings = {"extra_targets": self.task.extra_targets, "every_layer": self.task.auxiliary_layers}
        changes = {name: setting for name, setting in settings.items() if setting is not None}
        if not isinstance(model, Model):
            return model
        if self.task.prefix is not None:
            model = with_prefix(model)
        if not changes:
            return model
        auxiliary = replace(model.auxiliary or AuxiliaryPredictions(0, False), **changes)
        return replace(model, auxiliary=auxiliary if auxiliary.extra_targets or auxiliary.every_layer else None)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        model = single_sequence(model, "language")
        index = head_index(model, LanguageHead, "language")
        auxiliary = model.auxiliary
        self.contiguous = model.memory is not None
        if self.task.memory and not self.contiguous:
            raise ValueError(f"task.memory is {self.task.memory}, but the model has no segment memory; leave it out")
        default = min(model.memory.length, MAX_SEGMENT) if model.memory else CONTEXT
        self.context = context_of(self.task.context, model, default)
        if model.memory is not None:
            filled = -(-model.memory.length // self.context)
            self.restart = RESTART * filled if self.task.restart is None else self.task.restart
        elif self.task.restart is not None:
            raise ValueError(f"task.restart is {self.task.restart}, but the model has no segment memory; leave it out")
        self._check_schedule(self.context)
        shortest = min((self.context, *(context for _, context in self.context_schedule)))
        if auxiliary is not None and auxiliary.extra_targets >= shortest:
            raise ValueError(
                f"a context of {shortest} has no target {auxiliary.extra_targets} tokens after the next one; lower task.extra_targets"
            )
        check_tokens(model, self.tokenizer.vocabulary, self.text.name)
        self.prefix = self._prefix(model)
        self.reads_prefix = Prefix() in model.body.patterns()
        layers = 0
        if auxiliary is not None:
            layers = model.body.num_layers if auxiliary.every_layer and isinstance(model.body, Stack) else 1
        return FittedTask(
            self, LanguageObjective(self, index, layers), LanguageInference(self.tokenizer, self.context, self)
        )

    def _check_schedule(self, longest: int) -> None:
        """Sets the context of each step. Raises ValueError if a window of the schedule cannot be."""
        self.context_schedule = tuple(sorted(self.task.context_schedule))
        if self.context_schedule and self.contiguous:
            raise ValueError(
                "task.context_schedule is set, but the segments of a model with a segment memory continue each other; leave it out"
            )
        for _, context in self.context_schedule:
            if context > longest:
                raise ValueError(
                    f"task.context_schedule has a context of {context}, but task.context is {longest}; raise task.context, or lower it"
                )

    def _prefix(self, model: Model) -> int | Literal["random"] | None:
        """The prefix of every window; None: there is none."""
        own, asked = model.body.prefix(), self.task.prefix
        length = None if own is None else own.length
        if own is not None and length is None and asked is None:
            raise ValueError(
                "the model reads a prefix, but its length is not set; set task.prefix to a number, or to random"
            )
        prefix = length or None if asked is None else asked
        if prefix is not None and model.auxiliary is not None:
            raise ValueError(
                "auxiliary predictions reach into the prefix of a window; leave task.prefix out, or set model.auxiliary=none"
            )
        shortest = min((self.context or 0, *(context for _, context in self.context_schedule)))
        if isinstance(prefix, int) and prefix > shortest:
            raise ValueError(
                f"a prefix of {prefix} leaves no target in a context of {shortest}; lower task.prefix, or raise task.context"
            )
        return prefix

    def examples(self) -> int:
        count = len(self.splits["train"])
        if self.context is not None and count <= self.context:
            raise ValueError(
                f"a context of {self.context} is longer than the {count} tokens of {self.text.name}; "
                "lower task.context or give more text"
            )
        return count - 1

    def batch(self, step: int, size: int, seed: int) -> Batch:
        context, token_N, restart = self.context_at(step), self.splits["train"], {}
        assert context is not None
        if self.contiguous:
            start_B, segment_B = self.segments(step, size, seed)
            restart = {"restart_B": segment_B == 0} if self.restart else {}
        else:
            start_B = torch.randint(0, len(token_N) - context, (size,), generator=step_generator(seed, step))
        index = (start_B[:, None] + torch.arange(context + 1)) % len(token_N)
        token_BT = torch.from_numpy(np.asarray(token_N[index.numpy()]).astype(np.int64))
        return Batch({"token_BT": token_BT} | restart | self.prefixes(step, size, seed))

    def prefixes(self, step: int, size: int, seed: int) -> dict[str, Tensor]:
        """Returns the prefix of each row; random ones are equally likely from 1 to the whole window."""
        if self.prefix is None:
            return {}
        if self.prefix == "random":
            generator = step_generator(seed + 1, step)
            return {"prefix_B": torch.randint(1, (self.context_at(step) or 0) + 1, (size,), generator=generator)}
        return {"prefix_B": torch.full((size,), self.prefix)}

    def segments(self, step: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns where the segments of the rows start in the ring of the text, and how many segments ago each row began anew."""
        assert self.context is not None
        count, row_B = len(self.splits["train"]), torch.arange(size)
        first = torch.randint(0, count, (1,), generator=step_generator(seed, 0))
        segment_B = torch.full((size,), step)
        if self.restart:
            segment_B = (step + row_B * self.restart // size) % self.restart
        begin_B = (first + row_B * count // size + (step - segment_B) * self.context) % count
        if self.restart and len(self.document_N) > 1:
            start_N = np.append(self.document_N, self.document_N[0] + count)
            next_B = torch.from_numpy(start_N[np.searchsorted(start_N, begin_B.numpy())])
            begin_B = torch.where(next_B - begin_B < self.restart * self.context, next_B, begin_B)
        return begin_B + segment_B * self.context, segment_B

    @cached_property
    def document_N(self) -> NDArray[np.int64]:
        """The index of the first token of each document of the training split."""
        return token_offsets(self.splits["train"], self.bytes_per_token, self.text.starts["train"])

    def count(self, batch: Batch) -> int:
        targets = batch["token_BT"].shape[1] - 1
        if "prefix_B" not in batch.tensors:
            return len(batch) * targets
        return int((targets - (batch["prefix_B"] - 1).clamp(min=0)).sum())

    def byte_length(self, token_N: Ids) -> int:
        """Returns the number of bytes of the text of some tokens."""
        sizes = self.bytes_per_token
        return sum(int(sizes[token_N[start : start + COUNTED]].sum()) for start in range(0, len(token_N), COUNTED))

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


class LanguageObjective(Objective):
    """Cross-entropy of the next token. `layers` is the number of layers with auxiliary predictions; 0: there are none."""

    metric = "bits_per_byte"

    def __init__(self, data: LanguageData, head: int, layers: int):
        self.data, self.task, self.head, self.layers = data, data.task, head, layers
        self.layer_losses = LayerLosses(layers, data.task.auxiliary_until)
        self.metric = "bits_per_token" if data.tokenizer.kind == "ids" else "bits_per_byte"
        self.includes = "auxiliary losses" if layers else ""
        self.progress = 0.0

    @cached_property
    def bytes_per_target(self) -> float | None:  # type: ignore[override]
        """None if the training loss includes auxiliary losses."""
        return None if self.layers else len(self.data.text.splits["train"]) / len(self.data.splits["train"])

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        return self.loss_with_cache(network, batch, kernel, None)[0]

    def loss_with_cache(
        self, network: Network | PairNetwork, batch: Batch, kernel: str, cache: Cache | None
    ) -> tuple[Tensor, Cache | None]:
        token_BT = batch["token_BT"]
        cache = cache or (Cache(segment_memory=True) if self.data.contiguous else None)
        if cache is not None and "restart_B" in batch.tensors:
            cache = cache.reset(batch["restart_B"])
        predictions: tuple[Prediction, ...] = ()
        options: dict[str, Any] = {"cache": cache, "kernel": kernel}
        if self.layers:
            options |= {"lowest_layer": self.layer_losses.lowest, "logits": self.whole_logits}
            output, predictions = AuxiliaryNetwork(network)(token_BT[:, :-1], **options)
        else:
            prefix_B = batch.tensors.get("prefix_B") if self.data.reads_prefix else None
            side_inputs = None if prefix_B is None else SideInputs(prefix=prefix_B)
            output = network(token_BT[:, :-1], probe=self.probe(), side_inputs=side_inputs, **options)
        target_BT = token_BT[:, 1:]
        if "prefix_B" in batch.tensors:
            position = torch.arange(target_BT.shape[1], device=target_BT.device)
            target_BT = target_BT.masked_fill(position < batch["prefix_B"][:, None] - 1, NO_TARGET)
        loss = cross_entropy(output.logits_of(self.head), target_BT)
        for layer, extra, logits in predictions:
            target_BT = F.pad(token_BT[:, 1 + extra :], (0, extra), value=NO_TARGET)
            weight = self.layer_losses.weights[layer - 1] * (self.task.extra_target_weight if extra else 1.0)
            loss = loss + weight * cross_entropy(logits, target_BT)
        return loss + sum(output.aux.values()) * self.data.count(batch), output.cache

    @property
    def progress(self) -> float:
        return self._progress

    @progress.setter
    def progress(self, progress: float) -> None:
        self._progress = progress
        self.layer_losses.advance(progress)

    @property
    def targets_per_example(self) -> float:  # type: ignore[override]
        return self.data.context or 1

    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        data, context = self.data, self.data.context
        assert isinstance(network, Network) and context is not None
        check_split(split, data.splits, data.text.name)
        token_N, estimate = data.splits[split], Estimate(progress)
        available = len(token_N) - 1 - max(0, fixed_prefix(network) - 1)
        targets = available if limit is None else min(limit * context, available)
        options: dict[str, Any] = {"limit": targets, "kernel": kernel, "estimate": estimate}
        if network.value.memory is not None:
            segment, memory = self.task.stride or context, self.task.memory or network.value.memory.length
            rows, lead = streaming_rows(available, segment, memory, targets)
            # Without an override the network may drop keys that no head attends to.
            streaming_nll(network, token_N, segment, self.task.memory, rows=rows, lead=lead, **options)
            method: dict[str, Any] = {"segment": segment, "memory": memory} | (
                {"rows": rows, "lead": lead} if rows > 1 else {}
            )
            method["start"] = STARTS[0] if rows == 1 else STARTS[1]
        else:
            stride = self.task.stride or max(1, context // 2)
            window_nll(network, token_N, context, stride, **options)
            method = {"window": min(context, available), "stride": stride, "start": STARTS[2]}
        scored = token_N[1:] if estimate.scored == len(token_N) - 1 else token_N[estimate.target_indices()]
        bits = bits_per_byte(estimate.scored, data.byte_length(scored))  # of one nat per target
        return {
            self.metric: estimate.mean * bits,
            "low": estimate.low * bits,
            "high": estimate.high * bits,
            "perplexity": perplexity(estimate.total, estimate.scored),
            "split": split,
            **method,
            "targets": estimate.scored,
            "targets_in_split": available,
            **(
                {} if network.value.body.prefix() is not None else {"leaks": "the future"}
            ),  # then the numbers above are too low
            **adaptive_metrics(network, token_N),
        }
