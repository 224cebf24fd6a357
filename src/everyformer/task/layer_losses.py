"""Which layers have a loss at a point of the training. Paper: Al-Rfou et al. 2018: layer l of n has one until l/(2n) of it."""

from __future__ import annotations

import torch


class LayerLosses:
    """The losses of `layers` layers, of which the last has one always and layer l until the share `until` l / n of the training.

    What a compiled step reads is set by `advance`: it would be compiled again for each other number, but not for other tensors.
    """

    def __init__(self, layers: int, until: float):
        self.layers, self.until = layers, until
        self.advance(0.0)

    def advance(self, progress: float) -> None:
        """Set the share of the training that is done."""
        self.counts = [n == self.layers or progress < self.until * n / self.layers for n in range(1, self.layers + 1)]
        self.weights = [torch.tensor(float(counts)) for counts in self.counts]
        # The lowest layer that predicts: 1 while any layer below the last has a loss, so that there are only two forms of a step.
        self.lowest = 1 if self.layers > 1 and self.counts[-2] else self.layers
