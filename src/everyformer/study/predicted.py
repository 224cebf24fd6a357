"""What a network predicts at each position of one example: the most probable outcomes, and the surprisal of what came."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyformer.network.output_head import Classify, Language, Masked, OutputHead, PerToken, ReplacedToken
from everyformer.task.attention_maps import ProbedSide
from everyformer.task.denoise import DenoiseInference
from everyformer.task.probe_input import ProbeInput, token_labels
from everyformer.task.task import Inference

OUTCOMES = 10


@dataclass(frozen=True)
class Predicted:
    """The most probable outcomes, in falling order. Surprisal is -log2 of the probability of what came, in bits."""

    of: str  # what is predicted: "the next token", "this token", "the class", ...
    id_PN: Tensor  # P is 1 for a prediction of the whole example
    probability_PN: Tensor
    names: Mapping[int, str]  # of the ids
    surprisal_T: Tensor | None = None  # NaN at the first position, which nothing predicts
    came_T: Tensor | None = None  # the id of what came at each position, where there is a surprisal

    @property
    def total(self) -> float | None:
        """The surprisal of the whole example, in bits."""
        return None if self.surprisal_T is None else float(self.surprisal_T.nansum())


KINDS: dict[type[OutputHead], str] = {
    Language: "the next token", Masked: "this token", Classify: "the class", PerToken: "the class of this position",
    ReplacedToken: "whether this token was replaced",
}  # fmt: skip


def predicted(inference: Inference, inputs: ProbeInput, side: ProbedSide) -> Predicted | None:
    """Returns the predictions of the first output head that has some; None if there is none."""
    for index, head in enumerate(side.network.value.outputs):
        if type(head) not in KINDS:
            continue
        logits = side.output.logits_of(index)[0].detach().float().cpu()
        logits_PV = logits if logits.dim() == 2 else logits[None]
        if isinstance(head, ReplacedToken):
            logits_PV = torch.cat((torch.zeros_like(logits_PV), logits_PV), dim=1)
        log_PV = logits_PV[: len(side.labels)].log_softmax(-1)
        log_PN, id_PN = log_PV.topk(min(OUTCOMES, log_PV.shape[1]))
        came_T = _read_tokens(inputs, len(log_PV)) if isinstance(head, Language) else None
        surprisal_T = None if came_T is None else _surprisal(came_T, log_PV)
        shown = [id_PN] if came_T is None else [id_PN, came_T]
        names = _names(inference, head, sorted({one for ids in shown for one in ids.flatten().tolist()}))
        return Predicted(KINDS[type(head)], id_PN, log_PN.exp(), names, surprisal_T, came_T)
    return None


def _read_tokens(inputs: ProbeInput, count: int) -> Tensor | None:
    """The first `count` tokens that the network reads, if it reads tokens."""
    token_BT = inputs.inputs[-1]
    if not isinstance(token_BT, Tensor) or token_BT.dim() != 2 or token_BT.is_floating_point():
        return None
    return token_BT[0, :count].long().cpu()


def _surprisal(token_T: Tensor, log_TV: Tensor) -> Tensor:
    """The surprisal of each token, given those before it."""
    nats_T = -log_TV[:-1].gather(1, token_T[1:, None])[:, 0]
    return torch.cat((torch.full((1,), math.nan), nats_T / math.log(2)))


def _names(inference: Inference, head: OutputHead, ids: list[int]) -> dict[int, str]:
    if isinstance(head, ReplacedToken):
        return {0: "original", 1: "replaced"}
    if isinstance(head, Classify | PerToken):
        classes = inference.classes
        return {one: classes[one] if one < len(classes) else str(one) for one in ids}
    if isinstance(inference, DenoiseInference):
        return dict(zip(ids, inference.labels(ids), strict=True))
    tokenizer: Any = getattr(inference, "tokenizer", None)
    labels = [str(one) for one in ids] if tokenizer is None else token_labels(tokenizer, ids)
    return dict(zip(ids, labels, strict=True))
