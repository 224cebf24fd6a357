"""Paper: Vaswani et al. 2017, Attention Is All You Need.

Equations: multi-head attention, post-norm residuals LN(x + f(x)); sinusoidal positions added to sqrt(D) times the embedding,
which the encoder, the decoder and the output share. Symbols: `width` d_model, `hidden` d_ff, `heads` h, `layers` N.
Departures: none known.
"""

from __future__ import annotations

from msgspec.structs import replace

from everyformer.attention.pattern import Causal, Full
from everyformer.attention.projection import Standard
from everyformer.family.member import Member
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


def transformer(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 6,
    hidden: Size | None = None,
    vocabulary: Size = 37000,
    dropout: Share = 0.1,
) -> EncoderDecoder:
    projection = Standard(heads or max(1, width // 64), merge_bias=False)
    net, residual = FeedForward(hidden or 4 * width, "relu"), PostNorm(dropout=dropout)
    body = Stack(layers, (Layer((Attention(projection, Full()), net)),), residual)
    encoder = Model(
        width=width, embed=Tokens(vocabulary, scaled=True), position=Sinusoidal(), dropout=dropout, body=body, initial=Xavier()
    )  # fmt: skip
    decoder_layer = Layer((Attention(projection, Causal()), CrossAttention(projection), net))
    decoder = replace(encoder, body=Stack(layers, (decoder_layer,), residual), outputs=(Language(),))
    return EncoderDecoder(encoder=encoder, decoder=decoder, share_embedding=True)


VOCABULARY = 'the paper states "about 37000" tokens and not the exact number; here 37,000'
MEMBER = Member(
    "transformer",
    "Vaswani et al. 2017",
    idea=(
        "An encoder and a decoder translate a sequence with attention alone, without recurrence or convolution. "
        "The decoder attends to its own earlier positions and to all positions of the encoder."
    ),
    make=transformer,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "vocabulary": 256},
        "base": {"width": 512, "heads": 8, "layers": 6},
        "big": {"width": 1024, "heads": 16, "layers": 6, "dropout": 0.3},
    },
    size="base",
    paper_parameters={"base": 65, "big": 213},
    departures={"base": VOCABULARY, "big": VOCABULARY},
)
