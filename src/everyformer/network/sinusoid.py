"""Sinusoidal positions.

Paper: Vaswani et al. 2017, Attention Is All You Need. For position i and feature pair m of D features:
    p_{i,2m} = sin(i / 10000^(2m/D)),   p_{i,2m+1} = cos(i / 10000^(2m/D))
    Sinusoidal     x + p_i
    TimePosition   x + p_i + p_t, t the step of a repeated depth (Dehghani et al. 2019, Universal Transformers)
Symbols: m is delta' in Weng 2020 (source W), `base` is 10000.
Departures: source W counts positions and features from 1; the paper and this code count from 0. The layout `halves` puts all sines
before all cosines, which is a permutation of the features.

Rotary and four-term scores use the same sines and cosines: `sin_cos` in attention/score_mod.py.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from everyformer.attention.rotary import sin_cos
from everyformer.network.position import AddedPosition, Position
from everyformer.value import Positive, Value


class Sinusoidal(AddedPosition, Value, frozen=True):
    """Fixed sinusoids, added to the tokens. They have no last position. Example: `Sinusoidal(layout="halves")`.

    `layout` is interleaved (each sine beside its cosine) or halves (all sines first); `base` is that of the wavelengths, 10000.
    """

    layout: Literal["interleaved", "halves"] = "interleaved"
    base: Positive = 10000.0

    def build_table(self, width: int) -> nn.Module:
        return SinusoidalModule(width, self.layout, self.base)


class TimePosition(Position, Value, frozen=True):
    """Sinusoids of the position and of the step of a repeated depth, both added to the tokens.

    Example: `Repeat(6, (Layer((Attention(Standard(4)), FeedForward(128))),), PostNorm(), TimePosition())`.
    """

    def build(self, width: int) -> nn.Module:
        return TimePositionModule(width)


class SinusoidalModule(nn.Module):
    """Maps positions B, T to sinusoids B, T, width with wavelengths from 2 pi to 2 pi base."""

    def __init__(self, width: int, layout: str = "interleaved", base: float = 10000.0):
        super().__init__()
        if width % 2:
            raise ValueError(f"sinusoids come in pairs, but there are {width} features; make it even")
        self.width, self.layout, self.base = width, layout, base

    def forward(self, position_BT: Tensor) -> Tensor:
        # eq. T11a, M1, W4
        pairs = torch.stack(sin_cos(position_BT, self.width, self.base, torch.float64), dim=-1)[:, 0]
        return (pairs if self.layout == "interleaved" else pairs.transpose(-1, -2)).flatten(-2)


class TimePositionModule(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.table = SinusoidalModule(width)

    def forward(self, x_BTD: Tensor, position_BT: Tensor, step: int = 0) -> Tensor:
        step_11 = torch.full((1, 1), step, device=x_BTD.device)
        return x_BTD + (self.table(position_BT) + self.table(step_11)).to(x_BTD.dtype)  # eq. W33
