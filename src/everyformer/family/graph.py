"""Source: B's and K's remark that the edges of a graph are a sparsity pattern; Velickovic et al. 2017 for the task.

Equations: nodes are tokens with features, attention runs along the edges given to the call, every node is classified.
There are no positions: a graph has no order. Departures: dot-product attention where graph attention networks add.
"""

from __future__ import annotations

from typing import Any

from everyformer.attention.heads import Standard
from everyformer.attention.pattern import Graph
from everyformer.network.depth import Attention, Layer, Stack
from everyformer.network.embed import Features
from everyformer.network.feedforward import FeedForward
from everyformer.network.head import PerToken
from everyformer.network.model import Model
from everyformer.network.wiring import PreNorm
from everyformer.value import Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 32, "heads": 4, "layers": 2, "inputs": 16, "classes": 4},
    "cora": {"width": 64, "heads": 8, "layers": 2, "inputs": 1433, "classes": 7, "dropout": 0.6},
}


def graph(
    width: Size = 64,
    heads: Size | None = None,
    layers: Size = 2,
    inputs: Size = 1433,
    classes: Size = 7,
    dropout: Share = 0.5,
) -> Model:
    attention = Attention(Standard(heads or max(1, width // 8)), Graph(), dropout=dropout)
    layer = Layer(attention, FeedForward(4 * width, "gelu", dropout=dropout))
    return Model(
        width=width,
        embed=Features(inputs),
        dropout=dropout,
        body=Stack(layers, (layer,), PreNorm(dropout=dropout)),
        heads=(PerToken(classes),),
    )
