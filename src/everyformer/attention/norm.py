"""Norms of single vectors: of the tokens of a stream, and of the queries and keys of a head.

Equations, for the D numbers x of one vector, mean and variance (population, 1/n) over them:
    LayerNorm   gamma (x - mean) / sqrt(variance + eps) + beta        Ba et al. 2016; Thickstun (source T) eq. 7-8
    RMSNorm     gamma x / sqrt(mean x^2 + eps)                        Zhang & Sennrich 2019
with gamma, beta of D numbers; with `unit_offset` the factor is 1 + gamma, and gamma starts at 0 (Gemma Team 2024).
Norms over several positions are in network/norm.py.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.value import Positive, Value


class Norm:
    """A value that builds a module `norm(x, visible_BT)`, for x of ..., D. Example: `class Unit(Norm, Value, frozen=True)`."""

    __slots__ = ()
    mixes_positions: ClassVar[bool] = False  # whether the norm of a token depends on other tokens

    def build(self, width: int) -> nn.Module:
        """Returns the module for vectors of this width."""
        raise NotImplementedError


class LayerNorm(Norm, Value, frozen=True):
    """Layer norm over the features of each position (Ba et al. 2016). Example: `PreNorm(LayerNorm(eps=1e-6))`.

    `eps` is added to the variance; without `bias` there is no shift beta.
    """

    eps: Positive = 1e-5
    bias: bool = True

    def build(self, width: int) -> nn.Module:
        return LayerNormModule(width, self.eps, bias=self.bias)


class RMSNorm(Norm, Value, frozen=True):
    """Root mean square norm over the features of each position (Zhang & Sennrich 2019). Example: `PreNorm(RMSNorm())`.

    `eps` is added to the mean square; with `unit_offset` the factor is 1 + weight.
    """

    eps: Positive = 1e-6
    unit_offset: bool = False

    def build(self, width: int) -> nn.Module:
        return OffsetRMSNormModule(width, self.eps) if self.unit_offset else RMSNormModule(width, self.eps)


class LayerNormModule(nn.LayerNorm):
    """torch's LayerNorm. Padding does not affect it."""

    def __init__(self, width: int, eps: float, bias: bool):
        super().__init__(width, eps, bias=bias)

    def forward(self, x: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        return torch.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)  # eq. T7, T8, K6c


class RMSNormModule(nn.RMSNorm):
    """torch's RMSNorm. Padding does not affect it."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps)

    def forward(self, x: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps)


class OffsetRMSNormModule(nn.Module):
    """RMSNorm with the factor 1 + weight, so that weight decay pulls the factor to 1. Padding does not affect it."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        return rms_norm(x, 1 + self.weight, self.eps)


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """torch's, in the wider of the two dtypes: under autocast a sublayer's output is narrower than the weights, for which torch has no
    fused program and warns."""
    exact = torch.promote_types(x.dtype, weight_D.dtype)
    return F.rms_norm(x.to(exact), weight_D.shape, weight_D.to(exact), eps)
