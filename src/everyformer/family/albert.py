"""Paper: Lan et al. 2019, ALBERT: A Lite BERT for Self-supervised Learning of Language Representations.

Equations: BERT with a narrow embedding (tokens, segments, positions and their norm) and a linear map to the width of the model, and one
layer that is repeated; GELU in its tanh form. The head of masked tokens is as narrow as the embedding, whose table it shares.
Symbols: `width` H, `embed_width` E, `layers` L, the number of times that the layer is repeated. Departures: none known; the head of
sentence order is there, and pretraining here uses it for the next sentence.
"""

from __future__ import annotations

from everyformer.attention.pattern import Full
from everyformer.attention.projection import Standard
from everyformer.family.member import Member
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.norm import LayerNorm
from everyformer.network.output_head import Classify, Masked
from everyformer.network.position import Learned
from everyformer.network.repeat import Repeat
from everyformer.network.residual import PostNorm
from everyformer.value import Few, Share, Size


def albert(
    width: Size = 768, heads: Size | None = None, layers: Few = 12, hidden: Size | None = None, embed_width: Size = 128,
    context: Size = 512, vocabulary: Size = 30000, dropout: Share = 0.0,
) -> Model:  # fmt: skip
    attention = Attention(Standard(heads or max(1, width // 64), bias=True), Full(), dropout=dropout)
    net, norm = FeedForward(hidden or 4 * width, "gelu_tanh"), LayerNorm(1e-12)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Learned(context),
        segments=2,
        embed_width=embed_width,
        norm=norm,
        dropout=dropout,
        body=Repeat(layers, (Layer((attention, net)),), PostNorm(norm, dropout)),
        outputs=(Masked(width=embed_width, activation="gelu_tanh"), Classify(2, "first", pooler=True)),
        initial=Normal(0.02),
    )


ROUNDED = "the paper rounds; the released model has the same count as here"
MEMBER = Member(
    "albert",
    "Lan et al. 2019",
    idea=(
        "An encoder like BERT with a tenth of the parameters: all layers share their weights, and the embedding is narrow. "
        "A linear map widens it to the width of the layers."
    ),
    make=albert,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "embed_width": 16, "context": 64, "vocabulary": 256},
        "base": {"width": 768, "layers": 12},
        "large": {"width": 1024, "layers": 24},
        "xlarge": {"width": 2048, "heads": 16, "layers": 24},
        "xxlarge": {"width": 4096, "layers": 12},
    },
    size="base",
    paper_parameters={"base": 12, "large": 18, "xlarge": 60, "xxlarge": 235},
    departures={
        "xlarge": ROUNDED,
        "xxlarge": "the released model has 223M, as here",
        "base": ROUNDED,
        "large": ROUNDED,
    },
)
