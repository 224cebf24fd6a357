"""Paper: Dehghani et al. 2019, Universal Transformers.

Equations: one layer again and again, A^t = LN((H + P^t) + MHA(H + P^t)), H^t = LN(A^t + Transition(A^t)), P^t sinusoids of the
position and of the step, added; the transition a feed-forward net or a depthwise-separable convolution (causal in a decoder).
`halting` says when a position has had enough: `fixed` after all steps, or by adaptive computation time: `freeze` (what the
paper says: its state is copied until all have halted), `graves`, `t2t` (what its published code does); network/halting.py has
the equations. Decoder-only without `encoder`; with it both sides are recurrent, and the decoder attends to H^T.
Symbols: `steps` T, the limit where there is halting; `cost` tau, `bias` b_h, `dropout` of each sublayer's answer.
Departures: the published code learns a vector for each step; the paper's P^t, and this, are sinusoids. Sizes are tensor2tensor's:
`base` is the paper's translation model (65M stated for the Transformer it is compared with), with 37,000 tokens; `language` the
same decoder for bytes, with the limit of 12 steps that the code has for halting.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec.structs import replace

from everyformer.attention.pattern import Causal, Full, Pattern
from everyformer.attention.projection import Standard
from everyformer.network.convolution import Convolution
from everyformer.network.depth import Depth
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Xavier
from everyformer.network.layer import Layer
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention, CrossAttention
from everyformer.network.output_head import Language
from everyformer.network.repeat import Halt, Repeat
from everyformer.network.residual import PostNorm
from everyformer.network.sinusoid import TimePosition
from everyformer.value import NotNegative, Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "heads": 4, "steps": 4},
    "tiny-pair": {"width": 64, "heads": 4, "steps": 3, "encoder": True},
    "language": {"width": 1024, "heads": 16, "steps": 12},
    "base": {"width": 1024, "heads": 16, "steps": 6, "encoder": True, "halting": "fixed", "vocabulary": 37000},
}


def universal_transformer(
    width: Size = 1024,
    heads: Size | None = None,
    steps: Size = 12,
    hidden: Size | None = None,
    transition: Literal["feedforward", "convolution"] = "feedforward",
    halting: Literal["fixed", "freeze", "graves", "t2t"] = "freeze",
    cost: NotNegative = 0.01,
    bias: float = 1.0,
    encoder: bool = False,
    vocabulary: Size = 256,
    dropout: Share = 0.1,
) -> Model | EncoderDecoder:
    form = Standard(heads or max(1, width // 64), merge_bias=False)

    def depth(pattern: Pattern, causal: bool, cross: bool = False) -> Depth:
        net = (
            FeedForward(hidden or 4 * width)
            if transition == "feedforward"
            else Convolution(hidden or 4 * width, causal=causal)
        )
        attentions = (Attention(form, pattern), *((CrossAttention(form),) if cross else ()))
        each, residual = (Layer((*attentions, net)),), PostNorm(dropout=dropout)
        if halting == "fixed":
            return Repeat(steps, each, residual, TimePosition())
        return Halt(steps, each, residual, TimePosition(), halting, cost=cost, bias=bias)

    decoder = Model(
        width=width,
        embed=Tokens(vocabulary, scaled=True),
        dropout=dropout,
        body=depth(Causal(), True, encoder),
        outputs=(Language(),),
        initial=Xavier(),
    )
    if not encoder:
        return decoder
    side = replace(decoder, body=depth(Full(), False), outputs=())
    return EncoderDecoder(encoder=side, decoder=decoder, share_embedding=True)
