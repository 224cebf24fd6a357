"""The optimizers, one number at a time: AdamW (Kingma & Ba 2014, algorithm 1; Loshchilov & Hutter 2017, algorithm 2) and Muon
(Jordan et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def adamw(
    weight: float, gradients: Sequence[float], lr: float, beta1: float, beta2: float, decay: float, eps: float = 1e-8
) -> float:
    """m_t = b1 m + (1 - b1) g,  v_t = b2 v + (1 - b2) g^2,  w_t = w - lr (m^ / (sqrt(v^) + eps) + decay w)."""
    m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        unbiased_m, unbiased_v = m / (1 - beta1**t), v / (1 - beta2**t)
        weight = weight - lr * (unbiased_m / (math.sqrt(unbiased_v) + eps) + decay * weight)
    return weight


def muon(weight: Tensor, gradients: Sequence[Tensor], lr: float, decay: float, momentum: float = 0.95) -> Tensor:
    """B_t = mu B + (1 - mu) g,  O = the orthogonal matrix nearest to (1 - mu) g + mu B,  w_t = w (1 - lr decay) - lr s O,
    with the factor s = sqrt(max(1, rows / columns)). Muon approximates O by an odd polynomial of the singular values; here it is exact."""
    buffer = torch.zeros_like(weight)
    for gradient in gradients:
        buffer = momentum * buffer + (1 - momentum) * gradient
        left, _, right = torch.linalg.svd((1 - momentum) * gradient + momentum * buffer, full_matrices=False)
        scale = math.sqrt(max(1.0, weight.shape[0] / weight.shape[1]))
        weight = weight * (1 - lr * decay) - lr * scale * (left @ right)
    return weight
