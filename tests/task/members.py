"""Models of sets and graphs for the tests of tasks."""

from __future__ import annotations

from everyformer import Attention, Features, FeedForward, Full, Graph, Layer, Model, PerToken, PreNorm, Stack, Standard
from everyformer.network.output_head import Classify


def features(inputs: int = 3, classes: int = 3, width: int = 32) -> Model:
    """A model of sets: vectors without positions."""
    layer = Layer((Attention(Standard(4, bias=True), Full()), FeedForward(2 * width, "gelu")))
    return Model(
        width=width, embed=Features(inputs), body=Stack(2, (layer,), PreNorm()), outputs=(Classify(classes, "mean"),)
    )


def nodes(inputs: int = 3, classes: int = 3, width: int = 32) -> Model:
    """A model of graphs: attention along the edges, and a class for each node."""
    layer = Layer((Attention(Standard(4, bias=True), Graph()), FeedForward(2 * width, "gelu")))
    return Model(width=width, embed=Features(inputs), body=Stack(2, (layer,), PreNorm()), outputs=(PerToken(classes),))
