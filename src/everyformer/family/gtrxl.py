"""Paper: Parisotto et al. 2019, Stabilizing Transformers for Reinforcement Learning (GTrXL, the gated Transformer-XL).

Equations: Transformer-XL's layers and memory (see transformer_xl.py) with the norm moved to what enters a sublayer and a gate where
the stream and its answer met by addition (network/wiring.py). It reads text, or, in the task control, observations.
Symbols: `gate` is g, `gate_bias` b_g where it begins (2 for gru, 1 for the others). The gates `none` (TrXL-I), `input`, `output`,
`highway`, `sigmoid_tanh` and `gru` are the paper's rows. With `episodes` a position sees its own episode alone, told by
`documents=`; between calls `Past.reset` begins sequences of the batch anew.
Departures: an embedding and a softmax of tokens instead of the vision and the heads of an agent, and a norm before
that softmax, without which small weights learn slowly. The paper's text has an embedding of 256, but the parameters it counts,
and 8 heads of 64 side by side, are those of 512; the hidden width is not stated, 1024 comes near its counts.
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from everyformer.attention.pattern import SameDocument
from everyformer.family.transformer_xl import transformer_xl
from everyformer.network.depth import Stack
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.residual import Gated, GateName
from everyformer.value import Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "memory": 64},
    "paper": {"width": 512, "heads": 8, "layers": 12, "memory": 512, "hidden": 1024},
}


def gtrxl(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 12,
    memory: Size = 512,
    hidden: Size | None = None,
    vocabulary: Size = 256,
    gate: GateName = "gru",
    gate_bias: float | None = None,
    episodes: bool = False,
    dropout: Share = 0.0,
) -> Model:
    base = transformer_xl(width, heads, layers, memory, hidden, vocabulary, dropout=dropout)
    (layer,) = base.body.layers
    attention, net = layer.sublayers
    if episodes and isinstance(attention, Attention):
        layer = Layer((replace(attention, pattern=attention.pattern & SameDocument()), net))
    return replace(base, body=Stack(layers, (layer,), Gated(gate, dropout=dropout, bias=gate_bias, final_norm=True)))
