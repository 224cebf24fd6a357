"""Source: Bloem 2019 (source B), Transformers from scratch: the byte language model and the sequence classifier.

Equations: post-norm layers, learned positions, projections without biases except in the merge of the heads; the classifier averages
the last layer. Symbols: `width` k, `heads` h, `layers` depth, `context` seq_length.
Departures: heads are D/H wide, as in the text of the source (its code shows the wide form, `Wide`); the classifier's mean skips
padding, and its weights are initialized with the std 0.02: with that of 1, as in the source, embeddings of rare words hardly change.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal, Full
from everyformer.attention.projection import Standard
from everyformer.family.member import Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Classify, Language
from everyformer.network.position import Learned
from everyformer.network.residual import PostNorm
from everyformer.value import Share, Size


def byte_language(
    width: Size = 256,
    heads: Size | None = None,
    layers: Size = 12,
    context: Size = 256,
    vocabulary: Size = 256,
    dropout: Share = 0.0,
) -> Model:
    layer = Layer((Attention(Standard(heads or 8), Causal()), FeedForward(4 * width, "relu", dropout=0.0)))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Learned(context),
        dropout=dropout,
        body=Stack(layers, (layer,), PostNorm(dropout=dropout)),
        outputs=(Language(tied=False, bias=True),),
    )


def byte_classifier(
    width: Size = 128,
    heads: Size | None = None,
    layers: Size = 6,
    context: Size = 512,
    vocabulary: Size = 50000,
    classes: Size = 2,
    dropout: Share = 0.0,
) -> Model:
    layer = Layer((Attention(Standard(heads or 8), Full()), FeedForward(4 * width, "relu", dropout=0.0)))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Learned(context),
        dropout=dropout,
        body=Stack(layers, (layer,), PostNorm(dropout=dropout)),
        outputs=(Classify(classes, "mean"),),
        initial=Normal(0.02),
    )


LANGUAGE = Member(
    "byte-language",
    "Bloem 2019",
    idea="A causal Transformer predicts the next byte of a text. It is the smallest complete language model of the family.",
    make=byte_language,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64},
        "paper": {"width": 256, "heads": 8, "layers": 12, "context": 256},
    },
    size="paper",
    paper_parameters={"paper": None},
)
CLASSIFIER = Member(
    "byte-classifier",
    "Bloem 2019",
    idea=(
        "A Transformer without a mask reads a whole sequence, and the mean of its outputs is classified. "
        "Every position attends to every other one."
    ),
    make=byte_classifier,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "vocabulary": 256},
        "paper": {"width": 128, "heads": 8, "layers": 6, "context": 512, "vocabulary": 50000},
    },
    size="paper",
    paper_parameters={"paper": None},
)
