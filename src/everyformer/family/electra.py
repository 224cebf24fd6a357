"""Paper: Clark et al. 2020, ELECTRA: Pre-training Text Encoders as Discriminators Rather Than Generators.

Equations: an encoder as BERT tells for each token whether it was replaced; in training a small generator of the same form, a masked
language model, replaces masked tokens by its samples (network/generator.py). Both share the embedding; where it is narrower than a
layer, a linear map widens it. Only the discriminator is used afterwards.
Symbols: `width` H, `embed_width` E, `generator` the size of the generator as a share of the width, the heads and the hidden layer.
Departures: none known.
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
from everyformer.network.output_head import Masked, OutputHead, ReplacedToken
from everyformer.network.position import Learned
from everyformer.network.residual import PostNorm
from everyformer.value import PositivePart, Share, Size


def electra(
    width: Size = 768, heads: Size | None = None, layers: Size = 12, hidden: Size | None = None, embed_width: Size | None = None,
    context: Size = 512, vocabulary: Size = 30522, dropout: Share = 0.1, generator: PositivePart | None = 0.25,
) -> Model:  # fmt: skip
    heads, hidden, inner = heads or max(1, width // 64), hidden or 4 * width, embed_width or width

    def encoder(share: float, head: OutputHead, generates: Model | None = None) -> Model:
        count, norm = max(1, round(heads * share)), LayerNorm(1e-12)
        own = width // heads * count
        attention = Attention(Standard(count, bias=True), Full(), dropout=dropout)
        body = Stack(layers, (Layer((attention, FeedForward(round(hidden * share), "gelu"))),), PostNorm(norm, dropout))
        return Model(
            width=own, embed=Tokens(vocabulary), position=Learned(context), segments=2, norm=norm, dropout=dropout, body=body,
            embed_width=None if own == inner else inner, outputs=(head,), generator=generates, initial=Normal(0.02),
        )  # fmt: skip

    generates = encoder(generator, Masked(width=inner)) if generator else None
    return encoder(1.0, ReplacedToken(), generates)


COUNTED = "the paper counts the discriminator alone; here with the generator, which shares the embedding and serves training only"
MEMBER = Member(
    "electra",
    "Clark et al. 2020",
    idea=(
        "An encoder learns to tell which tokens of a text were replaced by a small masked language model. "
        "It learns from every token, and not only from the masked ones."
    ),
    make=electra,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "embed_width": 16, "context": 64, "vocabulary": 256},
        "small": {"width": 256, "heads": 4, "layers": 12, "embed_width": 128},
        "base": {"width": 768, "layers": 12, "generator": 1 / 3},
        "large": {"width": 1024, "layers": 24},
    },
    size="base",
    paper_parameters={"small": 14, "base": 110, "large": 335},
    departures=dict.fromkeys(("small", "base", "large"), COUNTED),
)
