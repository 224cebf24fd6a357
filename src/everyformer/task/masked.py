"""Masked language modelling: the pretraining of BERT. Paper: Devlin et al. 2018, section 3.1 and appendix A.

A row is [CLS] A [SEP] B [SEP], where A and B are consecutive sentences that together fit the context. In half of the rows B
follows A; in the others B is from elsewhere (from another document, if there is one) and A is unchanged. 15 % of the tokens
other than [CLS] and [SEP] are selected; of these 80 % are replaced by [MASK], 10 % by a random token, and 10 % stay. The loss is
the mean of -log p(token) over the selected positions, plus the mean of -log p(B follows A or not) over the rows.
Departures: without next_sentence a row is [CLS] A [SEP], one run of sentences (RoBERTa's doc-sentences). A pair that is too
long loses the beginning of A and the end of B, so that B still follows A; BERT truncates either at random. Masks are sampled
again at each step, as a function of (seed, step); BERT repeats ten sets of masks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Probe, SideInputs
from everyformer.data import tokenizer as tokenizers
from everyformer.data.encode import Sentences, encode_sentences
from everyformer.data.inputs import Inputs, read_inputs
from everyformer.data.text import Text, open_text
from everyformer.data.tokenizer import SPECIAL, Ids
from everyformer.infer.estimate import Estimate, Progress, row_sums
from everyformer.infer.evaluate import perplexity
from everyformer.infer.predict import Predictions, in_batches
from everyformer.network.linear_cross_entropy import NO_TARGET, cross_entropy
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify
from everyformer.network.output_head import Masked as MaskedHead
from everyformer.task.batch import Batch, pad, step_generator
from everyformer.task.check import (
    check_split,
    check_tokens,
    context_of,
    context_setting,
    head_index,
    single_sequence,
)
from everyformer.task.task import FittedTask, Objective, Task, TaskData
from everyformer.task.token_inference import TokenInference
from everyformer.value import Share, Size, Value

CONTEXT = 128  # default for a model without a limit of positions
MULTIPLE = 16
CLS, SEP, MASK = (SPECIAL.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
FIRST_WORD = len(SPECIAL)  # tokens below this one are special
MASKED, RANDOM = 0.8, 0.1  # of the selected tokens; the others stay
EVALUATION_ROWS = 32  # in one call
MASK_NAMES = ("[MASK]", "<mask>")
BLANK = re.compile(r"_{3,}|\[MASK\]|<mask>")


class Masked(Task, Value, frozen=True):
    """Predict masked tokens, and whether one passage follows another (the pretraining of BERT)."""

    vocabulary: Size = 8192  # largest number of word pieces that the tokenizer learns
    context: Size | None = None  # tokens of a row, with its marks; None: the model's positions, or 128
    next_sentence: bool = True  # also predict whether one passage follows another; False: single passages
    share: Share = 0.15  # share of the tokens that are predicted
    documents: Literal["files", "blank"] = (
        "files"  # what ends a document: the end of a file or record, or also a blank line
    )
    column: str | None = None  # column of records with the text; None: the column "text"
    valid: Share = 0.1  # share of the text held out for validation, if the data have no such split

    def open(self, data: str | None, folder: Path | None = None) -> MaskedData:
        return MaskedData(self, open_text(data, (1 - self.valid, self.valid), self.column), folder)


@dataclass(frozen=True)
class SpecialIds:
    """The special tokens of a masked language model, and the tokens that are words."""

    start: int  # [CLS]
    end: int  # [SEP]
    mask: int
    word_N: Tensor

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, folder: Path | None) -> SpecialIds:
        ids = {name: tokenizer.special_id(name) for name in ("[CLS]", "[SEP]", "[MASK]")}
        if missing := [name for name, id_ in ids.items() if id_ is None]:
            raise ValueError(
                f"the tokenizer in {folder} has no {' and no '.join(missing)}; give a run of the task masked, or train a new tokenizer"
            )
        words = [id_ for id_ in range(tokenizer.vocabulary) if id_ not in tokenizer.special]
        start, end, mask = (id_ or 0 for id_ in ids.values())
        return cls(start, end, mask, torch.tensor(words))


OURS = SpecialIds(CLS, SEP, MASK, torch.empty(0, dtype=torch.long))  # of our own tokenizers


class MaskedData(TaskData):
    """Rows of one or two passages with masked tokens."""

    pads = True

    def __init__(self, task: Masked, text: Text, folder: Path | None):
        self.task, self.text = task, text
        self.fingerprint = text.fingerprint
        self.tokenizer = tokenizers.load_or_train(
            "wordpiece", lambda: text.chunks("train"), task.vocabulary, text.fingerprint, folder
        )
        self.special = SpecialIds.of(self.tokenizer, folder)
        blank = task.documents == "blank"
        self.splits = {split: encode_sentences(text, split, self.tokenizer, blank) for split in text.splits}
        self.starts = {split: self._starts(of_split, split) for split, of_split in self.splits.items()}

    def _starts(self, of_split: Sentences, split: str) -> Ids:
        """The sentences that a row may begin with: for pairs, those that are followed by another one of their document."""
        start_N = np.arange(len(of_split))
        if self.task.next_sentence:
            start_N = np.setdiff1d(start_N, of_split.first_D[1:] - 1)
        least = 4 if self.task.next_sentence else 1
        if len(start_N) == 0 or len(of_split) < least:
            raise ValueError(
                f"{self.text.name} has {len(of_split)} sentences for {split}, {len(start_N)} of them followed by another in their "
                f"document; give at least {least}, one per line, or set task.next_sentence=false"
            )
        return start_N

    @property
    def fingerprints(self) -> dict[str, str]:
        return self.text.fingerprints

    def member_settings(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary} | context_setting(self.task.context)

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = single_sequence(model, "masked")
        token_head = [head for head in one.outputs if isinstance(head, MaskedHead)][:1] or [
            MaskedHead(width=one.embed_width)
        ]
        pair_head = [head for head in one.outputs if isinstance(head, Classify)][:1] or [
            Classify(2, "first", pooler=True)
        ]
        return replace(
            one, outputs=(*token_head, *(pair_head if self.task.next_sentence else [])), auxiliary=None, generator=None
        )

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        model = single_sequence(model, "masked")
        self.context = context_of(self.task.context, model, CONTEXT)
        if self.context < 8:
            raise ValueError(
                f"a context of {self.context} is too short for two passages and their marks; give at least 8"
            )
        check_tokens(model, self.tokenizer.vocabulary, self.text.name)
        head = head_index(model, MaskedHead, "masked")
        pair_head = head_index(model, Classify, "masked with task.next_sentence") if self.task.next_sentence else head
        if self.task.next_sentence and not model.segments:
            raise ValueError(
                "two passages need segment embeddings, but the model has none; choose bert, or task.next_sentence=false"
            )
        objective = MaskedObjective(self, head, pair_head)
        return FittedTask(self, objective, MaskedInference(objective))

    def examples(self) -> int:
        return len(self.starts["train"])

    def batch(self, step: int, size: int, seed: int) -> Batch:
        return self.random_batch("train", size, step_generator(seed, step))

    def random_batch(self, split: str, size: int, generator: torch.Generator) -> Batch:
        """Returns random rows of a split with their masks."""
        random_BN = torch.rand(size, 4, generator=generator, dtype=torch.float64).tolist()
        rows = [self.row(split, *numbers) for numbers in random_BN]
        token_BT, visible_BT = pad([ids for ids, _, _ in rows], MULTIPLE)
        position = torch.arange(token_BT.shape[1])[None]
        tensors = {"segment_BT": (position >= torch.tensor([second for _, second, _ in rows])[:, None]).long()}
        tensors["segment_BT"] *= visible_BT
        input_BT, target_BT = mask(
            token_BT, visible_BT, self.task.share, self.tokenizer.vocabulary, generator, self.special
        )
        tensors |= {"token_BT": input_BT, "target_BT": target_BT}
        if self.task.next_sentence:
            # The loss is a sum that is divided by the number of selected tokens; with this weight rows contribute their mean.
            weight = float((target_BT != NO_TARGET).sum()) / size
            tensors |= {
                "other_B": torch.tensor([other for _, _, other in rows]),
                "weight_B": torch.full((size,), weight),
            }
        if not bool(visible_BT.all()):
            tensors["visible_BT"] = visible_BT
        return Batch(tensors)

    def row(self, split: str, start: float, middle: float, other: float, other_start: float) -> tuple[Ids, int, int]:
        """Returns a row from four numbers in [0, 1): its tokens, the start of its second segment, and 1 if B is from elsewhere."""
        assert self.context is not None
        of_split, pair = self.splits[split], self.task.next_sentence
        length = self.context - (3 if pair else 2)
        first_sentence = int(self.starts[split][int(start * len(self.starts[split]))])
        first, last = of_split.document_of(first_sentence)
        # A run that would be cut short by the end of the document starts earlier.
        latest = int(np.searchsorted(of_split.start_S, of_split.start_S[last] - length, side="right")) - 1
        first_sentence = max(first, min(first_sentence, latest))
        start_S = of_split.start_S
        if not pair:
            a = of_split.token_N[start_S[first_sentence] : start_S[last]][:length]
            return np.concatenate(([self.special.start], a, [self.special.end])), len(a) + 2, 0
        end = of_split.end_within(first_sentence, length, at_least=2)
        boundary = (
            first_sentence + 1 + int(middle * (end - first_sentence - 1))
        )  # A and B have at least one sentence each
        a = of_split.token_N[start_S[first_sentence] : start_S[boundary]]
        b = of_split.token_N[start_S[boundary] : start_S[end]]
        from_elsewhere = other < 0.5
        if from_elsewhere:
            # Not from this document. If there is no other: neither the sentences of this row, nor a run that reaches them.
            before = int(np.searchsorted(start_S, start_S[first_sentence] - length))
            low, high = (first, last) if last - first < len(of_split) else (before, end)
            low, high = (low, high) if high - low < len(of_split) else (first_sentence, first_sentence + 2)
            sentence = int(other_start * (len(of_split) - (high - low)))
            sentence += (high - low) if sentence >= low else 0
            b = of_split.token_N[start_S[sentence] : start_S[of_split.end_within(sentence, len(b))]]
        a = a[-max(length - len(b), length // 2) :]
        b = b[: length - len(a)]
        return (
            np.concatenate(([self.special.start], a, [self.special.end], b, [self.special.end])),
            len(a) + 2,
            int(from_elsewhere),
        )

    def count(self, batch: Batch) -> int:
        return int((batch["target_BT"] != NO_TARGET).sum())

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


class MaskedObjective(Objective):
    """Cross-entropy of the selected tokens, and of whether B follows A."""

    metric = "masked_perplexity"

    def __init__(self, data: MaskedData, head: int, pair_head: int):
        self.data, self.task, self.head, self.pair_head = data, data.task, head, pair_head
        self.includes = "the loss of next sentences" if data.task.next_sentence else ""

    def arguments(self, batch: Batch) -> tuple[Tensor, dict[str, Any]]:
        """Returns the network's input and the options of its call."""
        side_inputs = SideInputs(segments=batch["segment_BT"]) if self.task.next_sentence else None
        return batch["token_BT"], {"visible": batch.tensors.get("visible_BT"), "side_inputs": side_inputs}

    def forward(self, network: Network | PairNetwork, batch: Batch, kernel: str, probe: Probe | None = None) -> Any:
        inputs, options = self.arguments(batch)
        return network(inputs, **options, kernel=kernel, probe=probe)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output = self.forward(network, batch, kernel, self.probe())
        loss = cross_entropy(output.logits_of(self.head), batch["target_BT"])
        if self.task.next_sentence:
            other_B2 = output.logits_of(self.pair_head).float()
            loss = loss + (F.cross_entropy(other_B2, batch["other_B"], reduction="none") * batch["weight_B"]).sum()
        return loss + sum(output.aux.values()) * (batch["target_BT"] != NO_TARGET).sum() if output.aux else loss

    @property
    def targets_per_example(self) -> float:  # type: ignore[override]
        return max(1.0, self.task.share * (self.data.context or 1))

    @torch.no_grad()
    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Evaluate on rows and masks that are the same in every evaluation; without a limit on as many as the text fills."""
        data = self.data
        assert data.context is not None
        check_split(split, data.splits, data.text.name)
        available = max(1, len(data.splits[split].token_N) // data.context)
        rows = available if limit is None else min(available, limit)
        device, estimate, correct, correct_pairs = next(network.parameters()).device, Estimate(progress), 0, 0
        estimate.expect(round(rows * self.targets_per_example))
        for number, start in enumerate(range(0, rows, EVALUATION_ROWS)):
            size = min(EVALUATION_ROWS, rows - start)
            batch = data.random_batch(split, size, step_generator(0, number)).to(device)
            output = self.forward(network, batch, kernel)
            target_BT = batch["target_BT"]
            selected_BT = target_BT != NO_TARGET
            token_NV = output.logits_of(self.head)[selected_BT].float()
            loss_N = F.cross_entropy(token_NV, target_BT[selected_BT], reduction="none")
            correct += int((token_NV.argmax(-1) == target_BT[selected_BT]).sum())
            estimate.add(row_sums(loss_N, selected_BT), selected_BT.sum(1).tolist())
            if self.task.next_sentence:
                correct_pairs += int((output.logits_of(self.pair_head).argmax(-1) == batch["other_B"]).sum())
        count = estimate.scored
        bounds = {name: perplexity(value, 1) for name, value in (("low", estimate.low), ("high", estimate.high))}
        accuracy = {"masked_accuracy": correct / count}
        if self.task.next_sentence:
            accuracy["next_sentence_accuracy"] = correct_pairs / rows
        sizes = {"rows": rows, "targets": count, "targets_in_split": round(count * available / rows)}
        metrics = {"masked_perplexity": perplexity(estimate.total, count)} | bounds | accuracy
        return {**metrics, "split": split, **sizes, "share": self.task.share}


class MaskedInference(TokenInference):
    """Fills the blanks of texts."""

    can_generate = can_predict = True
    example = "--prompt 'To be, or ___ to be, that is the ___.'"

    def __init__(self, objective: MaskedObjective):
        super().__init__(
            objective.data.tokenizer,
            objective.data.context,
            ((objective.data.special.start,), (objective.data.special.end,)),
        )
        self.objective, self.data = objective, objective.data

    def with_masks(self, text: str) -> Ids:
        """Returns the tokens of a text, with its marks, in which each blank (___, [MASK] or <mask>) is one masked token."""
        mask = self.data.special.mask
        name = next(name for name in MASK_NAMES if mask in self.tokenizer.encode(name.encode()))
        tokens = self.tokenizer.encode(BLANK.sub(name, text).encode())
        if mask not in tokens:
            raise ValueError(f"the text {text!r} has no blank to fill; write ___ where one token is missing")
        if self.context is not None and len(tokens) + len(self.marks[0] + self.marks[1]) > self.context:
            raise ValueError(
                f"the text has {len(tokens)} tokens, but the model reads {self.context} with their marks; shorten it"
            )
        return self.marked(tokens)

    @torch.no_grad()
    def fill(self, network: Network | PairNetwork, texts: Sequence[str]) -> list[str]:
        """Returns the texts with the most likely token in each blank."""
        device, rows = next(network.parameters()).device, [self.with_masks(text) for text in texts]

        def filled(some: list[Ids]) -> Tensor:
            token_BT, visible_BT = (x.to(device) for x in pad(some, 1))
            token_BTV = network(token_BT, visible=visible_BT).logits_of(self.objective.head)
            guess_BT = torch.where(token_BT == self.data.special.mask, token_BTV.argmax(-1), token_BT)
            return F.pad(guess_BT, (0, max(map(len, rows)) - guess_BT.shape[1]))

        first, last = map(len, self.marks)
        guesses = zip(rows, in_batches(rows, filled), strict=True)
        return [self.tokenizer.decode(guess_T[first : len(row) - last].tolist()) for row, guess_T in guesses]

    def generate_text(self, network: Network | PairNetwork, prompt: str) -> str:  # type: ignore[override]
        """Returns the prompt with the most likely token in each blank."""
        return self.fill(network, [prompt])[0]

    def predict(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> Predictions:
        """Returns the texts with their blanks filled."""
        return Predictions(np.array(self.fill(network, [str(text) for text in inputs]), dtype=object))

    def read_inputs(self, data: str, column: str | None = None) -> Inputs:
        return read_inputs(data, "text", (column, self.data.task.column, "text"))

    @torch.no_grad()
    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        """Returns a row in which the masked tokens are replaced by the model's predictions, in brackets."""
        batch = self.data.random_batch("valid", 1, step_generator(seed, 0)).to(next(network.parameters()).device)
        token_BTV = self.objective.forward(network, batch, "auto").logits_of(self.objective.head)
        masked_BT = batch["token_BT"] == self.data.special.mask
        guess_BT = torch.where(masked_BT, token_BTV.argmax(-1), batch["token_BT"])
        words = []
        for token, guess, masked in zip(batch["token_BT"][0], guess_BT[0], masked_BT[0], strict=True):
            word = self.data.tokenizer.decode([int(guess)])
            words.append(f"[{word}]" if masked else "" if int(token) in self.data.tokenizer.special else word)
        return " ".join(word for word in words if word).replace(" ##", "")


