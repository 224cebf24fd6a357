"""Frequencies of rotary positions, their sines and cosines, and their scaling to more positions than a model was trained on.

Position i rotates pair m of W features by the angle i f_m, f_m = base^(-2m/W) unless scaled:

    linear    f_m / s                                                          Chen et al. 2023 (position interpolation)
    NTK       base' = base s^(W/(W-2)): the first frequency stays, the last is divided by s      bloc97 2023, published code
    Llama 3   f_m where i f_m turns more than `high` times in the context, f_m / s where it turns less than `low` times, between
              them (1 - t) f_m / s + t f_m, t = (turns - low) / (high - low)                     Llama Team 2024, published code
    YaRN      (1 - g_m) f_m + g_m f_m / s, g_m rising from 0 to 1 between the pairs that turn `fast` and `slow` times in the
              context; queries and keys times `attention`, 0.1 ln s + 1 unless given             Peng et al. 2023, eq. 17-23
Symbols: s `factor`; the pair that turns r times is W ln(context / (2 pi r)) / (2 ln base).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from everyformer.attention.context import Context
from everyformer.attention.has_data import is_exporting
from everyformer.value import Positive, Size, Value


class RotaryScaling:
    """A value that changes the frequencies of rotary positions. Example: `class Half(RotaryScaling, Value, frozen=True)`."""

    __slots__ = ()

    def frequencies(self, width: int, base: float, device: torch.device) -> Tensor:
        """Returns the angles per position of the width / 2 pairs, in float64."""
        raise NotImplementedError

    def attention_factor(self) -> float:
        """Returns the factor of the rotated queries and keys."""
        return 1.0


class LinearScaling(RotaryScaling, Value, frozen=True):
    """Divides positions by `factor` (Chen et al. 2023). Example: `Rotary(scaling=LinearScaling(4.0))`."""

    factor: Positive

    def frequencies(self, width: int, base: float, device: torch.device) -> Tensor:
        return plain_frequencies(width, base, device) / self.factor


class NtkScaling(RotaryScaling, Value, frozen=True):
    """Raises the base so that the lowest frequency is divided by `factor`. Example: `Rotary(scaling=NtkScaling(4.0))`."""

    factor: Positive

    def frequencies(self, width: int, base: float, device: torch.device) -> Tensor:
        if width == 2:  # the one frequency is the first, which stays
            return plain_frequencies(width, base, device)
        return plain_frequencies(width, base * self.factor ** (width / (width - 2)), device)


class Llama3Scaling(RotaryScaling, Value, frozen=True):
    """Divides low frequencies by `factor`, as Llama 3.1 does. `low` and `high` are turns in the `context` of the first training.

    Example: `Rotary(500000.0, scaling=Llama3Scaling(8.0))`.
    """

    factor: Positive
    low: Positive = 1.0
    high: Positive = 4.0
    context: Size = 8192

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.low >= self.high:
            raise ValueError(
                f"llama3_scaling.low is {self.low} and high is {self.high}; give a low that is less than high"
            )

    def frequencies(self, width: int, base: float, device: torch.device) -> Tensor:
        plain = plain_frequencies(width, base, device)
        share = ((plain * self.context / (2 * math.pi) - self.low) / (self.high - self.low)).clamp(0, 1)
        return torch.lerp(plain / self.factor, plain, share)


class YarnScaling(RotaryScaling, Value, frozen=True):
    """Divides low frequencies by `factor` and scales the queries and keys by `attention` (Peng et al. 2023). Default: as the paper.

    `fast` and `slow` are turns in the `context` of the first training. `truncate` rounds the bounds to whole pairs.
    Example: `Rotary(scaling=YarnScaling(4.0, context=32768))`.
    """

    factor: Positive
    context: Size
    fast: Positive = 32.0
    slow: Positive = 1.0
    attention: Positive | None = None
    truncate: bool = True

    def frequencies(self, width: int, base: float, device: torch.device) -> Tensor:
        low, high = (self._pair(turns, width, base) for turns in (self.fast, self.slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        pair = torch.arange(width // 2, device=device, dtype=torch.float64)
        ramp = ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)  # 0.001: as in the published code
        plain = plain_frequencies(width, base, device)
        return torch.lerp(plain, plain / self.factor, ramp)

    def attention_factor(self) -> float:
        return self.attention or 0.1 * math.log(max(1.0, self.factor)) + 1.0

    def _pair(self, turns: float, width: int, base: float) -> float:
        """Returns the pair that turns so many times in the context."""
        return width * math.log(self.context / (turns * 2 * math.pi)) / (2 * math.log(base))


def plain_frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """Returns frequencies from 1 down to almost 1 / base, in float64."""
    exponent = torch.arange(0, width, 2, device=device, dtype=torch.float64) / width
    return base**-exponent


def sin_cos_of(
    context: Context, of: Literal["queries", "keys"], width: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Returns `sin_cos` of the positions of the queries or the keys, computed once for a call."""

    def make() -> tuple[Tensor, Tensor]:
        return sin_cos(positions_of(context, of), width, base, dtype)

    return context.memo(("sin_cos", of, width, base, dtype), make)


def positions_of(context: Context, of: Literal["queries", "keys"]) -> Tensor:
    """Returns the positions of the queries or the keys: B or 1, T."""
    return context.positions.query_positions() if of == "queries" else context.positions.key_positions()


def sin_cos(position_BT: Tensor, width: int, base: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns sines and cosines of positions at frequencies from 1 down to 1 / base: B or 1, 1, T, width / 2.

    The angles are float64: bfloat16 rounds position 257 to 256, and float32 is wrong by 0.003 at position 100,000.
    """
    return angles(position_BT, plain_frequencies(width, base, position_BT.device), dtype)


def angles(position_BT: Tensor, frequency_N: Tensor, dtype: torch.dtype, factor: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the sines and cosines of positions times frequencies, times a factor: B or 1, 1, T, N. They are computed in float64."""
    # Inductor would compute them again for each number that is rotated, in each layer and in the backward pass.
    compute = _opaque_angles if torch.compiler.is_compiling() and not is_exporting() else _angles
    return compute(position_BT, frequency_N, dtype, factor)


def _angles(position_BT: Tensor, frequency_N: Tensor, dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    angle = position_BT[:, None, :, None].double() * frequency_N
    return (factor * angle.sin()).to(dtype), (factor * angle.cos()).to(dtype)


_opaque_angles = torch.library.custom_op("everyformer::angles", _angles, mutates_args=())


@_opaque_angles.register_fake
def _(position_BT: Tensor, frequency_N: Tensor, dtype: torch.dtype, factor: float) -> tuple[Tensor, Tensor]:
    shape = (len(position_BT), 1, position_BT.shape[1], len(frequency_N))
    return frequency_N.new_empty(shape, dtype=dtype), frequency_N.new_empty(shape, dtype=dtype)
