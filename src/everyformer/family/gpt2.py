"""Paper: Radford et al. 2019, Language Models are Unsupervised Multitask Learners.

Equations: pre-norm causal layers and a final norm, learned positions, GELU (its tanh form), an embedding tied to the output; the
maps that end a residual branch are initialized smaller by the square root of their number.
Departures: none known.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal
from everyformer.attention.projection import Standard
from everyformer.family.member import NO_DROPOUT, Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.position import Learned
from everyformer.network.residual import PreNorm
from everyformer.value import Share, Size


def gpt2(
    width: Size = 768,
    heads: Size | None = None,
    layers: Size = 12,
    context: Size = 1024,
    vocabulary: Size = 50257,
    dropout: Share = 0.1,
) -> Model:
    attention = Attention(Standard(heads or max(1, width // 64), bias=True), Causal(), dropout=dropout)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Learned(context),
        dropout=dropout,
        body=Stack(layers, (Layer((attention, FeedForward(4 * width, "gelu_tanh"))),), PreNorm(dropout=dropout)),
        outputs=(Language(),),
        initial=Normal(0.02, by_depth=True),
    )


RELEASED = "the paper's table is known to be wrong; the released weights have the same count as here"
MEMBER = Member(
    "gpt2",
    "Radford et al. 2019",
    idea=(
        "A causal Transformer is trained on a large text to predict the next token. "
        "The norm stands before each sublayer, so that deep stacks train well."
    ),
    make=gpt2,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "vocabulary": 256},
        "small": {"width": 768, "layers": 12},
        "medium": {"width": 1024, "layers": 24},
        "large": {"width": 1280, "layers": 36},
        "xl": {"width": 1600, "layers": 48},
    },
    size="small",
    recipes={"tiny": NO_DROPOUT},
    paper_parameters={"small": 117, "medium": 345, "large": 762, "xl": 1542},
    departures={"small": RELEASED, "medium": RELEASED, "large": RELEASED, "xl": RELEASED},
)
