"""Source: B's and K's remark that the edges of a graph are a sparsity pattern; Velickovic et al. 2017 for the task.

Equations: nodes are tokens with features, attention runs along the edges given to the call, every node is classified.
There are no positions: a graph has no order. Departures: dot-product attention where graph attention networks add; a
residual stream, which begins so small that what comes along the edges outweighs it. Few labels are learned best without a
feed-forward net (`hidden` 0).
"""

from __future__ import annotations

from typing import Any

from everyformer.attention.pattern import Graph
from everyformer.attention.projection import Standard
from everyformer.network.depth import Stack
from everyformer.network.embed import Features
from everyformer.network.feedforward import FeedForward
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import PerToken
from everyformer.network.residual import PreNorm
from everyformer.value import Count, Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 32, "heads": 4, "layers": 2, "inputs": 16, "classes": 4, "hidden": 128, "dropout": 0.5},
    "cora": {"width": 128, "heads": 4, "layers": 2, "inputs": 1433, "classes": 7},
}


def graph(
    width: Size = 128,
    heads: Size | None = None,
    layers: Size = 2,
    inputs: Size = 1433,
    classes: Size = 7,
    hidden: Count = 0,
    dropout: Share = 0.8,
) -> Model:
    net = FeedForward(hidden, "gelu", dropout=dropout) if hidden else None
    layer = Layer((Attention(Standard(heads or max(1, width // 32)), Graph()), *((net,) if net else ())))
    return Model(
        width=width,
        embed=Features(inputs, std=0.0015),
        dropout=dropout,
        body=Stack(layers, (layer,), PreNorm(dropout=dropout)),
        outputs=(PerToken(classes),),
    )
