"""Translate: one sentence into another. Paper: Vaswani et al. 2017.

Teacher forcing: the decoder is given [CLS] y_1 ... y_n, the target so far, and tells y_1 ... y_n [SEP]. Loss of one token with
label smoothing e over V tokens (section 5.4): (1 - e) (-log p(y)) + e / V sum_v -log p(v). Batches are of sentences of
about the same length. Sets with one right answer (copy, reverse, addition: Dehghani et al. 2019) are read by characters; their
evaluation tells how many characters are right, the target so far being given as in the published code, and how many whole
sequences, which is then the same as if the model had written them. With `shift` positions begin anywhere below it in training
(the paper's random offsets), at one place for source and target, so that no position of a longer test is new.
Symbols: [CLS] is the start, [SEP] the end; a source ends in [SEP] too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Probe
from everyformer.data import tokenizer as tokenizers
from everyformer.data.pairs import Pairs, open_pairs
from everyformer.data.synthetic import ALGORITHMS
from everyformer.data.tokenizer import SPECIAL, Ids
from everyformer.infer.beam import beam_search
from everyformer.infer.evaluate import perplexity
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language
from everyformer.network.repeat import Halt
from everyformer.task.work import Batch, Task, Work, check_split, check_tokens, draw, pad, shuffled, which
from everyformer.value import Count, Share, Size, Value

MULTIPLE = 8
POOL = 50  # batches among which sentences of like length are found
EVALUATED = 64  # pairs at a time
START, END = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")


class Translate(Task, Value, frozen=True):
    """Tell the translation of a sentence. One vocabulary for both languages."""

    source: str = "en"  # the ending of the files, or the column of the records
    target: str = "de"
    tokenizer: Literal["bpe", "characters"] = "bpe"
    vocabulary: Size = 8192  # of byte pairs, at most
    longest: Size = 128  # tokens of a sentence: longer pairs are left out in training, longer sources cut in evaluation
    smoothing: Share = 0.1
    shift: Count = 0  # in training positions begin anywhere below this; 0: at 0
    beam: Size = 5
    penalty: float = 0.6  # of length, in the beam search
    valid: Share = 0.1  # the share of the training pairs kept for validation, where there is no split for it

    def open(self, data: str | None, context: int | None, folder: Path | None = None) -> Work:
        return TranslateWork(self, open_pairs(data, self.source, self.target, self.valid), context, folder)

    def reopen(self, data: str | None, context: int | None, folder: Path) -> Work:
        exact = data in ALGORITHMS and not Path(data).exists()
        return TranslateWork(self, Pairs(str(data), {}, "", exact), context, folder)


class TranslateWork(Work):
    metric = "perplexity"
    writes = True

    def __init__(self, task: Translate, pairs: Pairs, context: int | None, folder: Path | None):
        self.task, self.pairs, self.longest = task, pairs, min(task.longest, context or task.longest)
        self.fingerprint = pairs.fingerprint
        kind: Literal["bpe", "characters"] = "characters" if pairs.exact else task.tokenizer
        self.tokenizer = tokenizers.load_or_train(
            kind, lambda: chain(*pairs.splits["train"]), task.vocabulary, self.fingerprint, folder, names=SPECIAL
        )
        if [self.tokenizer.special_id(name) for name in SPECIAL] != list(range(len(SPECIAL))):
            raise ValueError(
                f"the tokenizer in {folder} does not begin with {' '.join(SPECIAL)}; begin from a run of translate"
            )
        if pairs.exact and pairs.splits:
            self.hint = f"--prompt '{min(pairs.splits['valid'][0], key=len)}'"
        self.encoded: dict[str, tuple[list[Ids], list[Ids]]] = {}  # by split, when it is first needed
        self.head = 0
        self.order = lru_cache(maxsize=2)(self._order)

    def sides(self, split: str) -> tuple[list[Ids], list[Ids]]:
        """Sources, each with its end, and targets."""
        if split not in self.encoded:
            sources, targets = (self.tokenizer.encode_all(side) for side in self.pairs.splits[split])
            if split == "train":
                fits = [max(len(x), len(y)) < self.longest for x, y in zip(sources, targets, strict=True)]
                sources, targets = (
                    [one for one, fit in zip(side, fits, strict=True) if fit] for side in (sources, targets)
                )
                if len(sources) < 2:
                    raise ValueError(
                        f"{len(sources)} of the {len(fits)} pairs of {self.pairs.name} have fewer than {self.longest} tokens; raise "
                        "task.longest"
                    )
            self.encoded[split] = [self._ended(x) for x in sources], targets
        return self.encoded[split]

    def _ended(self, source: Ids) -> Ids:
        return np.append(source if self.pairs.exact else source[: self.longest - 1], END)

    def changes(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary}

    def fit(self, value: Model | EncoderDecoder) -> None:
        if not isinstance(value, EncoderDecoder):
            raise ValueError("translate needs an encoder and a decoder; choose the member transformer")
        for side in (value.encoder, value.decoder):
            limit = side.limit()
            if limit is not None and self.task.shift:
                raise ValueError(f"task.shift moves positions, but the model has a table of {limit}; leave it out")
            self.longest = min(self.longest, limit or self.longest)
            check_tokens(side, self.tokenizer.vocabulary, self.pairs.name)
        self.head = which(value.decoder, Language, "translate")
        self.encoded.clear()

    def examples(self) -> int:
        return len(self.sides("train")[0])

    def _order(self, epoch: int, size: int, seed: int) -> Tensor:
        """N, size: the batches of an epoch, each of sentences of about one length, in an order of its own."""
        length_N = np.array([max(len(x), len(y) + 1) for x, y in zip(*self.sides("train"), strict=True)])
        order_N = shuffled(len(length_N), epoch, seed).numpy()
        order_N = order_N[: len(order_N) // size * size]  # what is left over is another's in the next epoch
        pool_N = np.arange(len(order_N)) // (size * POOL)
        batch_NB = torch.from_numpy(order_N[np.lexsort((length_N[order_N], pool_N))]).view(-1, size)
        return batch_NB[torch.randperm(len(batch_NB), generator=draw(seed, epoch))]

    def batch(self, step: int, size: int, seed: int) -> Batch:
        epoch, place = divmod(step, self.examples() // size)
        found = self._pairs("train", self.order(epoch, size, seed)[place].tolist())
        if not self.task.shift:
            return found
        return Batch({**found.tensors, "begin_B": torch.randint(self.task.shift, (size,), generator=draw(seed, step))})

    def _pairs(self, split: str, rows: Sequence[int]) -> Batch:
        sources, targets = self.sides(split)
        source_BS, source_visible_BS = pad([sources[row] for row in rows], MULTIPLE)
        given_BT, visible_BT = pad([np.insert(targets[row], 0, START) for row in rows], MULTIPLE)
        target_BT, _ = pad([np.append(targets[row], END) for row in rows], MULTIPLE)
        return Batch(
            {
                "source_BS": source_BS,
                "source_visible_BS": source_visible_BS,
                "given_BT": given_BT,
                "target_BT": target_BT,
                "visible_BT": visible_BT,
            }
        )

    def count(self, batch: Batch) -> int:
        return int(batch["visible_BT"].sum())

    def _answer(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor, Tensor]:
        """The output, and what it tells of the target's tokens, beside them."""
        output = network(
            batch["source_BS"],
            batch["given_BT"],
            source_visible=batch["source_visible_BS"],
            visible=batch["visible_BT"],
            position_offset=batch.tensors.get("begin_B"),
            kernel=kernel,
        )
        visible_BT = batch["visible_BT"]
        return output, output.logits_of(self.head)[visible_BT].float(), batch["target_BT"][visible_BT]

    def _smooth(self, answer_NV: Tensor, target_N: Tensor) -> Tensor:
        return F.cross_entropy(answer_NV, target_N, reduction="sum", label_smoothing=self.task.smoothing)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output, answer_NV, target_N = self._answer(network, batch, kernel)
        smooth = self._smooth(answer_NV, target_N)
        return smooth + sum(output.aux.values()) * self.count(batch) if output.aux else smooth

    @torch.no_grad()
    def evaluate(self, network: Network | PairNetwork, split: str, limit: int | None, kernel: str) -> dict[str, Any]:
        """Perplexity of the tokens; on a whole split BLEU too, of translations by beam search."""
        assert isinstance(network, PairNetwork)
        if self.pairs.exact and split == "test":
            return self._by_length(network, limit, kernel)
        split = self._split(split)
        sources, targets = self.sides(split)
        order = sorted(range(len(sources)), key=lambda row: (len(sources[row]), len(targets[row])))
        rows = (
            order if limit is None or limit >= len(order) else sorted(range(limit), key=lambda row: len(sources[row]))
        )
        device = next(network.parameters()).device
        smooth = plain = count = wrong = missed = 0.0
        for start in range(0, len(rows), EVALUATED):
            batch = self._pairs(split, rows[start : start + EVALUATED]).to(device)
            output, answer_NV, target_N = self._answer(network, batch, kernel)
            told_BT = output.logits_of(self.head).argmax(-1)
            wrong_BT = (told_BT != batch["target_BT"]) & batch["visible_BT"]
            wrong, missed = wrong + int(wrong_BT.sum()), missed + int(wrong_BT.any(1).sum())
            smooth, count = smooth + float(self._smooth(answer_NV, target_N)), count + self.count(batch)
            plain += float(F.cross_entropy(answer_NV, target_N, reduction="sum"))
        found: dict[str, Any] = {
            "perplexity": perplexity(plain, count),
            "loss": plain / count,
            "smoothed_loss": smooth / count,
            "split": split,
            "pairs": len(rows),
            "targets": int(count),
            **self._steps(network, self._pairs(split, rows[:EVALUATED]).to(device)),
        }
        if self.pairs.exact:
            right = {"character_accuracy": 1 - wrong / count, "sequence_accuracy": 1 - missed / len(rows)}
            return right | found
        return found | (self.bleu(network, split) if rows is order else {})

    def _steps(self, network: PairNetwork, batch: Batch) -> dict[str, float]:
        """How many steps a token takes on each side, where that is not fixed."""
        sides = {"encoder": network.encoder, "decoder": network.decoder}
        halting = [name for name, side in sides.items() if isinstance(side.value.body, Halt)]
        if not halting:
            return {}
        probe, seen = Probe(), {"encoder": batch["source_visible_BS"], "decoder": batch["visible_BT"]}
        network(
            batch["source_BS"],
            batch["given_BT"],
            source_visible=seen["encoder"],
            visible=seen["decoder"],
            probe=probe,
        )
        return {
            f"{name}_steps": float((share_BTN > 0).sum(-1)[seen[name]].float().mean())
            for name, share_BTN in zip(halting, probe.halts, strict=True)
        }

    def _by_length(self, network: PairNetwork, limit: int | None, kernel: str) -> dict[str, Any]:
        """What is right of each of the tests, which are named by their lengths."""
        found: dict[str, Any] = {}
        for split in (one for one in self.pairs.splits if one.startswith("test")):
            told = self.evaluate(network, split, limit, kernel)
            for name in ("character_accuracy", "sequence_accuracy", "encoder_steps", "decoder_steps"):
                if name in told:
                    found[f"{name}_{split.removeprefix('test')}"] = told[name]
        return found | {"split": "test", "pairs": told["pairs"]}

    def _split(self, split: str) -> str:
        """A split by its name; "test" is the first of several test sets."""
        tests = sorted(one for one in self.pairs.splits if one.startswith("test"))
        split = tests[0] if split == "test" and tests else split
        check_split(split, self.pairs.splits, self.pairs.name)
        return split

    def bleu(self, network: PairNetwork, split: str) -> dict[str, Any]:
        """BLEU of the translations of a split, with sacrebleu's signature."""
        try:
            from sacrebleu.metrics.bleu import BLEU
        except ImportError:
            return {"bleu_missing": "BLEU needs sacrebleu; install it with pip install 'everyformer[translate]'"}
        sources, targets = self.pairs.splits[self._split(split)]
        metric = BLEU()
        score = metric.corpus_score(self.translate(network, sources), [targets])
        return {
            "bleu": score.score,
            "bleu_signature": str(metric.get_signature()),
            "beam": self.task.beam,
            "penalty": self.task.penalty,
        }

    def translate(self, network: PairNetwork, texts: Sequence[str], beam: int | None = None) -> list[str]:
        """Translations of some sentences."""
        sources = [self._ended(ids) for ids in self.tokenizer.encode_all(texts)]
        order = sorted(range(len(sources)), key=lambda row: len(sources[row]))  # like lengths together
        found, device = [""] * len(sources), next(network.parameters()).device
        for start in range(0, len(order), EVALUATED):
            rows = order[start : start + EVALUATED]
            source_BS, visible_BS = pad([sources[row] for row in rows], MULTIPLE)
            answers = beam_search(
                network,
                source_BS.to(device),
                visible=visible_BS.to(device),
                start=START,
                end=END,
                longest=source_BS.shape[1] + 1 if self.pairs.exact else self.longest,
                beam=beam or self.task.beam,
                penalty=self.task.penalty,
            )
            for row, ids in zip(rows, answers, strict=True):
                found[row] = self.tokenizer.decode([one for one in ids if one >= len(SPECIAL)]).strip()
        return found

    def write(self, network: Network | PairNetwork, prompt: str, *, beam: int | None = None) -> str:  # type: ignore[override]
        """The translation of a sentence."""
        assert isinstance(network, PairNetwork)
        if not prompt.strip():
            raise ValueError(f"there is nothing to translate in {prompt!r}; give a sentence with --prompt")
        return self.translate(network, [prompt], beam)[0]

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        assert isinstance(network, PairNetwork)
        sources, targets = self.pairs.splits["valid"]
        row = seed % len(sources)
        found = self.translate(network, [sources[row]], beam=1)[0]
        return f"{sources[row]}\n-> {found}\n   (reference: {targets[row]})"

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)
