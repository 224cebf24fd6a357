"""Paper: Graves 2016, Adaptive Computation Time for Recurrent Neural Networks.

Equations: see network/ponder_rnn.py; an embedding before the net, a softmax after the mean of the states.
Symbols: `steps` M, `cost` tau (the paper's time penalty), `bias` b_h, `cell` S: the LSTM, or the plain tanh net of the paper's parity
task. With a `memory`, training and evaluation continue from the last state of the text before.
Departures: tokens are embedded; the paper's are one-hot. A step of training is as slow as its longest pondering; lower `steps` to
limit it.
"""

from __future__ import annotations

from typing import Literal

from everyformer.family.member import Member
from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.output_head import Language
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.residual import NoResidual
from everyformer.value import NotNegative, Share, Size


def act_rnn(
    width: Size = 1500,
    layers: Size = 1,
    steps: Size = 100,
    cell: Literal["rnn", "lstm"] = "lstm",
    cost: NotNegative = 0.01,
    bias: float = 1.0,
    memory: Size | None = None,
    vocabulary: Size = 256,
    dropout: Share = 0.0,
) -> Model:
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        dropout=dropout,
        body=Stack(layers, (Layer((PonderRnn(steps, cell, cost=cost, bias=bias),)),), NoResidual(dropout)),
        outputs=(Language(tied=False, bias=True),),
        memory=SegmentMemory(memory) if memory else None,
    )


MEMBER = Member(
    "act-rnn",
    "Graves 2016",
    idea="A recurrent net takes several steps on each input and learns when to stop. Every additional step adds a little to the loss.",
    make=act_rnn,
    sizes={"tiny": {"width": 64, "steps": 3}, "wikipedia": {"width": 1500, "steps": 100}},
    size="wikipedia",
    paper_parameters={"wikipedia": None},
    departures={"wikipedia": "one layer of 1,500 cells and a limit of 100 steps; not checked against the paper's text"},
)
