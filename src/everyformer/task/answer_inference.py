"""What a model that was trained on a generated problem is used for: answers to questions, which are written as in training.

A question ends with =, and the answer follows. Where something is given after an answer, each character to answer is written as _:
`--prompt 'q3B7=B_q_'`. Each character is the most likely one of those that answers have, given those before it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from everyformer.data.inputs import Inputs, read_inputs
from everyformer.data.problems import Pieces
from everyformer.data.tokenizer import SPECIAL
from everyformer.infer.predict import Predictions
from everyformer.network.network import Network, PairNetwork
from everyformer.task.probe_input import ProbeInput, check_index, token_labels
from everyformer.task.task import Inference

if TYPE_CHECKING:
    from everyformer.task.answer import AnswerData

BLANK = "_"  # a character to answer
START, MASK = (SPECIAL.index(name) for name in ("[CLS]", "[MASK]"))


class AnswerInference(Inference):
    can_generate = can_predict = True

    def __init__(self, data: AnswerData, head: int):
        self.data, self.head, self.tokenizer = data, head, data.tokenizer
        (pieces,) = data.problem.examples("valid", 0, [0], data.lengths[0])
        self.example = f"--prompt {shlex.quote(self.question_of(pieces))}"

    def question_of(self, pieces: Pieces) -> str:
        """Returns a question as a prompt: with blanks, except for an answer at its end."""
        if self.data.form in ("pair", "class") or (self.data.form == "next" and len(pieces) == 2):
            return "".join(pieces[::2])
        return "".join(BLANK * len(piece) if number % 2 else piece for number, piece in enumerate(pieces))

    @torch.no_grad()
    def answer(self, network: Network | PairNetwork, question: str) -> str:
        """Returns the characters of the answers to a question."""
        problem, answer = self.data.problem, ""
        unknown = sorted({*question} - {*problem.alphabet, BLANK})
        if unknown or not question:
            reason = f"has {unknown[0]!r}, which no question of {problem.name} has" if unknown else "is empty"
            raise ValueError(f"the question {question!r} {reason}; write one as in {self.example}")
        size = question.count(BLANK) or problem.answer_length or len(question)
        choices = [*problem.answers, *self.data.end]  # a character, or the id of the end
        while len(answer) < size:
            logits_V = self._logits(network, question, answer)
            if self.data.form != "class":
                logits_V = logits_V[[*self.data.encode(problem.answers), *self.data.end]]
            chosen = choices[int(logits_V.argmax())]
            if not isinstance(chosen, str):
                break
            answer += chosen
        return answer

    def _logits(self, network: Any, question: str, answer: str) -> Tensor:
        """Returns the logits of the next character of an answer, of which some characters are known."""
        given, device = question.replace(BLANK, ""), next(network.parameters()).device

        def output(*rows: Sequence[int]) -> Tensor:
            logits: Tensor = network(*(torch.tensor([row], device=device) for row in rows)).logits_of(self.head)[0]
            return logits

        if self.data.form == "class":
            return output(self.data.encode(given))
        if self.data.form == "pair":
            return output(self.data.encode(given), [START, *self.data.encode(answer)])[-1]
        pieces = question.split(BLANK)
        if self.data.form == "next":
            text = "".join(chain(*zip_longest(pieces[: len(answer) + 1], answer, fillvalue="")))
            return output(self.data.encode(text))[-1]
        if len(pieces) == 1:
            raise ValueError(f"the question {question!r} has no {BLANK} to fill; write one as in {self.example}")
        tokens = self.data.encode(pieces[0])
        blanks = list[int]()
        for piece in pieces[1:]:
            blanks.append(len(tokens))
            tokens += [MASK, *self.data.encode(piece)]
        return output(tokens)[blanks[len(answer)]]

    def generate_text(self, network: Network | PairNetwork, prompt: str) -> str:  # type: ignore[override]
        """Returns the question with its answers."""
        answer = self.answer(network, prompt)
        return "".join(chain(*zip_longest(prompt.split(BLANK), answer, fillvalue="")))

    def predict(self, network: Network | PairNetwork, inputs: Sequence[Any]) -> Predictions:
        return Predictions(np.array([self.answer(network, str(one).strip("\r\n")) for one in inputs], dtype=object))

    def read_inputs(self, data: str, column: str | None = None) -> Inputs:
        return read_inputs(data, "text", (column,) if column else ("question", "text"))

    def sample(self, network: Network | PairNetwork, seed: int) -> str | None:
        data = self.data
        (pieces,) = data.problem.examples("valid", 0, [seed], data.lengths[seed % len(data.lengths)])
        answer = self.answer(network, self.question_of(pieces))
        return f"{self.question_of(pieces)}\n-> {answer} (right: {''.join(pieces[1::2])})"

    def _probe_input(self, network: Network | PairNetwork, text: str | None, example: int | None) -> ProbeInput:
        """A validation example with its answers, or a text of the problem's characters."""
        from everyformer.task.answer import EXAMPLES, arguments

        data = self.data
        index = check_index(example or 0, EXAMPLES, f"validation examples of {data.problem.name}")
        pieces = (
            data.problem.examples("valid", 0, [index], data.length)[0]
            if text is None
            else (text, data.problem.answers[0])
        )
        inputs, options = arguments(data.collate([pieces]).to(next(network.parameters()).device))
        labels = [token_labels(self.tokenizer, one[0].tolist()) for one in inputs]
        lengths = [int(options[name].sum()) for name in ("visible", "source_visible") if name in options]
        labels = [one[:length] for one, length in zip(labels[::-1], lengths, strict=True)]
        return ProbeInput(inputs, labels[0], options, labels[1] if len(labels) > 1 else ())
