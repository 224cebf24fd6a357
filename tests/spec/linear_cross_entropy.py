"""The cross-entropy of a linear map, vector by vector (Szegedy et al. 2016, section 7, for label smoothing)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def loss(
    h: Tensor, W: Tensor, b: Tensor | None, target: Sequence[int], smoothing: float = 0.0, cap: float | None = None
) -> Tensor:
    """h is N x D, W is V x D. A vector with a negative target has no loss."""
    total = h.new_zeros(())
    for n, t in enumerate(target):
        if t < 0:
            continue
        logits = [W[v] @ h[n] + (0 if b is None else b[v]) for v in range(len(W))]
        if cap is not None:
            logits = [cap * (one / cap).tanh() for one in logits]
        normalizer = sum(one.exp() for one in logits)
        for v, one in enumerate(logits):
            q = (1 - smoothing) * (v == t) + smoothing / len(W)
            total = total - q * (one.exp() / normalizer).log()
    return total
