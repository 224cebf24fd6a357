"""Score modifications of the softmax itself: soft caps and sinks.

With s_ij = scale q_i . k_j, terms t_ij of other score modifications and a head's sink b:

    soft cap    s_ij <- c tanh(s_ij / c), before terms are added and keys are hidden        Bello et al. 2016; Gemma Team 2024
    sink        y_i = sum_j exp(s_ij + t_ij) v_j / (exp(b) + sum_j exp(s_ij + t_ij))        Xiao et al. 2023; OpenAI 2025 (gpt-oss)

A sink is a key with the score b and the value 0, to which every query attends. The output of a query without other keys stays 0.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from everyformer.attention.score_mod import ScoreMod, ScoreModModule
from everyformer.value import Positive, Value


class SoftCap(ScoreMod, Value, frozen=True):
    """Keeps the products of queries and keys between -`cap` and `cap`: cap tanh(score / cap).

    Example: `Attention(Standard(8), Causal(), (Rotary(), SoftCap(50.0)))`.
    """

    cap: Positive = 50.0

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return SoftCapModule(self.cap)


class SoftCapModule(ScoreModModule):
    grouped_keys = True

    def __init__(self, cap: float):
        super().__init__()
        self.soft_cap = cap


class Sinks(ScoreMod, Value, frozen=True):
    """A learned logit for each head in the denominator of its softmax, so that a head may attend to nothing. It starts at 0.

    Example: `Attention(Standard(8), Causal(), (Rotary(), Sinks()))`.
    """

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return SinksModule(heads)


class SinksModule(ScoreModModule):
    grouped_keys = True

    def __init__(self, heads: int):
        super().__init__()
        self.logit_H = nn.Parameter(torch.zeros(heads))

    def sink(self) -> Tensor:
        return self.logit_H