def mask(
    token_BT: Tensor,
    visible_BT: Tensor,
    share: float,
    vocabulary: int,
    generator: torch.Generator,
    special: SpecialIds = OURS,
) -> tuple[Tensor, Tensor]:
    """Returns the tokens with some of them masked, and the targets: NO_TARGET where a token was not selected.

    In each row that share of its words is selected, at least one; special tokens are never selected.
    """
    word_N = special.word_N if len(special.word_N) else torch.arange(FIRST_WORD, vocabulary)
    word_BT = visible_BT & torch.isin(token_BT, word_N)
    count_B1 = (word_BT.sum(1, keepdim=True) * share).round().long().clamp(min=1)
    key_BT = torch.rand(token_BT.shape, generator=generator).masked_fill(~word_BT, 2.0)
    rank_BT = key_BT.argsort(1).argsort(1)
    selected_BT = (rank_BT < count_B1) & word_BT
    kind_BT = torch.rand(token_BT.shape, generator=generator)
    random_BT = word_N[torch.randint(len(word_N), token_BT.shape, generator=generator)]
    masked_BT = torch.where(kind_BT < MASKED, special.mask, torch.where(kind_BT < MASKED + RANDOM, random_BT, token_BT))
    return torch.where(selected_BT, masked_BT, token_BT), torch.where(selected_BT, token_BT, NO_TARGET)
