"""Paper: Graves 2016, Adaptive Computation Time for Recurrent Neural Networks.

Equations: see `everyformer.network.ponder`; an embedding before, a softmax after the mean of the states. Symbols: `steps` M, `cost`
tau (the paper's time penalty), `bias` b_h, `cell` S: the LSTM, or the plain tanh net that the paper gives its parity task.
With a `memory` training and evaluation read on from the state that the text before left.
Departures: tokens are embedded, the paper's are one-hot. `wikipedia` is its text model, one layer of 1,500 cells with a limit of
100 steps, from memory and not checked against the paper. A step of such a net is as slow as its longest pondering: give a lower limit.
"""

from __future__ import annotations

from typing import Any, Literal

from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.output_head import Language
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.residual import NoResidual
from everyformer.value import NotNegative, Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "steps": 3},
    "wikipedia": {"width": 1500, "steps": 100},
}


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
