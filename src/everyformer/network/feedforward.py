"""The feed-forward net: the same small network for every token.

Equations: W_2 act(W_1 x + b_1) + b_2 (T eq. 5; as kernel-1 convolutions: W); gated, W_2 (act(W_1 x) * W_3 x)
(Shazeer 2020). `hidden_layers` of 2 puts a second hidden layer between (K).
Symbols: F hidden width (m in T), 4 D by custom.

A `Convolution` looks at its neighbours too (Dehghani et al. 2019; kernels and order as in tensor2tensor's code): twice a
depthwise convolution, sum_n w_n * x_{i - n} feature by feature, and a map; between the two an activation. Neighbours are by
position: padding is none, before the first and after the last token all is 0.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.value import Count, Share, Size, Value

Activation = Literal["relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu"]


class FeedForward(Value, frozen=True):
    """`hidden` numbers inside; `chunk` positions at a time (the same output in less memory)."""

    hidden: Size
    activation: Activation = "relu"
    gated: bool = False
    hidden_layers: Size = 1
    chunk: Size | None = None
    dropout: Share = 0.0
    bias: bool = True

    def build(self, width: int) -> FeedForwardModule:
        return FeedForwardModule(width, self)


class Convolution(Value, frozen=True):
    """Two depthwise-separable convolutions of so many taps; causal ones look back, the others to both sides."""

    hidden: Size
    activation: Activation = "relu"
    kernels: tuple[Size, Size] = (3, 5)
    causal: bool = True
    dropout: Share = 0.0

    @property
    def reach(self) -> Count:
        """How far back it looks."""
        return sum(self.kernels) - 2

    def build(self, width: int) -> ConvolutionModule:
        return ConvolutionModule(width, self)


class ConvolutionModule(nn.Module):
    def __init__(self, width: int, value: Convolution):
        super().__init__()
        self.value, self.dropout = value, nn.Dropout(value.dropout)
        first, second = value.kernels
        self.first_ND = nn.Parameter(torch.empty(first, width).uniform_(-(first**-0.5), first**-0.5))
        self.hidden = nn.Linear(width, value.hidden)
        self.second_NF = nn.Parameter(torch.empty(second, value.hidden).uniform_(-(second**-0.5), second**-0.5))
        self.out = nn.Linear(value.hidden, width)

    def forward(self, x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
        visible_BT = None if visible_BT is None else visible_BT.expand(x_BTD.shape[:2])
        x_BTF = activate(self.hidden(self._mix(x_BTD, self.first_ND, visible_BT)), self.value.activation)
        return self.out(self._mix(self.dropout(x_BTF), self.second_NF, visible_BT))

    def _mix(self, x_BTC: Tensor, tap_NC: Tensor, visible_BT: Tensor | None) -> Tensor:
        ahead = 0 if self.value.causal else len(tap_NC) // 2
        parts = [tap_C * before(x_BTC, number - ahead, visible_BT) for number, tap_C in enumerate(tap_NC)]
        return torch.stack(parts).sum(0)


def before(x_BTC: Tensor, distance: int, visible_BT: Tensor | None) -> Tensor:
    """What stands so many tokens before each one (after it, where negative), padding not counted; 0 where nothing does."""
    if visible_BT is None:
        length = x_BTC.shape[1]
        kept_BTC = x_BTC[:, max(0, -distance) : max(0, length - distance)]
        return F.pad(kept_BTC, (0, 0, min(length, max(0, distance)), min(length, max(0, -distance))))
    wanted_BT = visible_BT.long().cumsum(1) - 1 - distance  # the how-manieth token
    there_BT = visible_BT & (wanted_BT >= 0) & (wanted_BT < visible_BT.sum(1, keepdim=True))
    tokens_BT = torch.argsort(~visible_BT, dim=1, stable=True)  # at the beginning
    index_BT = tokens_BT.gather(1, wanted_BT.clamp(0, x_BTC.shape[1] - 1))
    found_BTC = x_BTC.gather(1, index_BT[..., None].expand_as(x_BTC))
    return torch.where(there_BT[..., None], found_BTC, 0.0)


def last(x_BMD: Tensor, count: int, visible_BM: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The last so many tokens, padding not counted, and which of them there are."""
    if visible_BM is None:
        return x_BMD[:, max(0, x_BMD.shape[1] - count) :], None
    visible_BM = visible_BM.expand(x_BMD.shape[:2])
    tokens_BM = torch.argsort(visible_BM.long(), dim=1, stable=True)[:, max(0, x_BMD.shape[1] - count) :]  # at the end
    index_BMD = tokens_BM[..., None].expand(-1, -1, x_BMD.shape[2])
    return x_BMD.gather(1, index_BMD), visible_BM.gather(1, tokens_BM)


class FeedForwardModule(nn.Module):
    def __init__(self, width: int, value: FeedForward):
        super().__init__()
        self.activation, self.gated, self.chunk = value.activation, value.gated, value.chunk
        widths = [width] + [value.hidden] * value.hidden_layers
        self.hidden = nn.ModuleList(
            nn.Linear(before, after * (2 if value.gated else 1), bias=value.bias) for before, after in pairwise(widths)
        )
        self.dropout = nn.Dropout(value.dropout)
        self.out = nn.Linear(value.hidden, width, bias=value.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.chunk is None:
            return self._net(x_BTD)
        return torch.cat([self._net(part) for part in x_BTD.split(self.chunk, dim=1)], dim=1)

    def _net(self, x_BTD: Tensor) -> Tensor:
        x = x_BTD
        for layer in self.hidden:
            x = self._act(layer(x))
        return self.out(self.dropout(x))

    def _act(self, x: Tensor) -> Tensor:
        if self.gated:
            gate_BTF, x_BTF = x.chunk(2, dim=-1)
            return activate(gate_BTF, self.activation) * x_BTF
        return activate(x, self.activation)


def activate(x: Tensor, name: Activation) -> Tensor:
    if name == "relu":
        return F.relu(x)
    if name == "silu":
        return F.silu(x)
    if name == "gelu_sigmoid":
        return x * torch.sigmoid(1.702 * x)
    return F.gelu(x, approximate="tanh" if name == "gelu_tanh" else "none")
