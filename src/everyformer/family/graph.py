"""Source: the remark of Bloem 2019 (source B) and of source K that the edges of a graph are a sparsity pattern; Velickovic et al.
2017 for the task.

Equations: nodes are tokens with features, attention follows the edges given to the call, every node is classified. There are no
positions, because a graph has no order.
Departures: dot-product attention where graph attention networks add; a residual stream, initialized so small that the messages along
the edges outweigh it. With few labels the best results come without a feed-forward net (`hidden` None).
"""

from __future__ import annotations

from everyformer.attention.pattern import Graph
from everyformer.attention.projection import Standard
from everyformer.family.member import Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Features
from everyformer.network.feedforward import FeedForward
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import PerToken
from everyformer.network.residual import PreNorm
from everyformer.value import Share, Size


def graph(
    width: Size = 128,
    heads: Size | None = None,
    layers: Size = 2,
    inputs: Size = 1433,
    classes: Size = 7,
    hidden: Size | None = None,
    dropout: Share = 0.8,
) -> Model:
    attention = Attention(Standard(heads or max(1, width // 32)), Graph())
    nets = (FeedForward(hidden, "gelu", dropout=dropout),) if hidden else ()
    return Model(
        width=width,
        embed=Features(inputs, std=0.0015),
        dropout=dropout,
        body=Stack(layers, (Layer((attention, *nets)),), PreNorm(dropout=dropout)),
        outputs=(PerToken(classes),),
    )


MEMBER = Member(
    "graph-classifier",
    "Velickovic et al. 2017",
    idea=(
        "The nodes of a graph are tokens, and a node attends to its neighbours: the edges are the attention pattern. "
        "Every node is classified."
    ),
    make=graph,
    sizes={
        "tiny": {"width": 32, "heads": 4, "layers": 2, "inputs": 16, "classes": 4, "hidden": 128, "dropout": 0.5},
        "cora": {"width": 128, "heads": 4, "layers": 2, "inputs": 1433, "classes": 7},
    },
    size="cora",
    paper_parameters={"cora": None},
    departures={"cora": "dot-product attention with a residual stream, not the paper's additive attention"},
)
