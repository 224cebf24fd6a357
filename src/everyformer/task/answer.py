"""Answer the questions of a generated problem (everyformer.data.problems), which tests one ability of a model. An image whose pixels
are given one by one is a question too (everyformer.data.pixels); its class is the answer.

The characters of an example are read in the form that the model has:
    next    a language model reads the whole example; its targets are the characters of answers
    masked  a model that fills blanks reads [MASK] in place of each character of an answer
    pair    an encoder reads what is given, a decoder predicts the characters of the answers
    class   a classifier reads what is given; its class is the answer, which is a single character
There is no other loss. Answers that may have several characters end with [SEP], which is a target but is not scored. The questions of
a step have one length, drawn from all lengths up to that of training; positions start at a random offset below `shift`, equal for
both sides of a pair, so that longer test questions have no new positions (Dehghani et al. 2019).
Metrics: the share of right characters of answers, with the true ones before them given, and the share of examples without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from everyformer.data.datasets import dataset_name
from everyformer.data.files import digest
from everyformer.data.pixels import pixels
from everyformer.data.problems import PROBLEMS, Pieces, Problem, problem_name
from everyformer.data.tokenizer import SPECIAL, CharacterTokenizer
from everyformer.infer.estimate import Estimate, Progress
from everyformer.network.linear_cross_entropy import NO_TARGET, cross_entropy
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify, Language, Masked, OutputHead
from everyformer.task.answer_inference import AnswerInference
from everyformer.task.batch import Batch, pad, step_generator
from everyformer.task.check import check_split, check_tokens, head_index
from everyformer.task.target import ClassTarget
from everyformer.task.task import FittedTask, Objective, Task, TaskData
from everyformer.task.translate import halting_steps
from everyformer.value import Count, Size, Value, nearest

MULTIPLE = 8
EXAMPLES = 500  # of the validation split, and of the test split for each length
EVALUATION_ROWS = 64
START, END, MASK = (SPECIAL.index(name) for name in ("[CLS]", "[SEP]", "[MASK]"))
Form = Literal["next", "masked", "pair", "class"]
HEADS: dict[type[OutputHead], Form] = {Language: "next", Masked: "masked", Classify: "class"}


class Answer(Task, Value, frozen=True):
    """Answer the questions of a generated problem, or name the class of an image that is read pixel by pixel."""

    length: Size | None = None  # characters of the longest training questions; None: the problem's
    test_length: tuple[Size, ...] | None = None  # characters of the test questions; None: the problem's
    shift: Count = 0  # in training, positions start at a random offset below this; 0: at 0

    def open(self, data: str | None, folder: Path | None = None) -> AnswerData:
        name = problem_name(data)
        if name is None and data is not None and dataset_name(data) is None and not Path(data).expanduser().exists():
            raise ValueError(f"there is no problem and no file {data}; {nearest(data, [*PROBLEMS, 'mnist'])}")
        return AnswerData(self, pixels(data) if name is None else PROBLEMS[name])

    def open_for_inference(self, data: str | None, folder: Path) -> AnswerData:
        return self.open(data, folder)


class AnswerData(TaskData):
    """Examples as one of the four forms."""

    form: Form = "next"
    pads = True

    def __init__(self, task: Answer, problem: Problem):
        self.task, self.problem = task, problem
        self.length = task.length or problem.length
        self.test_lengths = task.test_length or ((self.length,) if problem.fixed else problem.test_length)
        for length in (self.length, *self.test_lengths):
            problem.check(length)
        self.tokenizer = CharacterTokenizer(problem.alphabet, SPECIAL)
        self.end = () if problem.is_label else (END,)
        self.lengths = range(self.length if problem.fixed else problem.shortest, self.length + 1)
        self.fingerprint = digest(problem.name, *map(repr, problem.examples("train", 0, range(8), self.length)))
        lengths = {"train": self.lengths, "valid": self.lengths, "test": self.test_lengths}
        self.splits: dict[str, Sequence[int]] = {split: lengths[split] for split in problem.splits}
        if "test" in self.splits:
            self.splits |= {f"test{length}": (length,) for length in self.test_lengths}
        self.evaluation = lru_cache(maxsize=8)(self._evaluation)

    def longest(self) -> int:
        """The largest number of characters of an example, with its end."""
        return max(self.problem.size(length) for length in (self.length, *self.test_lengths)) + len(self.end)

    def member_settings(self) -> dict[str, Any]:
        context = self.longest() + self.task.shift
        return {"vocabulary": self.tokenizer.vocabulary, "classes": len(self.problem.answers), "context": context}

    def adapt(self, model: Model | EncoderDecoder) -> Model | EncoderDecoder:
        """Keeps the output head that predicts characters, or makes one that predicts the class."""
        if isinstance(model, EncoderDecoder):
            return model
        head: Any = next((head for head in model.outputs if type(head) in HEADS), None)
        if isinstance(head, Classify):
            head = ClassTarget(tuple(self.problem.answers)).head(model)
        outputs = model.outputs if head is None else (head,)
        return replace(model, outputs=outputs, auxiliary=None, generator=None)

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        sides = (model.encoder, model.decoder) if isinstance(model, EncoderDecoder) else (model,)
        for side in sides:
            check_tokens(side, self.tokenizer.vocabulary, self.problem.name)
            limit, wanted = side.limit(), self.member_settings()["context"]
            if limit is not None and limit < wanted:
                raise ValueError(
                    f"the model has {limit} positions, but the examples of {self.problem.name} take {wanted}; lower task.length, "
                    "task.test_length and task.shift, or choose another member"
                )
        kind = next((type(head) for head in sides[-1].outputs if type(head) in HEADS), Language)
        head = head_index(sides[-1], kind, f"the problem {self.problem.name}")
        self.form, self.context = "pair" if len(sides) == 2 else HEADS[kind], self.longest()
        if self.form == "class" and not self.problem.is_label:
            labels = ", ".join(name for name, problem in PROBLEMS.items() if problem.is_label)
            raise ValueError(
                f"the answers of {self.problem.name} have several characters, but the model predicts one class; give one of {labels}, "
                "or choose gpt2"
            )
        if self.form == "next" and not model.body.is_language_model():  # type: ignore[union-attr]
            raise ValueError(
                "the model attends to the answers that it should predict; choose a causal one, such as gpt2"
            )
        return FittedTask(self, AnswerObjective(self, head), AnswerInference(self, head))

    def examples(self) -> int:
        return 1 << 31

    def batch(self, step: int, size: int, seed: int) -> Batch:
        generator = step_generator(seed, step)
        length = self.lengths[int(torch.randint(len(self.lengths), (), generator=generator))]
        batch = self.collate(self.problem.examples("train", seed, range(step * size, (step + 1) * size), length))
        if not self.task.shift:
            return batch
        offset_B = torch.randint(self.task.shift, (size,), generator=generator)
        return Batch({**batch.tensors, "offset_B": offset_B})

    def _evaluation(self, split: str, count: int) -> list[tuple[int, list[Pieces]]]:
        """The examples of an evaluation, of which each length of a split has an equal part, in batches of one length."""
        batches, lengths = list[tuple[int, list[Pieces]]](), self.splits[split]
        kind = "test" if split.startswith("test") else split
        for number, length in enumerate(lengths):
            rows = range(number * count // len(lengths), (number + 1) * count // len(lengths))
            for start in range(rows.start, rows.stop, EVALUATION_ROWS):
                indices = range(start, min(start + EVALUATION_ROWS, rows.stop))
                batches.append((length, self.problem.examples(kind, 0, indices, length)))
        return batches

    def count(self, batch: Batch) -> int:
        return int((batch["target_BT"] != NO_TARGET).sum())

    def encode(self, text: str) -> list[int]:
        return list(map(int, self.tokenizer.encode(text.encode())))

    def collate(self, rows: Sequence[Pieces]) -> Batch:
        """Returns the examples in the form that the model reads."""
        given = [self.encode("".join(pieces[::2])) for pieces in rows]
        answers = [[*self.encode("".join(pieces[1::2])), *self.end] for pieces in rows]
        if self.form == "pair":
            return _batch([[START, *answer[:-1]] for answer in answers], answers, given)
        if self.form == "class":
            return _batch(given, [[self.problem.answers.index(pieces[1])] for pieces in rows])
        read, targets = [], []
        for pieces in rows:
            tokens, asked = list[int](), list[bool]()
            for number, piece in enumerate(pieces):
                tokens += self.encode(piece)
                asked += [number % 2 == 1] * len(piece)
            target = [token if is_asked else NO_TARGET for token, is_asked in zip(tokens, asked, strict=True)]
            if self.form == "masked":
                read.append([MASK if is_asked else token for token, is_asked in zip(tokens, asked, strict=True)])
                targets.append(target)
            else:
                read.append([*tokens, *self.end][:-1])
                targets.append([*target, *self.end][1:])
        return _batch(read, targets)


def _batch(read: list[list[int]], targets: list[list[int]], sources: list[list[int]] | None = None) -> Batch:
    tensors: dict[str, Tensor] = {}
    if sources is not None:
        tensors["source_BS"], tensors["source_visible_BS"] = pad(list(map(np.array, sources)), MULTIPLE)
    tensors["token_BT"], tensors["visible_BT"] = pad(list(map(np.array, read)), MULTIPLE)
    # A classifier has one target, however many characters it reads.
    is_class = len(targets[0]) == 1 < len(read[0])
    target_BT, has_target_BT = pad(list(map(np.array, targets)), 1 if is_class else MULTIPLE)
    return Batch(tensors | {"target_BT": target_BT.masked_fill(~has_target_BT, NO_TARGET)})


def arguments(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Returns the network's inputs and the options of its call."""
    options: dict[str, Any] = {"visible": batch["visible_BT"], "position_offset": batch.tensors.get("offset_B")}
    if "source_BS" not in batch.tensors:
        return (batch["token_BT"],), options
    return (batch["source_BS"], batch["token_BT"]), options | {"source_visible": batch["source_visible_BS"]}


