"""Paper: Dai et al. 2019, Transformer-XL: Attentive Language Models Beyond a Fixed-Length Context.

Equations: post-norm causal layers without biases in the attention, the four-term score over sinusoids of the distance, keys and
values from [memory; segment], an embedding scaled by sqrt(D) and tied to the output.
Symbols: `memory` M (mem_len); `four_term` the score, whose `max_distance` is clamp_len. The published option same_length, with which
every query attends equally far back, is `pattern=causal & window(M)`. A segment is as long as the memory unless the task sets it.
Departures: plain embeddings and softmax where the paper has adaptive ones for words. In training the published code applies
dropout to r and to the output of the last layer; here neither.
"""

from __future__ import annotations

from everyformer.attention.four_term import FourTerm
from everyformer.attention.pattern import Causal, Pattern
from everyformer.attention.projection import Standard
from everyformer.family.member import NO_DROPOUT, Member
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


def transformer_xl(
    width: Size = 512, heads: Size | None = None, layers: Size = 12, memory: Size = 512, hidden: Size | None = None,
    pattern: Pattern = Causal(), four_term: FourTerm | None = None, vocabulary: Size = 256, dropout: Share = 0.1,
) -> Model:  # fmt: skip
    projection = Standard(heads or max(1, width // 64), merge_bias=False)
    attention = Attention(projection, pattern, (four_term or FourTerm(width),))
    layer = Layer((attention, FeedForward(hidden or 4 * width, dropout=dropout)))
    return Model(
        width=width,
        embed=Tokens(vocabulary, scaled=True),
        dropout=dropout,
        body=Stack(layers, (layer,), PostNorm(dropout=dropout)),
        outputs=(Language(bias=True),),
        memory=SegmentMemory(memory),
        initial=Normal(0.02),
    )


MEMBER = Member(
    "transformer-xl",
    "Dai et al. 2019",
    idea=(
        "A language model reads a text segment by segment and attends to the hidden states of the segments before. "
        "Scores depend on the distance of two tokens, not on their positions, so that states can be reused."
    ),
    make=transformer_xl,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "memory": 64},
        "enwik8-12": {"width": 512, "heads": 8, "layers": 12, "memory": 512},
        "enwik8-18": {"width": 608, "heads": 8, "layers": 18, "memory": 768},
        "enwik8-24": {"width": 1024, "heads": 8, "layers": 24, "memory": 768, "hidden": 3072, "dropout": 0.15},
        "wikitext": {"width": 410, "heads": 10, "layers": 16, "memory": 150, "hidden": 2100, "vocabulary": 267735},
        "wikitext-large": {
            "width": 1024, "heads": 16, "layers": 18, "memory": 384, "vocabulary": 267735, "dropout": 0.2,
        },
    },
    size="enwik8-12",
    recipes={"tiny": NO_DROPOUT},
    paper_parameters={"enwik8-12": 41, "enwik8-18": 88, "enwik8-24": 277, "wikitext": 151, "wikitext-large": 257},
    departures={
        "enwik8-18": "the paper does not state the width; 608 comes near its count",
        "wikitext": "plain embeddings; the paper's adaptive clusters are all 410 wide and change the count by thousands",
        "wikitext-large": "plain embeddings here, adaptive ones in the paper; 245M are in the layers of both",
    },
)  # fmt: skip
