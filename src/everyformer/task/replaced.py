"""Replaced-token detection: the pretraining of ELECTRA. Paper: Clark et al. 2020, section 2.

    masked      15 % of the words of a row, drawn as for BERT, become [MASK]
    corrupt     the generator's samples stand in their places (network/generator.py)
    loss        L_MLM + weight L_disc, weight = 50: the mean of -log p_G(x_i) over the masked positions, and the mean over all tokens of
                -log D_i where x^corrupt_i = x_i, and of -log (1 - D_i) where it is not; 1 - D_i is the output of the head
A sample that is the token itself counts as not replaced. Rows are single runs of sentences: [CLS] A [SEP]. The masks, and the uniform
numbers of the samples, are a function of (seed, step), and the same in every evaluation.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from torch import Generator, Tensor
from torch.nn import functional as F

from everyformer.attention.context import SideInputs
from everyformer.data.inputs import Inputs, read_inputs
from everyformer.data.text import open_text
from everyformer.data.tokenizer import Ids
from everyformer.infer.estimate import Estimate, Progress
from everyformer.infer.evaluate import perplexity
from everyformer.infer.predict import Predictions, in_batches
from everyformer.network.generator import Replacement
from everyformer.network.linear_cross_entropy import NO_TARGET
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import ReplacedToken
from everyformer.task.batch import Batch, pad, step_generator
from everyformer.task.check import check_split, check_tokens, context_of, head_index, single_sequence
from everyformer.task.masked import CONTEXT, EVALUATION_ROWS, Masked, MaskedData
from everyformer.task.task import FittedTask, Objective, Task, TaskData
from everyformer.task.token_inference import TokenInference
from everyformer.value import NotNegative, Share, Size, Value

MAX_LR = 1e-3  # see docs/results/pretraining.md


class Replaced(Task, Value, frozen=True):
    """Find the tokens that a small masked language model replaced (the pretraining of ELECTRA)."""

    vocabulary: Size = 8192  # largest number of word pieces that the tokenizer learns
    context: Size | None = None  # tokens of a row, with its marks; None: the model's positions, or 128
    share: Share = 0.15  # share of the tokens that are masked for the generator
    weight: NotNegative = 50.0  # weight of the loss of finding them, beside that of the generator
    documents: Literal["files", "blank"] = (
        "files"  # what ends a document: the end of a file or record, or also a blank line
    )
    column: str | None = None  # column of records with the text; None: the column "text"
    valid: Share = 0.1  # share of the text held out for validation, if the data have no such split

    def default_lr(self, model: Model) -> float:
        """Returns that of other tasks, but at most MAX_LR: at 2e-3 the head stays at the share of replaced tokens."""
        return min(MAX_LR, Task.default_lr(self, model))

    def open(self, data: str | None, folder: Path | None = None) -> ReplacedData:
        rows = Masked(self.vocabulary, self.context, False, self.share, self.documents, self.column, self.valid)
        return ReplacedData(self, MaskedData(rows, open_text(data, (1 - self.valid, self.valid), self.column), folder))


class ReplacedData(TaskData):
    """Rows of text with masked positions, and a uniform number for each."""

    pads = True
    has_generator = True

    def __init__(self, task: Replaced, rows: MaskedData):
        self.task, self.rows, self.text, self.tokenizer = task, rows, rows.text, rows.tokenizer
        self.fingerprint = rows.fingerprint

    @property
    def fingerprints(self) -> dict[str, str]:
        return self.rows.fingerprints

    def member_settings(self) -> dict[str, Any]:
        return self.rows.member_settings()

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        one = single_sequence(model, "replaced")
        heads = [head for head in one.outputs if isinstance(head, ReplacedToken)][:1] or [ReplacedToken()]
        return replace(one, outputs=tuple(heads), auxiliary=None)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        model = single_sequence(model, "replaced")
        self.has_generator = model.generator is not None
        self.context = self.rows.context = context_of(self.task.context, model, CONTEXT)
        if self.context < 8:
            raise ValueError(f"a context of {self.context} is too short for a passage and its marks; give at least 8")
        check_tokens(model, self.tokenizer.vocabulary, self.text.name)
        objective = ReplacedObjective(self, head_index(model, ReplacedToken, "replaced"))
        return FittedTask(self, objective, ReplacedInference(objective))

    def check_generator(self) -> None:
        """Raises ValueError without a generator: then the network can find replaced tokens, but neither be trained nor be evaluated."""
        if not self.has_generator:
            raise ValueError(
                "this model has no generator that replaces tokens, as training and evaluating it need; choose the member electra, with "
                "model.generator=0.25, or use generate, embed, or another --task with --init-from"
            )

    def examples(self) -> int:
        self.check_generator()
        return self.rows.examples()

    def batch(self, step: int, size: int, seed: int) -> Batch:
        return self.random_batch("train", size, step_generator(seed, step))

    def random_batch(self, split: str, size: int, generator: Generator) -> Batch:
        """Returns random rows: the text, the text with masks, the masked positions (-1: none) and their uniform numbers."""
        rows = self.rows.random_batch(split, size, generator)
        selected_BT = rows["target_BT"] != NO_TARGET
        token_BT = torch.where(selected_BT, rows["target_BT"], rows["token_BT"])
        count = min(max(1, round((int(self.context or 0) - 2) * self.task.share)), token_BT.shape[1])
        position_BM = (~selected_BT).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
        position_BM = torch.where(selected_BT.gather(1, position_BM), position_BM, -1)
        tensors = {
            "token_BT": token_BT,
            "input_BT": token_BT.masked_fill(selected_BT, self.rows.special.mask),
            "position_BM": position_BM,
            "uniform_BM": torch.rand(position_BM.shape, generator=generator, dtype=torch.float64),
        }
        visible_BT = rows.tensors.get("visible_BT")
        # The loss is a sum that is divided by the number of masked positions; with this weight tokens contribute their mean.
        tokens = token_BT.numel() if visible_BT is None else int(visible_BT.sum())
        tensors["weight_B"] = torch.full((size,), float((position_BM >= 0).sum()) / tokens)
        return Batch(tensors | ({} if visible_BT is None else {"visible_BT": visible_BT}))

    def count(self, batch: Batch) -> int:
        return int((batch["position_BM"] >= 0).sum())

    def save(self, folder: Path) -> None:
        self.tokenizer.save(folder)


class ReplacedObjective(Objective):
    """The cross-entropy of the generator at the masked positions, and that of each token being replaced or not."""

    metric = "detection_loss"

    def __init__(self, data: ReplacedData, head: int):
        self.data, self.task, self.head = data, data.task, head
        self.includes = "the generator's loss"

    def forward(self, network: Any, batch: Batch, kernel: str) -> tuple[Any, Tensor, Tensor, Tensor]:
        """Returns the network's output; for each token the loss of finding it and whether it was replaced; the generator's losses."""
        self.data.check_generator()
        token_BT, position_BM, visible_BT = batch["token_BT"], batch["position_BM"], batch.tensors.get("visible_BT")
        side_inputs = SideInputs(replacement=Replacement(token_BT, position_BM, batch["uniform_BM"]))
        output = network(batch["input_BT"], visible=visible_BT, side_inputs=side_inputs, kernel=kernel)
        replaced_BT = output.replaced.token_BT != token_BT
        logits_BT = output.logits_of(self.head)[..., 0].float()
        loss_BT = F.binary_cross_entropy_with_logits(logits_BT, replaced_BT.float(), reduction="none")
        loss_BT = loss_BT if visible_BT is None else loss_BT.masked_fill(~visible_BT, 0)
        target_BM = token_BT.gather(1, position_BM.clamp(min=0)).masked_fill(position_BM < 0, NO_TARGET)
        logits_NV = output.replaced.logits_BMV.flatten(0, 1).float()
        loss_N = F.cross_entropy(logits_NV, target_BM.flatten(), reduction="none", ignore_index=NO_TARGET)
        return output, loss_BT, replaced_BT, loss_N.view(target_BM.shape)

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        output, loss_BT, _, generator_BM = self.forward(network, batch, kernel)
        loss = generator_BM.sum() + self.task.weight * (loss_BT * batch["weight_B"][:, None]).sum()
        return loss + sum(output.aux.values()) * self.data.count(batch) if output.aux else loss

    @property
    def targets_per_example(self) -> float:  # type: ignore[override]
        return float(self.data.context or 1)

    @torch.no_grad()
    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Evaluate on rows, masks and samples that are the same in every evaluation; without a limit on as many as the text fills."""
        data = self.data
        check_split(split, data.rows.splits, data.text.name)
        available = max(1, len(data.rows.splits[split].token_N) // int(data.context or 1))
        rows = available if limit is None else min(available, limit)
        device, estimate = next(network.parameters()).device, Estimate(progress)
        estimate.expect(round(rows * self.targets_per_example))
        found = right = guessed = replaced = masked = 0
        generator_loss = 0.0
        for number, start in enumerate(range(0, rows, EVALUATION_ROWS)):
            batch = data.random_batch(split, min(EVALUATION_ROWS, rows - start), step_generator(0, number)).to(device)
            output, loss_BT, replaced_BT, generator_BM = self.forward(network, batch, kernel)
            visible_BT = batch.tensors.get("visible_BT", torch.ones_like(replaced_BT))
            guess_BT = (output.logits_of(self.head)[..., 0] > 0) & visible_BT
            found += int((guess_BT & replaced_BT).sum())
            guessed, replaced = guessed + int(guess_BT.sum()), replaced + int(replaced_BT.sum())
            right += int(((guess_BT == replaced_BT) & visible_BT).sum())
            generator_loss, masked = generator_loss + float(generator_BM.sum()), masked + data.count(batch)
            estimate.add(loss_BT.double().sum(1), visible_BT.sum(1).tolist())
        count, share = estimate.scored, replaced / estimate.scored
        return {
            "detection_loss": estimate.mean,
            "low": estimate.low,
            "high": estimate.high,
            "accuracy": right / count,
            "chance_accuracy": max(share, 1 - share),  # the same answer for every token
            "f1": 2 * found / max(1, guessed + replaced),
            "chance_f1": 2 * share / (1 + share),  # every token is replaced
            "replaced_share": share,
            "masked_perplexity": perplexity(generator_loss, masked),
            "split": split,
            "rows": rows,
            "targets": count,
            "targets_in_split": round(count * available / rows),
        }


class ReplacedInference(TokenInference):
    """Finds the tokens of a text that do not belong there."""

    can_generate = can_predict = True
    example = "--prompt 'To be, or not to bee: that is the question.'"

    def __init__(self, objective: ReplacedObjective):
        special = objective.data.rows.special
        super().__init__(objective.data.tokenizer, objective.data.context, ((special.start,), (special.end,)))
        self.objective, self.data = objective, objective.data

    @torch.no_grad()
    def marked_texts(self, network: Network | PairNetwork, texts: Sequence[str]) -> list[str]:
        """Returns the texts with the tokens in brackets that were probably replaced. What exceeds the context is left out."""
        device, rows = next(network.parameters()).device, [self.marked(ids) for ids in self.encode(texts)]
        longest = max(map(len, rows))

        def replaced(some: list[Ids]) -> Tensor:
            token_BT, visible_BT = (x.to(device) for x in pad(some, 1))
            logits_BT = network(token_BT, visible=visible_BT).logits_of(self.objective.head)[..., 0]
            return F.pad(logits_BT > 0, (0, longest - logits_BT.shape[1]))

        return [self.text(ids, one_T) for ids, one_T in zip(rows, in_batches(rows, replaced), strict=True)]

    def text(self, ids: Ids, replaced_T: Tensor) -> str:
        words = []
        for token, replaced in zip(ids.tolist(), replaced_T.tolist(), strict=False):
            word = "" if token in self.tokenizer.special else self.tokenizer.decode([token])
            words.append(f"[{word}]" if replaced and word else word)
        return " ".join(word for word in words if word).replace(" ##", "")

    def generate_text(self, network: Network | PairNetwork, prompt: str) -> str:  # type: ignore[override]
        """Returns the prompt with the tokens in brackets that were probably replaced."""
        if not prompt.strip():
            raise ValueError(f"the prompt {prompt!r} has no words; give a sentence with --prompt")
        return self.marked_texts(network, [prompt])[0]

    def predict(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> Predictions:
        """Returns the texts with the tokens in brackets that were probably replaced."""
        return Predictions(np.array(self.marked_texts(network, [str(text) for text in inputs]), dtype=object))

    def read_inputs(self, data: str, column: str | None = None) -> Inputs:
        return read_inputs(data, "text", (column, self.data.task.column, "text"))

    @torch.no_grad()
    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        """Returns a row with the generator's samples, in which the network puts tokens in brackets."""
        batch = self.data.random_batch("valid", 1, step_generator(seed, 0)).to(next(network.parameters()).device)
        output, _, _, _ = self.objective.forward(network, batch, "auto")
        guess_BT = output.logits_of(self.objective.head)[..., 0] > 0
        return self.text(output.replaced.token_BT[0].cpu().numpy(), guess_BT[0])
