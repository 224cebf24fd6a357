"""Al-Rfou et al. 2018, section 2.1: the loss of one sequence with the auxiliary losses of intermediate layers and extra targets."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def loss(
    z: Sequence[Tensor], maps: Sequence[Sequence[Tensor]], token: Sequence[int], progress: float, weight: float
) -> Tensor:
    """z[l - 1][i] is the output of layer l of n for token i; maps[l - 1][k] is its classifier of the token k after the next.

    Layer l has a loss until the fraction l/(2n) of the training, the last layer always. Losses of extra targets have the factor
    `weight`, 1/2 in the paper.
    """
    n, total = len(z), z[0].new_zeros(())
    for layer in range(1, n + 1):
        if layer < n and progress >= layer / (2 * n):
            continue
        for i in range(len(token) - 1):
            for k, W in enumerate(maps[layer - 1]):
                if i + 1 + k < len(token):
                    logits = W @ z[layer - 1][i]
                    p = logits.exp() / logits.exp().sum()
                    total = total - (weight if k else 1.0) * p[token[i + 1 + k]].log()
    return total
