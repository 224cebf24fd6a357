"""Paper: Raffel et al. 2019, Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer.

Equations: an encoder and a decoder in pre-norm with RMSNorm; scores q k^T + b, without 1/sqrt(E), where b is a number per head and bucket
of distances that all layers of a side share, and cross-attention has none; no other positions and no biases; the shared table is also
the output, whose input is multiplied by D^-0.5. `gated` is T5 v1.1 with W_2 (gelu(W_1 x) * W_3 x), and has an output of its own.
Symbols: `width` d_model, `hidden` d_ff, `head_width` d_kv. Departures: the published code also drops out the output of either side and the
hidden layers of the nets.
"""

from __future__ import annotations

from msgspec.structs import replace

from everyformer.attention.pattern import Causal, Full
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import T5Bias
from everyformer.family.member import Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import FanIn
from everyformer.network.layer import Layer
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention, CrossAttention
from everyformer.network.norm import RMSNorm
from everyformer.network.output_head import Language
from everyformer.network.residual import PreNorm
from everyformer.value import Share, Size


def t5(
    width: Size = 768, heads: Size | None = None, layers: Size = 12, hidden: Size | None = None, head_width: Size = 64,
    vocabulary: Size = 32128, gated: bool = False, dropout: Share = 0.1,
) -> EncoderDecoder:  # fmt: skip
    heads = heads or max(1, width // head_width)
    projection = Standard(heads, key_width=head_width, value_width=head_width, merge_bias=False, scale=1.0)
    net = FeedForward(hidden or 4 * width, "gelu_tanh" if gated else "relu", gated=gated, bias=False)
    both_sides, past = (T5Bias(bidirectional=both, shared=True) for both in (True, False))
    own, residual = Layer((Attention(projection, Full(), (both_sides,), dropout), net)), PreNorm(RMSNorm(), dropout)
    encoder = Model(
        width=width, embed=Tokens(vocabulary), dropout=dropout, body=Stack(layers, (own,), residual), initial=FanIn()
    )
    cross = CrossAttention(projection, dropout=dropout)
    layer = Layer((Attention(projection, Causal(), (past,), dropout), cross, net))
    outputs = (Language(tied=not gated, scaled=not gated),)
    decoder = replace(encoder, body=Stack(layers, (layer,), residual), outputs=outputs)
    return EncoderDecoder(encoder=encoder, decoder=decoder, share_embedding=True)


V11 = ("v1.1-small", "v1.1-base", "v1.1-large", "v1.1-xl", "v1.1-xxl")  # released later, without a paper
ROUNDED = "the paper rounds; the released model has the same count as here"
MEMBER = Member(
    "t5",
    "Raffel et al. 2019",
    idea=(
        "Every task is text to text, for one encoder and decoder. It is pretrained on text in which short spans are replaced by marks: "
        "the decoder writes the missing spans."
    ),
    make=t5,
    sizes={
        "tiny": {"width": 64, "heads": 4, "head_width": 16, "layers": 2, "hidden": 128, "vocabulary": 256},
        "small": {"width": 512, "layers": 6},
        "base": {"width": 768, "layers": 12},
        "large": {"width": 1024, "layers": 24},
        "3b": {"width": 1024, "heads": 32, "head_width": 128, "layers": 24, "hidden": 16384},
        "11b": {"width": 1024, "heads": 128, "head_width": 128, "layers": 24, "hidden": 65536},
        "v1.1-small": {"width": 512, "heads": 6, "layers": 8, "hidden": 1024, "gated": True},
        "v1.1-base": {"width": 768, "layers": 12, "hidden": 2048, "gated": True},
        "v1.1-large": {"width": 1024, "layers": 24, "hidden": 2816, "gated": True},
        "v1.1-xl": {"width": 2048, "layers": 24, "hidden": 5120, "gated": True},
        "v1.1-xxl": {"width": 4096, "layers": 24, "hidden": 10240, "gated": True},
    },
    size="base",
    task="denoise",
    paper_parameters={"small": 60, "base": 220, "large": 770, "3b": 2800, "11b": 11000} | dict.fromkeys(V11),
    departures=dict.fromkeys(("small", "base", "large", "3b", "11b"), ROUNDED),
)
