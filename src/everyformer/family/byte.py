"""Source: Bloem, Transformers from scratch (B): the byte language model and the sequence classifier.

Equations: post-norm blocks, learned positions, heads without biases but for the merge; the classifier averages the last
layer. Symbols: width k, heads h, layers depth, context seq_length.
Departures: heads are D/H wide (B's text; its code shows the wide form, `Wide`); the classifier's mean leaves padding
out.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal, Full, Pattern
from everyformer.attention.projection import Standard
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Classify, Language, OutputHead
from everyformer.network.position import Learned
from everyformer.network.residual import PostNorm
from everyformer.value import Share, Size

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
    head: OutputHead,
    width: Size,
    heads: Size | None,
    layers: Size,
    context: Size,
    vocabulary: Size,
    dropout: Share,
) -> Model:
    layer = Layer((Attention(Standard(heads or 8), pattern), FeedForward(4 * width, "relu", dropout=0.0)))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Learned(context),
        dropout=dropout,
        body=Stack(layers, (layer,), PostNorm(dropout=dropout)),
        outputs=(head,),
    )


def byte_language(
    width: Size = 256,
    heads: Size | None = None,
    layers: Size = 12,
    context: Size = 256,
    vocabulary: Size = 256,
    dropout: Share = 0.0,
) -> Model:
    return _model(Causal(), Language(tied=False, bias=True), width, heads, layers, context, vocabulary, dropout)


def byte_classifier(
    width: Size = 128,
    heads: Size | None = None,
    layers: Size = 6,
    context: Size = 512,
    vocabulary: Size = 50000,
    classes: Size = 2,
    dropout: Share = 0.0,
) -> Model:
    return _model(Full(), Classify(classes, "mean"), width, heads, layers, context, vocabulary, dropout)
