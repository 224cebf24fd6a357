"""Papers: Hochreiter & Schmidhuber 1997 and Gers et al. 1999, the LSTM; Levy et al. 2018, what it does without its recurrence.

Equations: source T, 13-18 and 20-21 (see `everyformer.network.recurrent`), layer upon layer, an embedding before and a softmax
after. Symbols: `squash` is what T writes as sigma in 13 and 18; `squash=sigmoid bias=false` is T to the letter, `forget=false`
the LSTM of 1997. Dropout is between the layers, never on what goes from time to time (Zaremba et al. 2014).
Departures: tanh and biases unless told otherwise, as everybody trains them. `byte` has as many parameters as
`byte-language paper`; no paper has it. With a `memory` training and evaluation read on from the state that the text before left,
in segments of that many tokens (truncated backpropagation); without it every window begins with nothing.
"""

from __future__ import annotations

from typing import Any

from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Depth, Stack
from everyformer.network.embed import Tokens
from everyformer.network.layer import Layer
from everyformer.network.lstm import AblatedLstm, Activation, Lstm
from everyformer.network.model import Model
from everyformer.network.output_head import Language
from everyformer.network.residual import NoResidual
from everyformer.value import Share, Size

LSTM_SIZES: dict[str, dict[str, Any]] = {"tiny": {"width": 64, "layers": 2}, "byte": {"width": 624, "layers": 3}}
ABLATED_SIZES: dict[str, dict[str, Any]] = {"tiny": {"width": 64, "layers": 2}, "byte": {"width": 876, "layers": 4}}


def _model(body: Depth, width: Size, vocabulary: Size, memory: Size | None, dropout: Share) -> Model:
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        dropout=dropout,
        body=body,
        outputs=(Language(tied=False, bias=True),),
        memory=SegmentMemory(memory) if memory else None,
    )


def lstm(
    width: Size = 624,
    layers: Size = 3,
    activation: Activation = "tanh",
    forget: bool = True,
    bias: bool = True,
    memory: Size | None = None,
    vocabulary: Size = 256,
    dropout: Share = 0.0,
) -> Model:
    body = Stack(layers, (Layer((Lstm(activation, bias, forget=forget),)),), NoResidual(dropout))
    return _model(body, width, vocabulary, memory, dropout)


def ablated_lstm(
    width: Size = 876,
    layers: Size = 4,
    activation: Activation = "tanh",
    bias: bool = True,
    memory: Size | None = None,
    vocabulary: Size = 256,
    dropout: Share = 0.0,
) -> Model:
    body = Stack(layers, (Layer((AblatedLstm(activation, bias),)),), NoResidual(dropout))
    return _model(body, width, vocabulary, memory, dropout)
