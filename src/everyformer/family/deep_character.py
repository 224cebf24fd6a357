"""Paper: Al-Rfou et al. 2018, Character-Level Language Modeling with Deeper Self-Attention.

Equations: causal layers of Vaswani et al., a learned table of positions added to the input of each layer, and auxiliary losses that
serve training alone: at every layer l of n until l/(2n) of the training is done, and for the token after the next with the
weight 1/2 (task/language.py), each with an output map of its own.
Symbols: `context` L; `auxiliary` the additional predictions. With them 64 layers have 235M parameters, without them 219M; 12 layers
have 44M and 41M. `dropout` is that of the attention weights and of the hidden layer of the feed-forward nets.
Departures: the paper trains with momentum, and evaluates the last position of each window only; here the window of an evaluation
moves by half its length, unless `--stride 1` is given.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal
from everyformer.attention.projection import Standard
from everyformer.family.member import NO_DROPOUT, Member
from everyformer.network.auxiliary import AuxiliaryPredictions
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Xavier
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.position import Learned
from everyformer.network.residual import PostNorm
from everyformer.value import Share, Size


def deep_character(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 64,
    context: Size = 512,
    hidden: Size | None = None,
    auxiliary: AuxiliaryPredictions | None = AuxiliaryPredictions(extra_targets=1, every_layer=True),
    vocabulary: Size = 256,
    dropout: Share = 0.55,
) -> Model:
    attention = Attention(Standard(heads or max(1, width // 64)), Causal(), dropout=dropout)
    layer = Layer((attention, FeedForward(hidden or 4 * width, dropout=dropout)), position=Learned(context))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        body=Stack(layers, (layer,), PostNorm()),
        outputs=(Language(tied=False),),
        auxiliary=auxiliary,
        initial=Xavier(),
    )


MEMBER = Member(
    "deep-character",
    "Al-Rfou et al. 2018",
    idea=(
        "A deep causal Transformer reads characters. "
        "Auxiliary losses at every layer and for an additional target make 64 layers trainable."
    ),
    make=deep_character,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "dropout": 0.1},
        "12": {"width": 512, "heads": 8, "layers": 12, "context": 512, "dropout": 0.2},
        "64": {"width": 512, "heads": 8, "layers": 64, "context": 512, "dropout": 0.55},
    },
    size="64",
    recipes={"tiny": NO_DROPOUT},
    paper_parameters={"12": 44, "64": 235},
)
