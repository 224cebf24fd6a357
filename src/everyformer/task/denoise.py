"""Span corruption: the pretraining of T5. Paper: Raffel et al. 2019.

Windows of a text lose some of their spans (see corruption.py). The encoder reads what is left, with a mark in the place of each span; the
decoder writes each mark and its span. The loss is the mean of -log p over the tokens of the target. The spans of a step are a function
of (seed, step), those of an evaluation are always the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from everyformer.data import tokenizer as tokenizers
from everyformer.data.encode import encode_split
from everyformer.data.inputs import Inputs, read_inputs
from everyformer.data.text import Text, open_text
from everyformer.data.tokenizer import SPECIAL, Ids
from everyformer.infer.estimate import Estimate, Progress
from everyformer.infer.evaluate import perplexity
from everyformer.infer.generate import generate
from everyformer.infer.predict import PREDICTED, Predictions
from everyformer.network.linear_cross_entropy import cross_entropy
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language
from everyformer.task.batch import Batch, pad, step_generator
from everyformer.task.check import check_split, check_tokens, context_of, context_setting, head_index
from everyformer.task.corruption import MARKS, SpanMarks, corrupt, counts
from everyformer.task.probe_input import EXAMPLE, ProbeInput, check_index, token_labels
from everyformer.task.task import FittedTask, Inference, Objective, Task, TaskData
from everyformer.value import Positive, Share, Size, Value

CONTEXT = 256  # default for a model without a limit of positions
EVALUATION_WINDOWS = 32  # in one call
BLANK = re.compile(r"_{3,}|<extra_id_\d+>")
TOKENS = 100  # default length of the text that fills the blanks of an input


class Denoise(Task, Value, frozen=True):
    """Write the spans that are missing from a text (the pretraining of T5)."""

    tokenizer: Literal["bpe", "characters"] = "bpe"  # tokenizer; both are lossless
    vocabulary: Size = 8192  # largest number of tokens that a bpe tokenizer learns, without the 100 marks of spans
    context: Size | None = None  # tokens of a window of the text; None: the model's positions, or 256
    share: Share = 0.15  # share of the tokens that are taken out
    span: Positive = 3.0  # mean length of a span in tokens
    column: str | None = None  # column of records with the text; None: the column "text"
    valid: Share = 0.1  # share of the text held out for validation, if the data have no such split

    def open(self, data: str | None, folder: Path | None = None) -> DenoiseData:
        return DenoiseData(self, open_text(data, (1 - self.valid, self.valid), self.column), folder)


class DenoiseData(TaskData):
    """Windows of a text without some of their spans."""

    context: int

    def __init__(self, task: Denoise, text: Text, folder: Path | None):
        self.task, self.text, self.fingerprint = task, text, text.fingerprint
        self.context = task.context or CONTEXT
        splits = text.splits if task.tokenizer == "characters" else ["train"]
        self.tokenizer = tokenizers.load_or_train(
            task.tokenizer,
            lambda: chain.from_iterable(map(text.chunks, splits)),
            task.vocabulary,
            text.fingerprint,
            folder,
            names=[*SPECIAL, *MARKS],
        )
        self.marks = SpanMarks(self.tokenizer, str(folder))

    @cached_property
    def splits(self) -> dict[str, Ids]:
        """The tokens of each split, encoded on first use."""
        return {split: encode_split(self.text, split, self.tokenizer) for split in self.text.splits}

    @property
    def fingerprints(self) -> dict[str, str]:
        return self.text.fingerprints

    def member_settings(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary} | context_setting(self.task.context)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        if not isinstance(model, EncoderDecoder):
            raise ValueError("denoise needs an encoder and a decoder; choose the member t5 or transformer")
        for side in (model.encoder, model.decoder):
            self.context = min(context_of(self.task.context, side, CONTEXT), self.task.context or CONTEXT)
            check_tokens(side, self.tokenizer.vocabulary, self.text.name)
        _, spans = counts(self.context, self.task.share, self.task.span)
        if spans > len(self.marks.spans):
            raise ValueError(
                f"a window of {self.context} tokens loses {spans} spans, but the tokenizer has {len(self.marks.spans)} marks; lower "
                "task.context or task.share, or raise task.span"
            )
        objective = DenoiseObjective(self, head_index(model.decoder, Language, "denoise"))
        return FittedTask(self, objective, DenoiseInference(self))

    def examples(self) -> int:
        count = len(self.splits["train"])
        if count <= self.context:
            raise ValueError(
                f"a context of {self.context} is longer than the {count} tokens of {self.text.name}; lower task.context or give more text"
            )
        return count - self.context + 1

    def batch(self, step: int, size: int, seed: int) -> Batch:
        generator = step_generator(seed, step)
        start_B = torch.randint(0, len(self.splits["train"]) - self.context + 1, (size,), generator=generator).tolist()
        return self.batch_of([self.corrupted("train", start, generator) for start in start_B])

    def corrupted(self, split: str, start: int, generator: Generator) -> tuple[Ids, Ids]:
        window = np.asarray(self.splits[split][start : start + self.context]).astype(np.int64)
        return corrupt(window, self.marks, self.task.share, self.task.span, generator)

    def batch_of(self, pairs: Sequence[tuple[Ids, Ids]]) -> Batch:
        """Returns a batch of sources and targets; only sources and targets of different lengths are padded."""
        tensors: dict[str, Tensor] = {}
        tensors["source_BS"], source_visible_BS = pad([source for source, _ in pairs], 1)
        tensors["target_BT"], visible_BT = pad([target for _, target in pairs], 1)
        tensors["input_BT"] = F.pad(tensors["target_BT"], (1, 0), value=self.marks.start)[:, :-1]
        if not bool(source_visible_BS.all() and visible_BT.all()):
            tensors |= {"source_visible_BS": source_visible_BS, "visible_BT": visible_BT}
        return Batch(tensors)

    def count(self, batch: Batch) -> int:
        return batch["target_BT"].numel()

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


def pair_arguments(batch: Batch) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Returns the network's inputs and the options of its call."""
    visible = {"source_visible": batch.tensors.get("source_visible_BS"), "visible": batch.tensors.get("visible_BT")}
    return (batch["source_BS"], batch["input_BT"]), visible


