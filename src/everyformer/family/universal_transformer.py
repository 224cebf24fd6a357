"""Paper: Dehghani et al. 2019, Universal Transformers.

Equations: one layer repeated, A^t = LN((H + P^t) + MHA(H + P^t)), H^t = LN(A^t + Transition(A^t)), with P^t the sum of sinusoids of the
position and of the step. The transition is a feed-forward net, or a depthwise-separable convolution: `transition=Convolution(F)` in a
decoder, `encoder_transition=Convolution(F, causal=False)` in an encoder. With `halting` a position stops by adaptive computation
time: `freeze` (the paper: its state is copied until all have halted), `graves`, or `t2t` (the published code); the equations are in
network/repeat.py. None: all positions take all steps. With `encoder` both sides are recurrent, and the decoder attends to H^T.
Symbols: `steps` T, the limit if positions halt; `cost` tau, `bias` b_h, `dropout` that of each sublayer's output.
Departures: the published code learns a vector for each step; the paper's P^t, and this, are sinusoids. Sizes are tensor2tensor's.
"""

from __future__ import annotations

from msgspec.structs import replace

from everyformer.attention.pattern import Causal, Full
from everyformer.attention.projection import Standard
from everyformer.family.member import NO_DROPOUT, Member
from everyformer.network.act import Mode
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
from everyformer.network.sublayer import Sublayer
from everyformer.value import NotNegative, Share, Size


def universal_transformer(
    width: Size = 1024, heads: Size | None = None, steps: Size = 12, hidden: Size | None = None,
    transition: Sublayer | None = None, encoder_transition: Sublayer | None = None,
    halting: Mode | None = "freeze", cost: NotNegative = 0.01, bias: float = 1.0, encoder: bool = False,
    vocabulary: Size = 256, dropout: Share = 0.1,
) -> Model | EncoderDecoder:  # fmt: skip
    def depth(*sublayers: Sublayer) -> Depth:
        repeated = (steps, (Layer(sublayers),), PostNorm(dropout=dropout), TimePosition())
        return Halt(*repeated, halting, cost=cost, bias=bias) if halting else Repeat(*repeated)

    projection, net = Standard(heads or max(1, width // 64), merge_bias=False), FeedForward(hidden or 4 * width)
    cross = (CrossAttention(projection),) if encoder else ()
    body = depth(Attention(projection, Causal()), *cross, transition or net)
    decoder = Model(
        width=width, embed=Tokens(vocabulary, scaled=True), dropout=dropout, body=body, outputs=(Language(),), initial=Xavier()
    )  # fmt: skip
    if not encoder:
        return decoder
    body = depth(Attention(projection, Full()), encoder_transition or net)
    return EncoderDecoder(encoder=replace(decoder, body=body, outputs=()), decoder=decoder, share_embedding=True)


MEMBER = Member(
    "universal-transformer",
    "Dehghani et al. 2019",
    idea=(
        "One layer with the same weights is applied step after step, so that the depth is a number of steps. "
        "Each position may decide by itself when to halt."
    ),
    make=universal_transformer,
    sizes={
        "tiny": {"width": 64, "heads": 4, "steps": 4},
        "tiny-pair": {"width": 64, "heads": 4, "steps": 3, "encoder": True},
        "language": {"width": 1024, "heads": 16, "steps": 12},
        "base": {"width": 1024, "heads": 16, "steps": 6, "encoder": True, "halting": None, "vocabulary": 37000},
    },
    size="language",
    recipes={"tiny": NO_DROPOUT},
    paper_parameters={"language": None, "base": 65},
    departures={
        "language": "the decoder of base for bytes, with the published code's limit of 12 steps; not in the paper",
        "base": "the paper states 65M for the Transformer that it is compared with; here with 37,000 tokens",
    },
)
