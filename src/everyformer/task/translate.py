"""Translation of one sentence into another. Paper: Vaswani et al. 2017.

Teacher forcing: the decoder reads [CLS] y_1 ... y_n and predicts y_1 ... y_n [SEP]. The loss of one token with label
smoothing e over V tokens (section 5.4) is (1 - e) (-log p(y)) + e / V sum_v -log p(v). Batches have sentences of similar
length.
Symbols: [CLS] is the start token, [SEP] the end token; a source ends in [SEP] too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Probe
from everyformer.data import tokenizer as tokenizers
from everyformer.data.files import digest
from everyformer.data.inputs import Inputs, read_inputs
from everyformer.data.pairs import Pairs, open_pairs
from everyformer.data.tokenizer import SPECIAL, Ids
from everyformer.infer.beam import beam_search
from everyformer.infer.estimate import Estimate, Progress, row_sums
from everyformer.infer.evaluate import mean_steps, perplexity
from everyformer.infer.predict import Predictions
from everyformer.network.linear_cross_entropy import NO_TARGET, cross_entropy
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Language
from everyformer.network.repeat import Halt
from everyformer.task.batch import Batch, epoch_order, pad, step_generator
from everyformer.task.check import check_split, check_tokens, context_of, context_setting, head_index
from everyformer.task.probe_input import ProbeInput, check_index, token_labels
from everyformer.task.task import FittedTask, Inference, Objective, Task, TaskData
from everyformer.value import Share, Size, Value

CONTEXT = 128  # default, unless the model has fewer positions
MULTIPLE = 8
POOL = 50  # batches within which sentences are sorted by length
EVALUATION_PAIRS = 64  # in one call
START, END = SPECIAL.index("[CLS]"), SPECIAL.index("[SEP]")


class Translate(Task, Value, frozen=True):
    """Translate a sentence. Both languages share one vocabulary."""

    source: str = "en"  # source language: suffix of the files, or column of the records
    target: str = "de"  # target language, likewise
    tokenizer: Literal["bpe", "characters"] = "bpe"  # one tokenizer for both languages
    vocabulary: Size = 8192  # largest number of tokens that a bpe tokenizer learns
    context: Size | None = None  # tokens of a sentence: longer pairs are left out, longer sources truncated; None: 128
    smoothing: Share = 0.1  # label smoothing
    beam: Size = 5  # beam width in evaluation and generation
    length_penalty: float = 0.6  # alpha of the beam search: higher prefers longer translations
    valid: Share = 0.1  # share of the training pairs held out for validation, if the data have no such split

    def open(self, data: str | None, folder: Path | None = None) -> TranslateData:
        return TranslateData(self, open_pairs(data, self.source, self.target, self.valid), folder)

    def open_for_inference(self, data: str | None, folder: Path) -> TranslateData:
        return TranslateData(self, Pairs(str(data), {}, ""), folder)


class TranslateData(TaskData):
    """Pairs of sentences, in batches of similar length."""

    context: int
    pads = True

    def __init__(self, task: Translate, pairs: Pairs, folder: Path | None):
        self.task, self.pairs, self.context = task, pairs, task.context or CONTEXT
        self.fingerprint, self.notes = pairs.fingerprint, pairs.notes
        self.tokenizer = tokenizers.load_or_train(
            task.tokenizer,
            lambda: chain(*pairs.splits["train"]),
            task.vocabulary,
            self.fingerprint,
            folder,
            names=SPECIAL,
        )
        if [self.tokenizer.special_id(name) for name in SPECIAL] != list(range(len(SPECIAL))):
            raise ValueError(
                f"the first tokens of the tokenizer in {folder} are not {' '.join(SPECIAL)}; give a run of the task translate"
            )
        self.encoded: dict[str, tuple[list[Ids], list[Ids]]] = {}  # by split, encoded on first use
        self.epoch_batches = lru_cache(maxsize=2)(self._epoch_batches)

    def sides(self, split: str) -> tuple[list[Ids], list[Ids]]:
        """Returns the sources, each with its end token, and the targets."""
        if split not in self.encoded:
            sources, targets = (self.tokenizer.encode_all(side) for side in self.pairs.splits[split])
            if split == "train":
                fits = [max(len(x), len(y)) < self.context for x, y in zip(sources, targets, strict=True)]
                sources, targets = (
                    [ids for ids, fit in zip(side, fits, strict=True) if fit] for side in (sources, targets)
                )
                if len(sources) < 2:
                    raise ValueError(
                        f"{len(sources)} of the {len(fits)} pairs of {self.pairs.name} have fewer than {self.context} tokens; "
                        "raise task.context"
                    )
            self.encoded[split] = [self.add_end(x) for x in sources], targets
        return self.encoded[split]

    def add_end(self, source: Ids) -> Ids:
        return np.append(source[: self.context - 1], END)

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        return {split: digest(*chain(*sides)) for split, sides in self.pairs.splits.items()}

    def member_settings(self) -> dict[str, Any]:
        return {"vocabulary": self.tokenizer.vocabulary} | context_setting(self.task.context)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        if not isinstance(model, EncoderDecoder):
            raise ValueError("translate needs an encoder and a decoder; choose the member transformer")
        for side in (model.encoder, model.decoder):
            self.context = min(self.context, context_of(self.task.context, side, CONTEXT))
            check_tokens(side, self.tokenizer.vocabulary, self.pairs.name)
        head = head_index(model.decoder, Language, "translate")
        self.encoded.clear()
        inference = TranslateInference(self)
        return FittedTask(self, TranslateObjective(self, head, inference), inference)

    def examples(self) -> int:
        return len(self.sides("train")[0])

    def _epoch_batches(self, epoch: int, size: int, seed: int) -> Tensor:
        """The batches of an epoch (N, size), each of sentences of similar length, in random order."""
        length_N = np.array([max(len(x), len(y) + 1) for x, y in zip(*self.sides("train"), strict=True)])
        order_N = epoch_order(len(length_N), epoch, seed).numpy()
        order_N = order_N[
            : len(order_N) // size * size
        ]  # an incomplete batch is dropped; the next epoch drops other pairs
        pool_N = np.arange(len(order_N)) // (size * POOL)
        batch_NB = torch.from_numpy(order_N[np.lexsort((length_N[order_N], pool_N))]).view(-1, size)
        return batch_NB[torch.randperm(len(batch_NB), generator=step_generator(seed, epoch))]

    def batch(self, step: int, size: int, seed: int) -> Batch:
        epoch, index = divmod(step, self.examples() // size)
        return self.batch_of("train", self.epoch_batches(epoch, size, seed)[index].tolist())

    def batch_of(self, split: str, rows: Sequence[int]) -> Batch:
        sources, targets = ([side[row] for row in rows] for side in self.sides(split))
        return self.batch_of_pairs(sources, targets)

    def batch_of_pairs(self, sources: Sequence[Ids], targets: Sequence[Ids]) -> Batch:
        source_BS, source_visible_BS = pad(sources, MULTIPLE)
        input_BT, visible_BT = pad([np.insert(target, 0, START) for target in targets], MULTIPLE)
        target_BT, _ = pad([np.append(target, END) for target in targets], MULTIPLE)
        return Batch(
            {
                "source_BS": source_BS,
                "source_visible_BS": source_visible_BS,
                "input_BT": input_BT,
                "target_BT": target_BT,
                "visible_BT": visible_BT,
            }
        )

    def count(self, batch: Batch) -> int:
        return int(batch["visible_BT"].sum())

    def find_split(self, split: str) -> str:
        """Returns the name of a split; "test" is the first of several test sets."""
        tests = sorted(name for name in self.pairs.splits if name.startswith("test"))
        split = tests[0] if split == "test" and tests else split
        check_split(split, self.pairs.splits, self.pairs.name)
        return split

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


class TranslateObjective(Objective):
    """Cross-entropy with label smoothing; perplexity and BLEU."""

    metric = "perplexity"

    def __init__(self, data: TranslateData, head: int, inference: TranslateInference):
        self.data, self.task, self.head, self.inference = data, data.task, head, inference

    def forward(
        self, network: Any, batch: Batch, kernel: str, probe: Probe | None = None
    ) -> tuple[Any, Tensor, Tensor]:
        """Returns the network's output, its logits of the target's tokens without padding, and these tokens."""
        inputs, options = pair_arguments(batch)
        output = network(*inputs, **options, kernel=kernel, probe=probe)
        visible_BT = batch["visible_BT"]
        return output, output.logits_of(self.head)[visible_BT].float(), batch["target_BT"][visible_BT]

    def smoothed_loss(self, logits_NV: Tensor, target_N: Tensor) -> Tensor:
        return F.cross_entropy(logits_NV, target_N, reduction="sum", label_smoothing=self.task.smoothing)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        inputs, options = pair_arguments(batch)
        output: Any = network(*inputs, **options, kernel=kernel, probe=self.probe())
        target_BT = batch["target_BT"].masked_fill(~batch["visible_BT"], NO_TARGET)
        loss = cross_entropy(output.logits_of(self.head), target_BT, self.task.smoothing)
        return loss + sum(output.aux.values()) * batch["visible_BT"].sum() if output.aux else loss

    @property
    def targets_per_example(self) -> float:  # type: ignore[override]
        targets = self.data.sides("valid")[1]
        return sum(len(target) + 1 for target in targets) / len(targets)

    @torch.no_grad()
    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Perplexity of the tokens; on a whole split also BLEU of translations by beam search."""
        data = self.data
        assert isinstance(network, PairNetwork)
        split = data.find_split(split)
        sources, targets = data.sides(split)
        available = len(sources)
        count = available if limit is None else min(limit, available)
        chosen = [row * available // count for row in range(count)]  # spread over the split
        rows = sorted(chosen, key=lambda row: (len(sources[row]), len(targets[row])))
        device, estimate = next(network.parameters()).device, Estimate(progress)
        estimate.expect(sum(len(targets[row]) + 1 for row in rows))
        smoothed = 0.0
        for start in range(0, len(rows), EVALUATION_PAIRS):
            batch = data.batch_of(split, rows[start : start + EVALUATION_PAIRS]).to(device)
            _, logits_NV, target_N = self.forward(network, batch, kernel)
            visible_BT = batch["visible_BT"]
            smoothed += float(self.smoothed_loss(logits_NV, target_N))
            loss_N = F.cross_entropy(logits_NV, target_N, reduction="none")
            estimate.add(row_sums(loss_N, visible_BT), visible_BT.sum(1).tolist())
        metrics: dict[str, Any] = {
            "perplexity": perplexity(estimate.total, estimate.scored),
            "low": perplexity(estimate.low, 1),
            "high": perplexity(estimate.high, 1),
            "loss": estimate.mean,
            "smoothed_loss": smoothed / estimate.scored,
            "split": split,
            "pairs": count,
            "targets": estimate.scored,
            "targets_in_split": sum(len(target) + 1 for target in targets),
            **halting_steps(network, *pair_arguments(data.batch_of(split, rows[:EVALUATION_PAIRS]).to(device))),
        }
        return metrics | (self.bleu(network, split) if count == available else {})

    def bleu(self, network: PairNetwork, split: str) -> dict[str, Any]:
        """Returns the BLEU of the translations of a split, with sacrebleu's signature."""
        try:
            from sacrebleu.metrics.bleu import BLEU
        except ImportError:
            return {"bleu_missing": "BLEU needs sacrebleu; install it with pip install 'everyformer[translate]'"}
        sources, targets = self.data.pairs.splits[self.data.find_split(split)]
        metric = BLEU()
        score = metric.corpus_score(self.inference.translate(network, sources), [targets])
        return {
            "bleu": score.score,
            "bleu_signature": str(metric.get_signature()),
            "beam": self.task.beam,
            "length_penalty": self.task.length_penalty,
        }


def pair_arguments(batch: Batch) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """Returns the network's inputs and the options of its call."""
    visible = {"source_visible": batch["source_visible_BS"], "visible": batch["visible_BT"]}
    return (batch["source_BS"], batch["input_BT"]), visible


def halting_steps(network: PairNetwork, inputs: Sequence[Tensor], options: dict[str, Any]) -> dict[str, float]:
    """Returns the mean steps per token of each side with adaptive computation time, in one call."""
    sides = {"encoder": network.encoder, "decoder": network.decoder}
    halting = [name for name, side in sides.items() if isinstance(side.value.body, Halt)]
    if not halting:
        return {}
    probe, visible = Probe(), {"encoder": options["source_visible"], "decoder": options["visible"]}
    network(*inputs, **options, probe=probe)
    return {
        f"{name}_steps": mean_steps([weight_BTN], visible[name])
        for name, weight_BTN in zip(halting, probe.halts, strict=True)
    }


class TranslateInference(Inference):
    can_generate = can_predict = True

    def __init__(self, data: TranslateData):
        self.data, self.task, self.tokenizer = data, data.task, data.tokenizer

    def translate(self, network: PairNetwork, texts: Sequence[str], beam: int | None = None) -> list[str]:
        """Returns the translations of some sentences, by beam search."""
        sources = [self.data.add_end(ids) for ids in self.tokenizer.encode_all(texts)]
        order = sorted(range(len(sources)), key=lambda row: len(sources[row]))  # similar lengths together
        translations, device = [""] * len(sources), next(network.parameters()).device
        for start in range(0, len(order), EVALUATION_PAIRS):
            rows = order[start : start + EVALUATION_PAIRS]
            source_BS, visible_BS = pad([sources[row] for row in rows], MULTIPLE)
            outputs = beam_search(
                network,
                source_BS.to(device),
                visible=visible_BS.to(device),
                start=START,
                end=END,
                max_tokens=self.data.context,
                beam=beam or self.task.beam,
                length_penalty=self.task.length_penalty,
            )
            for row, ids in zip(rows, outputs, strict=True):
                translations[row] = self.tokenizer.decode([token for token in ids if token >= len(SPECIAL)]).strip()
        return translations

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """A sentence with the network's own translation of it. Default: a validation sentence."""
        assert isinstance(network, PairNetwork)
        if text is None:
            sources = self.data.pairs.splits["valid"][0]
            text = sources[check_index(example or 0, len(sources), f"validation pairs of {self.data.pairs.name}")]
        if not text.strip():
            raise ValueError(f"the text {text!r} has nothing to translate; give a sentence with --text")
        (source,) = self.tokenizer.encode_all([text])
        (target,) = self.tokenizer.encode_all(self.translate(network, [text], beam=1))
        source = self.data.add_end(source)
        batch = self.data.batch_of_pairs([source], [target]).to(next(network.parameters()).device)
        inputs, options = pair_arguments(batch)
        labels = [token_labels(self.tokenizer, ids) for ids in (np.insert(target, 0, START), source)]
        return ProbeInput(inputs, labels[0], options, labels[1])

    def predict(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> Predictions:
        """Returns the translations of some sentences; that of a blank one is empty."""
        assert isinstance(network, PairNetwork)
        texts = [str(text) for text in inputs]
        whole = [row for row, text in enumerate(texts) if text.strip()]
        translations = [""] * len(texts)
        for row, translation in zip(whole, self.translate(network, [texts[row] for row in whole]), strict=True):
            translations[row] = translation
        return Predictions(np.array(translations, dtype=object))

    def read_inputs(self, data: str, column: str | None = None) -> Inputs:
        return read_inputs(data, "text", (column,) if column else (self.task.source, "source", "text"))

    def generate_text(self, network: Network | PairNetwork, prompt: str, *, beam: int | None = None) -> str:  # type: ignore[override]
        """Returns the translation of a sentence."""
        assert isinstance(network, PairNetwork)
        if not prompt.strip():
            raise ValueError(f"the prompt {prompt!r} has nothing to translate; give a sentence with --prompt")
        return self.translate(network, [prompt], beam)[0]

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        assert isinstance(network, PairNetwork)
        sources, targets = self.data.pairs.splits["valid"]
        row = seed % len(sources)
        return (
            f"{sources[row]}\n-> {self.translate(network, [sources[row]], beam=1)[0]}\n   (reference: {targets[row]})"
        )