class AnswerObjective(Objective):
    """Cross-entropy of the characters of answers; their accuracy."""

    metric = "character_accuracy"
    higher_is_better = True

    def __init__(self, data: AnswerData, head: int):
        self.data, self.head = data, head

    def loss(self, network: Network | PairNetwork, batch: Batch, kernel: str) -> Tensor:
        inputs, options = arguments(batch)
        output: Any = network(*inputs, **options, kernel=kernel, probe=self.probe())
        loss = cross_entropy(self.logits(output), batch["target_BT"])
        return loss + sum(output.aux.values()) * self.data.count(batch) if output.aux else loss

    def logits(self, output: Any) -> Any:
        """Returns the logits of each target; a classifier has one target per row."""
        logits = output.logits_of(self.head)
        return logits[:, None] if self.data.form == "class" else logits

    @property
    def targets_per_example(self) -> float:  # type: ignore[override]
        batch = self.data.batch(0, 8, 0)
        return self.data.count(batch) / len(batch)

    @torch.no_grad()
    def evaluate(
        self,
        network: Network | PairNetwork,
        split: str,
        limit: int | None,
        kernel: str,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """The accuracies on a split; on the test split also for each length."""
        data, device = self.data, next(network.parameters()).device
        check_split(split, data.splits, data.problem.name)
        available = EXAMPLES * (len(data.test_lengths) if split == "test" else 1)
        count = available if limit is None else min(limit * available // EXAMPLES, available)
        batches = data.evaluation(split, max(count, len(data.splits[split])))
        right, nats = Estimate(progress), Estimate()
        right.expect(round(count * self.targets_per_example))
        by_length: dict[int, list[Tensor]] = {}
        steps: dict[str, float] = {}
        for length, rows in batches:
            batch = data.collate(rows).to(device)
            inputs, options = arguments(batch)
            logits_BTV = self.logits(network(*inputs, **options, kernel=kernel)).float()
            target_BT = batch["target_BT"]
            if data.end:
                target_BT = target_BT.masked_fill(target_BT == END, NO_TARGET)
            scored_BT, right_BT = target_BT != NO_TARGET, logits_BTV.argmax(-1) == target_BT
            loss_BT = torch.nn.functional.cross_entropy(
                logits_BTV.transpose(1, 2), target_BT, ignore_index=NO_TARGET, reduction="none"
            )
            sizes = scored_BT.sum(1)
            right.add(right_BT.sum(1).double(), sizes.tolist())
            nats.add(loss_BT.sum(1), sizes.tolist())
            by_length.setdefault(length, []).append(torch.stack((right_BT.sum(1), sizes), 1).cpu())
            if not steps and isinstance(network, PairNetwork):
                steps = halting_steps(network, inputs, options)
        metrics: dict[str, Any] = {"character_accuracy": right.mean, "low": right.low, "high": right.high}
        metrics |= {"sequence_accuracy": _accuracies([one for some in by_length.values() for one in some])[1]}
        metrics |= {"loss": nats.mean, "chance": data.problem.chance, "split": split, "targets": right.scored, **steps}
        if split == "test":
            for length, some in by_length.items():
                metrics[f"character_accuracy_{length}"], metrics[f"sequence_accuracy_{length}"] = _accuracies(some)
        return metrics | {"targets_in_split": round(right.scored * available / max(1, count))}


def _accuracies(counts: Sequence[Tensor]) -> tuple[float, float]:
    """Returns the share of right characters and of rows without an error, from the right and all characters of each row."""
    count_N2 = torch.cat(list(counts)).double()
    right, scored = count_N2.sum(0).tolist()
    return right / scored, float((count_N2[:, 0] == count_N2[:, 1]).double().mean())
