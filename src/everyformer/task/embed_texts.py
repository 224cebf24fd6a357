"""Embeddings of texts by an encoder without an output head, as the config of a sentence encoder says. Nothing is trained.

The vector of a text is the mean of the last layer over its tokens, or the first token's, or the largest of each feature; it may be
normalized to length 1 (Reimers & Gurevych 2019).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from everyformer.data import tokenizer as tokenizers
from everyformer.data.tokenizer import Tokenizer
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Reading
from everyformer.task.check import check_tokens, context_of, single_sequence
from everyformer.task.task import FittedTask, Objective, Task, TaskData
from everyformer.task.token_inference import TokenInference
from everyformer.value import Size, Value

POOLINGS: dict[str, Reading] = {  # by the names of sentence-transformers
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "first",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "last",
}
CONTEXT = 512  # default for a model without a limit of positions


class EmbedTexts(Task, Value, frozen=True):
    """Turn texts into vectors."""

    pooling: Reading = "mean"  # how the vectors of the tokens become one
    normalize: bool = False  # whether vectors have the length 1
    context: Size | None = None  # tokens of a text, which is truncated to them; None: the model's positions, or 512

    def open(self, data: str | None, folder: Path | None = None) -> EmbedData:
        tokenizer = None if folder is None else tokenizers.load(folder)
        if tokenizer is None:
            raise ValueError(f"{folder} has no tokenizer, so no text can be read; restore the file that import wrote")
        return EmbedData(self, tokenizer)


class EmbedData(TaskData):
    """No data, but a tokenizer."""

    fingerprint = ""
    context: int | None = None

    def __init__(self, task: EmbedTexts, tokenizer: Tokenizer):
        self.task, self.tokenizer = task, tokenizer

    def fit(self, model: Model | EncoderDecoder) -> FittedTask:
        one = single_sequence(model, "embed")
        check_tokens(one, self.tokenizer.vocabulary, "the run")
        self.context = context_of(self.task.context, one, CONTEXT)
        return FittedTask(self, NoObjective(), EmbedInference(self))

    def examples(self) -> int:
        raise ValueError(NO_HEAD)


NO_HEAD = "this model has no output head to train or evaluate; use embed, or give it a head with --task and --init-from"


class NoObjective(Objective):
    """What cannot be evaluated."""

    metric = "loss"

    def evaluate(self, *_: Any, **__: Any) -> dict[str, Any]:
        raise ValueError(NO_HEAD)


class EmbedInference(TokenInference):
    """Embeds texts as the task says, unless another pooling is asked for."""

    def __init__(self, data: EmbedData):
        super().__init__(data.tokenizer, data.context, data.tokenizer.marks)
        self.task = data.task

    def embed(
        self,
        network: Network | PairNetwork,
        inputs: Sequence[Any],
        pooling: Reading | None = None,
        normalize: bool | None = None,
    ) -> NDArray[np.float32]:
        normalize = self.task.normalize if normalize is None else normalize
        return super().embed(network, inputs, pooling or self.task.pooling, normalize)
