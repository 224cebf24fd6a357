"""The convolution sublayer of the Universal Transformer: a feed-forward net that also looks at its neighbours.

Paper: Dehghani et al. 2019; kernels and order as in tensor2tensor's code. Twice a depthwise convolution,
sum_n w_n * x_{i - n} feature by feature, followed by a linear map, with an activation between the two. Neighbours are neighbours
by position: padding is skipped, and beyond the first and the last token everything is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.attention.context import Context
from everyformer.attention.has_data import is_exporting
from everyformer.network.cache import Entry, LayerInputs
from everyformer.network.feedforward import Activation, activate
from everyformer.network.sublayer import Sublayer, SublayerModule
from everyformer.value import Share, Size, Value


class Convolution(Sublayer, Value, frozen=True):
    """Two depthwise-separable convolutions with kernels of the sizes `kernels`, and `hidden` features and an `activation` between.

    With `causal` they see earlier positions only. `dropout` is on the hidden features.
    Example: `Layer((Attention(Standard(8)), Convolution(256)))`.
    """

    hidden: Size
    activation: Activation = "relu"
    kernels: tuple[Size, Size] = (3, 5)
    causal: bool = True
    dropout: Share = 0.0
    carries: ClassVar[str | None] = "inputs of convolutions"

    @property
    def lookback(self) -> int:
        """How many positions back a causal convolution sees."""
        return sum(self.kernels) - 2

    def build(self, width: int) -> ConvolutionModule:
        return ConvolutionModule(width, self)

    def mixes_positions(self) -> bool:
        return True

    def attends_to_future(self) -> bool:
        return not self.causal

    def illegal_reasons(self, width: int) -> Iterator[str]:
        yield from ()


class ConvolutionModule(SublayerModule):
    def __init__(self, width: int, value: Convolution):
        super().__init__()
        self.value, self.dropout = value, nn.Dropout(value.dropout)
        first, second = value.kernels
        self.first_ND = nn.Parameter(torch.empty(first, width).uniform_(-(first**-0.5), first**-0.5))
        self.hidden = nn.Linear(width, value.hidden)
        self.second_NF = nn.Parameter(torch.empty(second, value.hidden).uniform_(-(second**-0.5), second**-0.5))
        self.out = nn.Linear(value.hidden, width)

    def new_entry(self, segment_memory: bool = False) -> Entry | None:
        return LayerInputs(detached=segment_memory) if self.value.causal else None

    def max_distance(self) -> int | None:
        return self.value.lookback

    def output_map(self) -> nn.Linear | None:
        return self.out

    def forward(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> tuple[Tensor, Entry | None]:
        """The convolution of the new positions, which also reads the last inputs of the cache."""
        visible_BT = context.positions.visible_BQ()
        earlier = _last(entry, self.value.lookback, context) if isinstance(entry, LayerInputs) else None
        if earlier is None:
            return self._net(x_BTD, visible_BT), entry
        earlier_BMD, visible_BM = earlier
        if visible_BM is not None and visible_BT is not None:
            visible_BT = torch.cat((visible_BM, visible_BT.expand(x_BTD.shape[:2])), dim=1)
        return self._net(torch.cat((earlier_BMD, x_BTD), dim=1), visible_BT)[:, earlier_BMD.shape[1] :], entry

    def _net(self, x_BTD: Tensor, visible_BT: Tensor | None) -> Tensor:
        visible_BT = None if visible_BT is None else visible_BT.expand(x_BTD.shape[:2])
        x_BTF = activate(self.hidden(self._convolve(x_BTD, self.first_ND, visible_BT)), self.value.activation)
        return self.out(self._convolve(self.dropout(x_BTF), self.second_NF, visible_BT))

    def _convolve(self, x_BTC: Tensor, kernel_NC: Tensor, visible_BT: Tensor | None) -> Tensor:
        ahead = 0 if self.value.causal else len(kernel_NC) // 2
        shifted = [tap_C * shift(x_BTC, i - ahead, visible_BT) for i, tap_C in enumerate(kernel_NC)]
        return torch.stack(shifted).sum(0)


def shift(x_BTC: Tensor, distance: int, visible_BT: Tensor | None) -> Tensor:
    """The token `distance` tokens before each one (after it, if negative), not counting padding; 0 where there is none."""
    if visible_BT is None:
        before, after = max(0, distance), max(0, -distance)
        return F.pad(x_BTC, (0, 0, before, after)).narrow(1, after, x_BTC.shape[1])
    wanted_BT = visible_BT.long().cumsum(1) - 1 - distance  # index among the visible tokens
    exists_BT = visible_BT & (wanted_BT >= 0) & (wanted_BT < visible_BT.sum(1, keepdim=True))
    visible_first_BT = torch.argsort(~visible_BT, dim=1, stable=True)
    index_BT = visible_first_BT.gather(1, wanted_BT.clamp(0, x_BTC.shape[1] - 1))
    shifted_BTC = x_BTC.gather(1, index_BT[..., None].expand_as(x_BTC))
    return torch.where(exists_BT[..., None], shifted_BTC, 0.0)


def _last(entry: LayerInputs, count: int, context: Context) -> tuple[Tensor, Tensor | None] | None:
    """The last `count` inputs of the cache, not counting padding, and which of them are visible. None if there are none."""
    positions = context.positions
    before = positions.keys - positions.queries
    first = 0 if is_exporting() else max(0, before - count)
    if positions.in_order:
        tail_BMD = entry.rows(first)
        return None if tail_BMD is None else (tail_BMD, None)
    x_BMD = entry.rows(0)
    if x_BMD is None:
        return None
    visible_BM = (positions.key_positions()[:, :before] >= 0).expand(x_BMD.shape[:2])
    visible_last_BM = torch.argsort(visible_BM.long(), dim=1, stable=True)[:, first:]
    index_BMD = visible_last_BM[..., None].expand(-1, -1, x_BMD.shape[2])
    return x_BMD.gather(1, index_BMD), visible_BM.gather(1, visible_last_BM)
