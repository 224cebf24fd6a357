"""Al-Rfou et al. 2018, section 2.1, as loops: the loss of one sequence with the auxiliary ones."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def loss(
    z: Sequence[Tensor], maps: Sequence[Sequence[Tensor]], token: Sequence[int], done: float, weight: float
) -> Tensor:
    """z[l - 1][i] is what layer l of n makes of token i, maps[l - 1][k] its classifier of the token k after the next.

    Layer l stops after l/(2n) of the training, the last layer never. "The losses of the extra targets are weighted" by 1/2.
    """
    n, total = len(z), z[0].new_zeros(())
    for layer in range(1, n + 1):
        if layer < n and done >= layer / (2 * n):
            continue
        for i in range(len(token) - 1):
            for k, W in enumerate(maps[layer - 1]):
                if i + 1 + k < len(token):
                    logits = W @ z[layer - 1][i]
                    p = logits.exp() / logits.exp().sum()
                    total = total - (weight if k else 1.0) * p[token[i + 1 + k]].log()
    return total
