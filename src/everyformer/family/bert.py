"""Paper: Devlin et al. 2018, BERT.

Equations: the Transformer's encoder with learned positions, two segments and a norm of their sum; GELU; output heads for the masked
tokens and for the next sentence, the latter through a tanh pooler on the first token.
Symbols: `width` H, `heads` A, `layers` L. Departures: none known.
"""

from __future__ import annotations

from everyformer.attention.pattern import Full
from everyformer.attention.projection import Standard
from everyformer.family.member import Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.norm import LayerNorm
from everyformer.network.output_head import Classify, Masked
from everyformer.network.position import Learned
from everyformer.network.residual import PostNorm
from everyformer.value import Share, Size


def bert(
    width: Size = 768, heads: Size | None = None, layers: Size = 12, context: Size = 512, vocabulary: Size = 30522,
    dropout: Share = 0.1,
    hidden: Size | None = None,
) -> Model:  # fmt: skip
    attention = Attention(Standard(heads or max(1, width // 64), bias=True), Full(), dropout=dropout)
    norm = LayerNorm(1e-12)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Learned(context),
        segments=2,
        norm=norm,
        dropout=dropout,
        body=Stack(layers, (Layer((attention, FeedForward(hidden or 4 * width, "gelu"))),), PostNorm(norm, dropout)),
        outputs=(Masked(), Classify(2, "first", pooler=True)),
        initial=Normal(0.02),
    )


MEMBER = Member(
    "bert",
    "Devlin et al. 2018",
    idea=(
        "An encoder learns from text in which some tokens are masked, and sees the context on both sides of them. "
        "It is then fine-tuned for other tasks."
    ),
    make=bert,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "vocabulary": 256},
        "base": {"width": 768, "heads": 12, "layers": 12},
        "large": {"width": 1024, "heads": 16, "layers": 24},
    },
    size="base",
    paper_parameters={"base": 110, "large": 340},
    departures={"large": "the paper rounds; the released model has 336M, as here"},
)
