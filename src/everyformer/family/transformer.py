"""Paper: Vaswani et al. 2017, Attention Is All You Need.

Equations: multi-head attention, post-norm residuals, LN(x + f(x)); sinusoids added to sqrt(D) times the embedding,
which both sides and the output share. Symbols: width d_model, hidden d_ff, heads h, layers N.
Departures: none known. The paper's count for base, 65M, is of a vocabulary it does not state exactly; with 37,000
tokens base has 63M and big 214M (the paper: 213M).
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from everyformer.attention.pattern import Causal, Full
from everyformer.attention.projection import Standard
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Xavier
from everyformer.network.layer import Layer
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention, CrossAttention
from everyformer.network.output_head import Language
from everyformer.network.residual import PostNorm
from everyformer.network.sinusoid import Sinusoidal
from everyformer.value import Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "vocabulary": 256},
    "base": {"width": 512, "heads": 8, "layers": 6},
    "big": {"width": 1024, "heads": 16, "layers": 6, "dropout": 0.3},
}


def transformer(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 6,
    hidden: Size | None = None,
    vocabulary: Size = 37000,
    dropout: Share = 0.1,
) -> EncoderDecoder:
    attention = Attention(heads=Standard(heads or max(1, width // 64), merge_bias=False), pattern=Full())
    masked = Attention(heads=attention.heads, pattern=Causal())
    feedforward = FeedForward(hidden or 4 * width, "relu")
    residual = PostNorm(dropout=dropout)
    side = Model(
        width=width,
        embed=Tokens(vocabulary, scaled=True),
        position=Sinusoidal(),
        dropout=dropout,
        body=Stack(layers, (Layer((attention, feedforward)),), residual),
        initial=Xavier(),
    )
    decoder = Stack(layers, (Layer((masked, CrossAttention(attention.heads), feedforward)),), residual)
    return EncoderDecoder(
        encoder=side, decoder=replace(side, body=decoder, outputs=(Language(),)), share_embedding=True
    )
