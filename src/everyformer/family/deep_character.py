"""Paper: Al-Rfou et al. 2018, Character-Level Language Modeling with Deeper Self-Attention.

Equations: causal blocks of Vaswani et al., a learned table of positions added to what enters each layer, and losses that serve
training alone: at every layer l of n until l/(2n) of it is done, and of the token after the next with the weight 1/2
(task/language.py), each by a map of its own.
Symbols: `context` L, `ahead` the targets after the next. With them 64 layers have 235M parameters, 219M without; 12 have 44M and 41M.
Departures: the paper trains by momentum, and keeps the probability of the last position alone in evaluation; here a window moves
by half its length unless `--stride 1` is asked for.
"""

from __future__ import annotations

from typing import Any

from everyformer.attention.pattern import Causal
from everyformer.attention.projection import Standard
from everyformer.network.auxiliary import AuxiliaryPredictions
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Xavier
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.position import Learned
from everyformer.network.residual import PostNorm
from everyformer.value import Count, Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "dropout": 0.1},
    "12": {"width": 512, "heads": 8, "layers": 12, "context": 512, "dropout": 0.2},
    "64": {"width": 512, "heads": 8, "layers": 64, "context": 512, "dropout": 0.55},
}


def deep_character(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 64,
    context: Size = 512,
    hidden: Size | None = None,
    vocabulary: Size = 256,
    ahead: Count = 1,
    every_layer: bool = True,
    dropout: Share = 0.55,
) -> Model:
    """`dropout` is of the attention weights and of the hidden layer of the nets."""
    attention = Attention(Standard(heads or max(1, width // 64)), Causal(), dropout=dropout)
    net = FeedForward(hidden or 4 * width, dropout=dropout)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        body=Stack(layers, (Layer((attention, net), Learned(context)),), PostNorm()),
        outputs=(Language(tied=False),),
        auxiliary=AuxiliaryPredictions(ahead, every_layer) if ahead or every_layer else None,
        initial=Xavier(),
    )
