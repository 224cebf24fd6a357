"""What the waist asks of a kernel: everything that stands in the equation, and nothing about how to compute it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.pattern import Pattern
from everyformer.attention.score_mod import ScoreModModule, Term

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Request:
    """softmax(scale q k^T + sum of terms, over the keys that `pattern` shows) v, plus what the rules answer."""

    q_BHQE: Tensor
    k_BHKE: Tensor
    v_BHKE: Tensor
    pattern: Pattern
    terms: tuple[Term, ...]
    answers: tuple[ScoreModModule, ...]  # the rules that need the weights
    context: Context
    scale: float
    dropout: float

    @property
    def batch(self) -> int:
        return self.q_BHQE.shape[0]

    @property
    def heads(self) -> int:
        return self.q_BHQE.shape[1]

    @property
    def wants_gradient(self) -> bool:
        return any(x.requires_grad for x in (self.q_BHQE, self.k_BHKE, self.v_BHKE))

    def partial_pass_reason(self) -> str | None:
        """Why a kernel that takes positions for numbers cannot serve, or None."""
        if self.context.positions.in_order and self.context.positions.queries == self.context.positions.keys:
            return None
        return "the queries are not all the positions, each at its number (a past, padding, another sequence); use sdpa"

    def by_position(self, width: int) -> list[Tensor]:
        """q, k and v as B, T, H, E, one as wide as the other: the zeros change nothing."""
        given = (self.q_BHQE, self.k_BHKE, self.v_BHKE)
        wide = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in given)  # a pad of 0 copies
        return [x.transpose(1, 2).contiguous() for x in wide]

    def needs_weights_reason(self) -> str | None:
        """Why a kernel that never holds the weights cannot serve, or None."""
        if self.answers:
            return "a rule adds to the answer by the weights (Shaw's value terms), which this kernel never holds"
        if self.context.call.probe is not None:
            return "a probe wants the weights, which this kernel never holds"
        return None
