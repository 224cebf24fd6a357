"""Source: Bloem, Transformers from scratch (B): the byte language model and the sequence classifier.

Equations: post-norm blocks, learned positions, heads without biases but for the merge; the classifier averages the last
layer. Symbols: width k, heads h, layers depth, context seq_length.
Departures: heads are D/H wide (B's text; its code shows the wide form, `Wide`); the classifier's mean leaves padding
out.
"""

from __future__ import annotations

from everyformer.attention.heads import Standard
from everyformer.attention.pattern import Causal, Full, Pattern
from everyformer.network.depth import Attention, Layer, Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.head import Classify, Head, Language
from everyformer.network.model import Model
from everyformer.network.position import Learned
from everyformer.network.wiring import PostNorm

LANGUAGE_SIZES = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64},
    "paper": {"width": 256, "heads": 8, "layers": 12, "context": 256},
}
CLASSIFIER_SIZES = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "vocabulary": 256},
    "paper": {"width": 128, "heads": 8, "layers": 6, "context": 512, "vocabulary": 50000},
}


def _model(
    pattern: Pattern,
    head: Head,
    width: int,
    heads: int,
    layers: int,
    context: int,
    vocabulary: int,
    dropout: float,
) -> Model:
    layer = Layer(Attention(Standard(heads), pattern), FeedForward(4 * width, "relu", dropout=0.0))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Learned(context),
        dropout=dropout,
        body=Stack(layers, (layer,), PostNorm(dropout=dropout)),
        heads=(head,),
    )


def byte_language(
    width: int = 256,
    heads: int = 8,
    layers: int = 12,
    context: int = 256,
    vocabulary: int = 256,
    dropout: float = 0.0,
) -> Model:
    return _model(Causal(), Language(tied=False, bias=True), width, heads, layers, context, vocabulary, dropout)


def byte_classifier(
    width: int = 128,
    heads: int = 8,
    layers: int = 6,
    context: int = 512,
    vocabulary: int = 50000,
    classes: int = 2,
    dropout: float = 0.0,
) -> Model:
    return _model(Full(), Classify(classes, "mean"), width, heads, layers, context, vocabulary, dropout)
