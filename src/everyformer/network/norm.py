"""Norms: LayerNorm and RMSNorm of each token (attention/norm.py), and the norms over positions that source K compares them with.

Equations, for x of B sequences, T positions, D features; mean and variance (population, 1/n) over:
    LayerNorm                 the features of one token ("TokenNorm" in source K)        Thickstun (source T) eq. 7-8
    BatchNorm                 batch and positions, for each feature
    InstanceNorm              the positions of one sequence, for each feature
    SequenceNorm              positions and features of one sequence (the LayerNorm of convolutional nets)
    RMSNorm                   x / sqrt(mean x^2) over the features, no mean, no shift        Zhang & Sennrich 2019
then gamma x + beta with gamma, beta of D numbers.

Departures: an epsilon is added under the root (source T divides by zero where a token is constant). BatchNorm "over the feature and
batch dimension together" (source K) is per feature. Padding is left out of every mean. Batch, instance and sequence norms mix
positions, so a causal model refuses them.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from everyformer.attention.norm import LayerNorm as LayerNorm
from everyformer.attention.norm import Norm as Norm
from everyformer.attention.norm import RMSNorm as RMSNorm
from everyformer.value import Positive, Value


class BatchNorm(Norm, Value, frozen=True):
    """Batch norm over sequences and positions (Ioffe & Szegedy 2015). Example: `PreNorm(BatchNorm())`.

    `eps` is added to the variance; `momentum` is the share of a batch in the running mean and variance.
    """

    eps: Positive = 1e-5
    momentum: Positive = 0.1
    mixes_positions: ClassVar[bool] = True

    def build(self, width: int) -> nn.Module:
        return BatchNormModule(width, self.eps, self.momentum)


class InstanceNorm(Norm, Value, frozen=True):
    """Normalizes each feature over the positions of its sequence. `eps` is added to the variance. Example: `PreNorm(InstanceNorm())`."""

    eps: Positive = 1e-5
    mixes_positions: ClassVar[bool] = True

    def build(self, width: int) -> nn.Module:
        return SequenceNormModule(width, self.eps, dims=(1,))


class SequenceNorm(Norm, Value, frozen=True):
    """Normalizes over all positions and features of a sequence. `eps` is added to the variance. Example: `PreNorm(SequenceNorm())`."""

    eps: Positive = 1e-5
    mixes_positions: ClassVar[bool] = True

    def build(self, width: int) -> nn.Module:
        return SequenceNormModule(width, self.eps, dims=(1, 2))


class SequenceNormModule(nn.Module):
    """InstanceNorm with dims=(1,), SequenceNorm with dims=(1, 2): mean and variance over the tokens of each sequence."""

    def __init__(self, width: int, eps: float, dims: tuple[int, ...]):
        super().__init__()
        self.eps, self.dims = eps, dims
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x_BTD: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        mean, variance = moments(x_BTD, visible_BT, self.dims)
        return _normed(x_BTD, mean, variance, self)


class BatchNormModule(nn.Module):
    """Mean and variance of each feature over the batch in training, their running averages in evaluation."""

    mean_D: Tensor
    variance_D: Tensor

    def __init__(self, width: int, eps: float, momentum: float):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean_D", torch.zeros(width))
        self.register_buffer("variance_D", torch.ones(width))

    def forward(self, x_BTD: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        mean, variance = self.mean_D, self.variance_D
        if self.training:
            mean, variance = moments(x_BTD, visible_BT, (0, 1))
            with torch.no_grad():
                self.mean_D.lerp_(mean.flatten().to(self.mean_D.dtype), self.momentum)
                self.variance_D.lerp_(variance.flatten().to(self.variance_D.dtype), self.momentum)
        return _normed(x_BTD, mean, variance, self)


def moments(x_BTD: Tensor, visible_BT: Tensor | None, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Returns mean and population variance over `dims` without padding, in float32 or better: float16 cannot count above 65,504."""
    x_BTD = x_BTD.to(torch.promote_types(x_BTD.dtype, torch.float32))
    counts_BTD = (
        torch.ones_like(x_BTD) if visible_BT is None else visible_BT[..., None].to(x_BTD.dtype).expand_as(x_BTD)
    )
    count = counts_BTD.sum(dims, keepdim=True).clamp(min=1)
    mean = (x_BTD * counts_BTD).sum(dims, keepdim=True) / count
    return mean, ((x_BTD - mean).square() * counts_BTD).sum(dims, keepdim=True) / count


def _normed(x_BTD: Tensor, mean: Tensor, variance: Tensor, norm: SequenceNormModule | BatchNormModule) -> Tensor:
    normed_BTD = (x_BTD - mean) * (variance + norm.eps).rsqrt() * norm.weight + norm.bias
    return normed_BTD.to(torch.promote_types(x_BTD.dtype, norm.weight.dtype))
