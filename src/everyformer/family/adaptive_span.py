"""Paper: Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers.

Equations: post-norm causal blocks, s_ij = q_i . (k_j + p_{i-j}) / sqrt(E) with p learned and the same in all heads and layers,
softened by the span of the head (or, `dynamic`, of the head and the token), over the S keys before the token and, as in
the paper, without itself (`itself`: with it); segments with a memory of S positions; loss + lambda / M sum z.
Symbols: `span` S, `ramp` R, `cost` lambda. The paper's segments are 512 long: task.segment=512.
Departures: p begins smaller than in the published code, and has a row for the distance 0. Empty memory has no part in the
weights, as it has there. The sizes are those of the published scripts; `small` is its model for one GPU.
"""

from __future__ import annotations

from typing import Any

from everyformer.attention.pattern import Causal, Window
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import ScoreMod, Shaw
from everyformer.attention.span import DynamicSpan, Span
from everyformer.network.depth import Attention, Layer, Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.model import Model
from everyformer.network.output_head import Language
from everyformer.network.residual import PostNorm
from everyformer.value import NotNegative, Part, Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "span": 64, "ramp": 8, "cost": 1e-4, "start": 0.1, "dropout": 0.1},
    "small": {"width": 256, "heads": 4, "layers": 8, "span": 1024, "cost": 2e-6, "dropout": 0.0},
    "enwik8": {"width": 512, "heads": 8, "layers": 12},
    "enwik8-large": {"width": 768, "heads": 8, "layers": 24, "hidden": 4096, "dropout": 0.4},
}


def adaptive_span(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 12,
    span: Size = 8192,
    ramp: Size = 32,
    cost: NotNegative = 5e-7,
    start: Part | None = None,
    dynamic: bool = False,
    itself: bool = False,
    hidden: Size | None = None,
    vocabulary: Size = 256,
    dropout: Share = 0.3,
) -> Model:
    """`start` is the part of the longest span that heads begin with: 0, dynamic ones 0.1."""
    score_mod: ScoreMod = Span(span, ramp, cost, start or 0.0)
    if dynamic:
        score_mod = DynamicSpan(width, span, ramp, cost, 0.1 if start is None else start)
    attention = Attention(
        Standard(heads or max(1, width // 64), merge_bias=False),
        Causal() if itself else Causal() & ~Window(1),
        (Shaw(span, future=False, shared=True), score_mod),
        dropout,
    )
    net = FeedForward(hidden or 4 * width, dropout=dropout)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        body=Stack(layers, (Layer(attention, net),), PostNorm()),
        outputs=(Language(tied=False, bias=True),),
        memory=span,
    )
