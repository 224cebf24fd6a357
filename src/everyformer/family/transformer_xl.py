"""Paper: Dai et al. 2019, Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context.

Equations: post-norm causal blocks without biases in the attention, the four-term score over sinusoids of distance, keys
and values from [memory; segment], an embedding scaled by sqrt(D) and shared with the output.
Symbols: `memory` M (mem_len), `sinusoids` the width of r, `reach` clamp_len; `same_length` lets every position see equally
far back, the memory's length. A segment is as long as the memory unless the task says otherwise.
Departures: plain embeddings and softmax where the paper has adaptive ones for words. On WikiText-103 that changes the count
of the base by some thousands (its clusters are all 410 wide), the large one has 520M instead of 257M, of which 245M are the
layers of both. The paper states 88M for 18 layers on enwik8 and not how wide they are; 608 comes near. In training the
published code drops parts of r, and of the last layer's output; here neither.
"""

from __future__ import annotations

from typing import Any

from everyformer.attention.four_term import FourTerm
from everyformer.attention.pattern import Causal, Window
from everyformer.attention.projection import Standard
from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.residual import PostNorm
from everyformer.value import Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "memory": 64},
    "enwik8-12": {"width": 512, "heads": 8, "layers": 12, "memory": 512},
    "enwik8-18": {"width": 608, "heads": 8, "layers": 18, "memory": 768},
    "enwik8-24": {"width": 1024, "heads": 8, "layers": 24, "memory": 768, "hidden": 3072, "dropout": 0.15},
    "wikitext": {"width": 410, "heads": 10, "layers": 16, "memory": 150, "hidden": 2100, "vocabulary": 267735},
    "wikitext-large": {
        "width": 1024, "heads": 16, "layers": 18, "memory": 384, "vocabulary": 267735, "dropout": 0.2,
    },
}  # fmt: skip


def transformer_xl(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 12,
    memory: Size = 512,
    hidden: Size | None = None,
    vocabulary: Size = 256,
    sinusoids: Size | None = None,
    reach: Size | None = None,
    same_length: bool = False,
    dropout: Share = 0.1,
) -> Model:
    attention = Attention(
        Standard(heads or max(1, width // 64), merge_bias=False),
        Causal() & Window(memory) if same_length else Causal(),
        (FourTerm(sinusoids or width, reach),),
    )
    net = FeedForward(hidden or 4 * width, dropout=dropout)
    return Model(
        width=width,
        embed=Tokens(vocabulary, scaled=True),
        dropout=dropout,
        body=Stack(layers, (Layer((attention, net)),), PostNorm(dropout=dropout)),
        outputs=(Language(bias=True),),
        memory=SegmentMemory(memory),
        initial=Normal(0.02),
    )