class DenoiseObjective(Objective):
    """Cross-entropy of the missing spans and their marks."""

    metric = "perplexity"

    def __init__(self, data: DenoiseData, head: int):
        self.data, self.head = data, head

    def losses(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor]:
        """Returns the network's output and -log p of every token of the targets."""
        inputs, options = pair_arguments(batch)
        output = network(*inputs, **options, kernel=kernel)
        logits_NV = output.logits_of(self.head).flatten(0, 1).float()
        loss_N = F.cross_entropy(logits_NV, batch["target_BT"].flatten(), reduction="none")
        return output, loss_N.view(batch["target_BT"].shape)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        inputs, options = pair_arguments(batch)
        output: Any = network(*inputs, **options, kernel=kernel, probe=self.probe())
        loss = cross_entropy(output.logits_of(self.head), batch["target_BT"])
        return loss + sum(output.aux.values()) * self.data.count(batch)

    @property
    def targets_per_example(self) -> float:  # type: ignore[override]
        missing, spans = counts(self.data.context, self.data.task.share, self.data.task.span)
        return missing + spans + 1

    @torch.no_grad()
    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Evaluate windows that follow each other, each with the same spans in every evaluation."""
        data = self.data
        check_split(split, data.splits, data.text.name)
        length, targets = len(data.splits[split]), int(self.targets_per_example)
        available = length // data.context
        if available == 0:
            raise ValueError(
                f"a context of {data.context} is longer than the {length} tokens of {data.text.name} for {split}; lower task.context, "
                "or give more text"
            )
        windows = available if limit is None else min(limit, available)
        chosen = [number * available // windows for number in range(windows)]
        device, estimate, right = next(network.parameters()).device, Estimate(progress), 0
        marks = torch.tensor([*data.marks.spans, data.marks.end], device=device)
        estimate.expect(windows * targets)
        for first in range(0, windows, EVALUATION_WINDOWS):
            some = chosen[first : first + EVALUATION_WINDOWS]
            pairs = [data.corrupted(split, number * data.context, step_generator(0, number)) for number in some]
            batch = data.batch_of(pairs).to(device)
            output, loss_BT = self.losses(network, batch, kernel)
            word_BT = ~torch.isin(batch["target_BT"], marks)
            guess_BT = output.logits_of(self.head).argmax(-1)
            right += int(((guess_BT == batch["target_BT"]) & word_BT).sum())
            estimate.add(loss_BT.double().sum(1), targets, (np.array(some) + 1) * data.context)
        missing, _ = counts(data.context, data.task.share, data.task.span)
        return {
            "perplexity": perplexity(estimate.total, estimate.scored),
            "low": perplexity(estimate.low, 1),
            "high": perplexity(estimate.high, 1),
            "loss": estimate.mean,
            "span_accuracy": right / (windows * missing),
            "split": split,
            "windows": windows,
            "targets": estimate.scored,
            "targets_in_split": available * targets,
            "share": data.task.share,
            "span": data.task.span,
        }


class DenoiseInference(Inference):
    can_generate = can_predict = True
    example = "--prompt 'To be, or ___ to be, that is the ___.'"

    def __init__(self, data: DenoiseData):
        self.data, self.tokenizer, self.marks = data, data.tokenizer, data.marks

    def source(self, text: str) -> Ids:
        """Returns a text as the encoder reads it: each blank (___ or <extra_id_0>) is the mark of a span.

        A published T5 has learned tasks too, so that it also answers a text without blanks.
        """
        parts = BLANK.split(text)
        if len(parts) == 1 and not self.marks.published:
            raise ValueError(f"the text {text!r} has no blank to fill; write ___ where text is missing")
        if len(parts) - 1 > len(self.marks.spans):
            raise ValueError(f"the text has {len(parts) - 1} blanks; give at most {len(self.marks.spans)}")
        if self.tokenizer.kind != "characters":  # a token of a word begins with the space before it
            parts = [part.rstrip(" ") if number + 1 < len(parts) else part for number, part in enumerate(parts)]
        encoded = self.tokenizer.encode_all(parts)
        marks = [[mark] for mark in self.marks.spans[: len(parts) - 1]]
        pieces = chain.from_iterable(zip(encoded, [*marks, [self.marks.end]], strict=True))
        return np.concatenate([np.asarray(piece, dtype=np.int64) for piece in pieces])

    def spans(self, target: Sequence[int]) -> dict[int, list[int]]:
        """Returns the tokens after each mark of a target."""
        spans: dict[int, list[int]] = {}
        current: list[int] = []
        for token in target:
            if token == self.marks.end:
                break
            if token in self.marks.number:
                current = spans.setdefault(token, [])
            else:
                current.append(token)
        return spans

    def targets(self, network: PairNetwork, sources: Sequence[Ids], tokens: int, **sampling: Any) -> list[list[int]]:
        """Returns what the network writes for some sources."""
        written: list[list[int]] = []
        for first in range(0, len(sources), PREDICTED):
            source_BS, visible_BS = pad(sources[first : first + PREDICTED], 1)
            device = next(network.parameters()).device
            encoder_output = network.encode(source_BS.to(device), visible=visible_BS.to(device))
            options: dict[str, Any] = {"temperature": 0, "stop": [self.marks.end], "encoder_output": encoder_output}
            rows = generate(network.decoder, [[self.marks.start]] * len(source_BS), tokens, **options | sampling)
            written += [row[1:] for row in rows]
        return written

    @torch.no_grad()
    def fill(self, network: PairNetwork, texts: Sequence[str], tokens: int = TOKENS, **sampling: Any) -> list[str]:
        """Returns the texts with their blanks filled; of a text without blanks the answer."""
        sources = [self.source(text) for text in texts]
        filled = []
        for source, target in zip(sources, self.targets(network, sources, tokens, **sampling), strict=True):
            if not set(self.marks.number) & set(source.tolist()):
                answer = target[: target.index(self.marks.end)] if self.marks.end in target else target
                filled.append(self.tokenizer.decode(answer))
                continue
            spans = self.spans(target)
            pieces = (spans.get(token, []) if token in self.marks.number else [token] for token in source[:-1].tolist())
            filled.append(self.tokenizer.decode(list(chain.from_iterable(pieces))))
        return filled

    def generate_text(self, network: Network | PairNetwork, prompt: str, tokens: int = TOKENS, **sampling: Any) -> str:
        """Returns the prompt with its blanks filled, or the answer to a prompt without blanks."""
        assert isinstance(network, PairNetwork)
        return self.fill(network, [prompt], tokens, **sampling)[0]

    def predict(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> Predictions:
        """Returns the texts with their blanks filled."""
        assert isinstance(network, PairNetwork)
        return Predictions(np.array(self.fill(network, [str(text) for text in inputs]), dtype=object))

    def read_inputs(self, data: str, column: str | None = None) -> Inputs:
        return read_inputs(data, "text", (column, self.data.task.column, "text"))

    def window(self, number: int) -> tuple[Ids, Ids]:
        count = len(self.data.splits["valid"]) // self.data.context
        start = check_index(number, count, "validation windows") * self.data.context
        return self.data.corrupted("valid", start, step_generator(0, number))

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """A text with blanks, and what the network writes in them; other texts lose spans. Default: EXAMPLE, or a window of the
        validation text if it has other characters."""
        assert isinstance(network, PairNetwork)
        if text is not None and BLANK.search(text):
            source = self.source(text)
            (written,) = self.targets(network, [source], TOKENS)
            pair = (source, np.array(written or [self.marks.end], dtype=np.int64))
        else:
            try:
                ids = self.tokenizer.encode((text or EXAMPLE).encode()).astype(np.int64)
                task, generator = self.data.task, step_generator(0, example or 0)
                pair = corrupt(ids[: self.data.context], self.marks, task.share, task.span, generator)
            except ValueError:  # an unknown character
                if text is not None:
                    raise
                pair = self.window(example or 0)
        inputs, options = pair_arguments(self.data.batch_of([pair]).to(next(network.parameters()).device))
        source_labels, labels = (self.labels(x[0].tolist()) for x in inputs)
        return ProbeInput(inputs, labels, options, source_labels)

    def labels(self, ids: Sequence[int]) -> list[str]:
        numbers = self.marks.number
        labels = token_labels(self.tokenizer, ids)
        return [f"<{numbers[id_]}>" if id_ in numbers else label for id_, label in zip(ids, labels, strict=True)]

    @torch.no_grad()
    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        """Returns a validation window in which the missing spans are the network's, in brackets."""
        assert isinstance(network, PairNetwork)
        source, _ = self.window(seed % max(1, len(self.data.splits["valid"]) // self.data.context))
        (written,) = self.targets(network, [source], TOKENS)
        spans, text, part = self.spans(written), "", list[int]()
        for token in source.tolist():
            if token in self.marks.number or token == self.marks.end:
                text += self.tokenizer.decode(part)
                part = []
            if token in self.marks.number:
                text += f"[{self.tokenizer.decode(spans.get(token, []))}]"
            elif token != self.marks.end:
                part.append(token)
        return text
