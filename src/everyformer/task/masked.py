"""Masked: BERT's pretraining. Paper: Devlin et al. 2018, section 3.1 and appendix A.

A row is [CLS] A [SEP] B [SEP]: A and B are runs of sentences that together fit the context. Half the time B follows A, else
it is from elsewhere (another document, where there is one) and A is kept. 15 % of the positions that are not [CLS] or [SEP]
are selected; of these 80 % become [MASK], 10 % a random token, 10 % stay. The loss is the mean over the selected
positions of -log p(token), plus the mean over the rows of -log p(next or not).
Departures: without next_sentence a row is [CLS] A [SEP], one run (as RoBERTa's doc-sentences). A pair that is too long
loses A's beginning and B's end, so that what is next stays next; BERT cuts either at random. Masks are drawn anew at
each step, as a function of (seed, step); BERT repeats ten sets of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import SideInputs
from everyformer.data import tokenizer as tokenizers
from everyformer.data.encode import Sentences, encode_sentences
from everyformer.data.text import Text, open_text
from everyformer.data.tokenizer import SPECIAL, Ids
from everyformer.infer.evaluate import perplexity
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify
from everyformer.network.output_head import Masked as MaskedHead
from everyformer.task.work import Batch, Task, Work, check_split, check_tokens, draw, pad, sequence, which
from everyformer.value import Share, Size, Value

CONTEXT = 128  # where neither the member nor the recipe says
MULTIPLE = 16
CLS, SEP, MASK = (SPECIAL.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
WORDS = len(SPECIAL)  # tokens from here on are of the text
NOWHERE = -100  # a target that does not count
MASKED, RANDOM = 0.8, 0.1  # of the selected; the others stay
EVALUATED = 32  # rows at a time


class Masked(Task, Value, frozen=True):
    """Predict tokens that are hidden, and whether one passage follows another."""

    vocabulary: Size = 8192  # how many pieces of words are learned
    next_sentence: bool = True  # False: single runs of sentences, and the masked tokens only
    share: Share = 0.15  # of the positions that are selected
    documents: Literal["files", "blank"] = (
        "files"  # what ends a document: the end of a file or record, or a blank line too
    )
    column: str | None = None  # of records; None: text
    valid: Share = 0.1  # the share of the text kept for validation, where it has no split of its own

    def open(self, data: str | None, context: int | None, folder: Path | None = None) -> Work:
        return MaskedWork(self, open_text(data, (1 - self.valid, self.valid), self.column), context, folder)


class MaskedWork(Work):
    metric = "masked_perplexity"

    def __init__(self, task: Masked, text: Text, context: int | None, folder: Path | None):
        self.task, self.text, self.context = task, text, context
        self.fingerprint = text.fingerprint
        self.tokenizer = tokenizers.load_or_train(
            "wordpiece", lambda: text.chunks("train"), task.vocabulary, text.fingerprint, folder
        )
        if [self.tokenizer.special_id(name) for name in SPECIAL] != list(range(len(SPECIAL))):
            raise ValueError(
                f"the tokenizer in {folder} does not begin with {' '.join(SPECIAL)}; begin from a run of masked"
            )
        blank = task.documents == "blank"
        self.splits = {split: encode_sentences(text, split, self.tokenizer, blank) for split in text.splits}
        self.starts = {split: self._starts(found, split) for split, found in self.splits.items()}
        self.heads = (0, 1)

    def _starts(self, found: Sentences, split: str) -> Ids:
        """The sentences with which a row may begin: in a pair, those that another one follows in their document."""
        start_N = np.arange(len(found))
        if self.task.next_sentence:
            start_N = np.setdiff1d(start_N, found.first_D[1:] - 1)
        least = 4 if self.task.next_sentence else 1
        if len(start_N) == 0 or len(found) < least:
            raise ValueError(
                f"{self.text.name} has {len(found)} sentences for {split}, {len(start_N)} of them followed by another in their "
                f"document; give at least {least}, one a line, or set task.next_sentence=false"
            )
        return start_N

    def changes(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary}

    def adapt(self, value: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = sequence(value, "masked")
        own = [head for head in one.outputs if isinstance(head, MaskedHead)][:1] or [MaskedHead()]
        pair = [head for head in one.outputs if isinstance(head, Classify)][:1] or [Classify(2, "first", pooler=True)]
        return replace(one, outputs=(*own, *(pair if self.task.next_sentence else [])), auxiliary=None)

    def fit(self, value: Model | EncoderDecoder) -> None:
        value = sequence(value, "masked")
        self.context = self.context or value.limit() or CONTEXT
        if self.context < 8:
            raise ValueError(
                f"a context of {self.context} has no room for two passages and their marks; give at least 8"
            )
        check_tokens(value, self.tokenizer.vocabulary, self.text.name)
        head = which(value, MaskedHead, "masked")
        pair = which(value, Classify, "masked with task.next_sentence") if self.task.next_sentence else head
        if self.task.next_sentence and not value.segments:
            raise ValueError("two passages need segments, the model has none; choose bert, or task.next_sentence=false")
        self.heads = (head, pair)

    def examples(self) -> int:
        return len(self.starts["train"])

    def batch(self, step: int, size: int, seed: int) -> Batch:
        return self._draw("train", size, draw(seed, step))

    def _draw(self, split: str, size: int, random: torch.Generator) -> Batch:
        """Rows of a split with their masks."""
        chance_BN = torch.rand(size, 4, generator=random, dtype=torch.float64).tolist()
        drawn = [self._row(split, *chance) for chance in chance_BN]
        token_BT, visible_BT = pad([row for row, _, _ in drawn], MULTIPLE)
        length = torch.arange(token_BT.shape[1])[None]
        tensors = {"segment_BT": (length >= torch.tensor([at for _, at, _ in drawn])[:, None]).long()}
        tensors["segment_BT"] *= visible_BT
        input_BT, target_BT = mask(token_BT, visible_BT, self.task.share, self.tokenizer.vocabulary, random)
        tensors |= {"token_BT": input_BT, "target_BT": target_BT}
        if self.task.next_sentence:
            # The loss is a sum that is divided by the number of selected tokens; so weighted, rows give their mean.
            weight = float((target_BT != NOWHERE).sum()) / size
            tensors |= {
                "other_B": torch.tensor([other for _, _, other in drawn]),
                "weight_B": torch.full((size,), weight),
            }
        if not bool(visible_BT.all()):
            tensors["visible_BT"] = visible_BT
        return Batch(tensors)

    def _row(self, split: str, start: float, end: float, other: float, place: float) -> tuple[Ids, int, int]:
        """A row from four numbers of [0, 1): its tokens, where its second segment begins, and 1 if B is from elsewhere."""
        assert self.context is not None
        found, pair = self.splits[split], self.task.next_sentence
        room = self.context - (3 if pair else 2)
        one = int(self.starts[split][int(start * len(self.starts[split]))])
        first, last = found.document_of(one)
        # A run that the document's end would cut short begins earlier.
        latest = int(np.searchsorted(found.start_S, found.start_S[last] - room, side="right")) - 1
        one = max(first, min(one, latest))
        begin = found.start_S
        if not pair:
            a = found.token_N[begin[one] : begin[last]][:room]
            return np.concatenate(([CLS], a, [SEP])), len(a) + 2, 0
        full = found.end_within(one, room, at_least=2)
        middle = one + 1 + int(end * (full - one - 1))  # where A ends: it and B have a sentence at least
        a, b = found.token_N[begin[one] : begin[middle]], found.token_N[begin[middle] : begin[full]]
        elsewhere = other < 0.5
        if elsewhere:
            # Not from this document. Where there is no other: not what is read here, and nothing that runs into it.
            before = int(np.searchsorted(begin, begin[one] - room))
            low, high = (first, last) if last - first < len(found) else (before, full)
            low, high = (low, high) if high - low < len(found) else (one, one + 2)
            there = int(place * (len(found) - (high - low)))
            there += (high - low) if there >= low else 0
            b = found.token_N[begin[there] : begin[found.end_within(there, len(b))]]
        a = a[-max(room - len(b), room // 2) :]
        b = b[: room - len(a)]
        return np.concatenate(([CLS], a, [SEP], b, [SEP])), len(a) + 2, int(elsewhere)

    def count(self, batch: Batch) -> int:
        return int((batch["target_BT"] != NOWHERE).sum())

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output = self._call(network, batch, kernel)
        token_BTV = output.logits_of(self.heads[0])
        loss = F.cross_entropy(
            token_BTV.flatten(0, 1).float(), batch["target_BT"].flatten(), reduction="sum", ignore_index=NOWHERE
        )
        if self.task.next_sentence:
            other_B2 = output.logits_of(self.heads[1]).float()
            loss = loss + (F.cross_entropy(other_B2, batch["other_B"], reduction="none") * batch["weight_B"]).sum()
        return loss + sum(output.aux.values()) * self.count(batch) if output.aux else loss

    def _call(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Any:
        side_inputs = SideInputs(segments=batch["segment_BT"]) if self.task.next_sentence else None
        return network(
            batch["token_BT"], visible=batch.tensors.get("visible_BT"), side_inputs=side_inputs, kernel=kernel
        )

    @torch.no_grad()
    def evaluate(self, network: Network | PairNetwork, split: str, limit: int | None, kernel: str) -> dict[str, Any]:
        """On rows and masks of the split that are always the same; without a limit, as many as its text fills."""
        assert self.context is not None
        check_split(split, self.splits, self.text.name)
        rows = max(1, len(self.splits[split].token_N) // self.context)
        rows = rows if limit is None else min(rows, limit)
        device = next(network.parameters()).device
        total, right, count, told = 0.0, 0, 0, 0
        for number, start in enumerate(range(0, rows, EVALUATED)):
            batch = self._draw(split, min(EVALUATED, rows - start), draw(0, number)).to(device)
            output = self._call(network, batch, kernel)
            target_BT = batch["target_BT"]
            chosen_BT = target_BT != NOWHERE
            token_NV = output.logits_of(self.heads[0])[chosen_BT].float()
            total += float(F.cross_entropy(token_NV, target_BT[chosen_BT], reduction="sum"))
            right += int((token_NV.argmax(-1) == target_BT[chosen_BT]).sum())
            count += int(chosen_BT.sum())
            if self.task.next_sentence:
                told += int((output.logits_of(self.heads[1]).argmax(-1) == batch["other_B"]).sum())
        found = {"masked_perplexity": perplexity(total, count), "masked_accuracy": right / count}
        if self.task.next_sentence:
            found["next_sentence_accuracy"] = told / rows
        return {**found, "split": split, "rows": rows, "targets": count, "share": self.task.share}

    @torch.no_grad()
    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        """A row with its masks, and what the model puts there."""
        batch = self._draw("valid", 1, draw(seed, 0)).to(next(network.parameters()).device)
        token_BTV = self._call(network, batch, "auto").logits_of(self.heads[0])
        masked_BT = batch["token_BT"] == MASK
        guess_BT = torch.where(masked_BT, token_BTV.argmax(-1), batch["token_BT"])
        shown = []
        for token, guess, hidden in zip(batch["token_BT"][0], guess_BT[0], masked_BT[0], strict=True):
            word = self.tokenizer.decode([int(guess)])
            shown.append(f"[{word}]" if hidden else word if int(token) >= WORDS else "")
        return " ".join(word for word in shown if word).replace(" ##", "")

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


def mask(
    token_BT: Tensor, visible_BT: Tensor, share: float, vocabulary: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The tokens with some of them hidden, and the targets: NOWHERE but where a token was selected.

    Of each row that share of its words is selected, and one at least; special tokens never are.
    """
    word_BT = visible_BT & (token_BT >= WORDS)
    count_B1 = (word_BT.sum(1, keepdim=True) * share).round().long().clamp(min=1)
    chance_BT = torch.rand(token_BT.shape, generator=random).masked_fill(~word_BT, 2.0)
    rank_BT = chance_BT.argsort(1).argsort(1)
    selected_BT = (rank_BT < count_B1) & word_BT
    fate_BT = torch.rand(token_BT.shape, generator=random)
    other_BT = torch.randint(WORDS, vocabulary, token_BT.shape, generator=random)
    hidden_BT = torch.where(fate_BT < MASKED, MASK, torch.where(fate_BT < MASKED + RANDOM, other_BT, token_BT))
    return torch.where(selected_BT, hidden_BT, token_BT), torch.where(selected_BT, token_BT, NOWHERE)
