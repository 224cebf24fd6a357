"""The feed-forward net: the same small network at every position.

Equations: W_2 act(W_1 x + b_1) + b_2 (Thickstun (source T) eq. 5; Weng 2020 (source W) writes it as convolutions of kernel 1);
gated, W_2 (act(W_1 x) * W_3 x) (Shazeer 2020: SwiGLU with silu, GeGLU with gelu). `relu_squared` is max(0, x)^2 (So et al. 2021).
`hidden_layers=2` puts a second hidden layer between (source K).
Symbols: F hidden width (m in source T), usually 4 D.
"""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.has_data import is_exporting
from everyformer.network.cache import Entry
from everyformer.network.sublayer import Sublayer, SublayerModule
from everyformer.value import Share, Size, Value

Activation = Literal["relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu_squared"]


class FeedForward(Sublayer, Value, frozen=True):
    """A net with `hidden` features inside, after each of its `hidden_layers` the `activation`. Example: `FeedForward(256)`.

    With `gated` the features are multiplied by a second map: SwiGLU is `FeedForward(256, "silu", gated=True)`. With `chunk`, it is
    computed for so many positions at a time, in less memory. `dropout` is on the features, and `bias`: the maps have biases.
    """

    hidden: Size
    activation: Activation = "relu"
    gated: bool = False
    hidden_layers: Size = 1
    chunk: Size | None = None
    dropout: Share = 0.0
    bias: bool = True

    def build(self, width: int) -> FeedForwardModule:
        return FeedForwardModule(width, self)


class FeedForwardModule(SublayerModule):
    pointwise: ClassVar[bool] = True

    def __init__(self, width: int, value: FeedForward):
        super().__init__()
        self.activation, self.gated, self.chunk = value.activation, value.gated, value.chunk
        widths = [width] + [value.hidden] * value.hidden_layers
        self.hidden = nn.ModuleList(
            nn.Linear(before, after * (2 if value.gated else 1), bias=value.bias) for before, after in pairwise(widths)
        )
        self.dropout = nn.Dropout(value.dropout)
        self.out = nn.Linear(value.hidden, width, bias=value.bias)

    def output_map(self) -> nn.Linear | None:
        return self.out

    def forward(
        self, x_BTD: Tensor, context: Context | None = None, entry: Entry | None = None
    ) -> tuple[Tensor, Entry | None]:
        if self.chunk is None or is_exporting():  # the number of chunks would be that of one length
            return self._net(x_BTD), None
        return torch.cat([self._net(part) for part in x_BTD.split(self.chunk, dim=1)], dim=1), None  # eq. W31

    def _net(self, x_BTD: Tensor) -> Tensor:
        x = x_BTD
        for layer in self.hidden:
            x = self._activate(layer(x))
        return self.out(self.dropout(x) if self.training else x)  # eq. T5, K6a

    def _activate(self, x: Tensor) -> Tensor:
        if self.gated:
            gate_BTF, x_BTF = x.chunk(2, dim=-1)
            return activate(gate_BTF, self.activation) * x_BTF
        return activate(x, self.activation)


def activate(x: Tensor, name: Activation) -> Tensor:
    if name == "relu":
        return F.relu(x)
    if name == "relu_squared":
        return F.relu(x).square()
    if name == "silu":
        return F.silu(x)
    if name == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
