"""Papers: Hochreiter & Schmidhuber 1997 and Gers et al. 1999, the LSTM; Levy et al. 2018, the LSTM without its recurrence.

Equations: Thickstun (source T), 13-18 and 20-21 (see network/lstm.py), in a stack of layers, with an embedding before and a softmax
after. Symbols: `activation` is written sigma in equations 13 and 18; `activation=sigmoid bias=false` is source T to the letter,
`forget=false` the LSTM of 1997. Dropout stands between the layers, never on the recurrent state (Zaremba et al. 2014).
Departures: tanh and biases by default, as is usual. With a `memory`, training and evaluation continue from the last state of the
text before, in segments of that many tokens (truncated backpropagation); without it every window starts from an empty state.
"""

from __future__ import annotations

from everyformer.family.member import Member
from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.layer import Layer
from everyformer.network.lstm import AblatedLstm, Activation, Lstm
from everyformer.network.model import Model
from everyformer.network.output_head import Language
from everyformer.network.residual import NoResidual
from everyformer.value import Share, Size


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
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        dropout=dropout,
        body=Stack(layers, (Layer((Lstm(activation, bias, forget=forget),)),), NoResidual(dropout)),
        outputs=(Language(tied=False, bias=True),),
        memory=SegmentMemory(memory) if memory else None,
    )


def ablated_lstm(
    width: Size = 876,
    layers: Size = 4,
    activation: Activation = "tanh",
    bias: bool = True,
    memory: Size | None = None,
    vocabulary: Size = 256,
    dropout: Share = 0.0,
) -> Model:
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        dropout=dropout,
        body=Stack(layers, (Layer((AblatedLstm(activation, bias),)),), NoResidual(dropout)),
        outputs=(Language(tied=False, bias=True),),
        memory=SegmentMemory(memory) if memory else None,
    )


BYTE = "a size of our own, with as many parameters as byte-language paper"
MEMBER = Member(
    "lstm",
    "Hochreiter & Schmidhuber 1997",
    idea=(
        "A recurrent net carries a memory cell from token to token, and gates decide what is written, kept and read. "
        "It is the baseline that the Transformers are compared with."
    ),
    make=lstm,
    sizes={"tiny": {"width": 64, "layers": 2}, "byte": {"width": 624, "layers": 3}},
    size="byte",
    paper_parameters={"byte": None},
    departures={"byte": BYTE},
)
ABLATED = Member(
    "ablated-lstm",
    "Levy et al. 2018",
    idea=(
        "The LSTM without its hidden-to-hidden connections: gates depend on the input alone. "
        "What remains is a weighted sum over earlier inputs, close to attention."
    ),
    make=ablated_lstm,
    sizes={"tiny": {"width": 64, "layers": 2}, "byte": {"width": 876, "layers": 4}},
    size="byte",
    paper_parameters={"byte": None},
    departures={"byte": BYTE},
)
