"""The gradient watch skips training steps that would damage the weights.

A step is skipped if its loss or gradient is not finite or, unless optim.skip_spikes=false, if it is a spike: a gradient norm or
a loss far above the running average. The average also follows skipped steps (bounded), so that single spikes are skipped, but
a run whose gradients have grown for good (as when it leaves a plateau) continues after a few steps. Too many skipped steps in
a row stop the run; it can be resumed from its last checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

NORM_FACTOR = 10.0  # a spike of the gradient norm: more than this times the average
LOSS_MARGIN = 2.0  # a spike of the loss: more than this above the average (in nats), and more than twice the average
DECAY = 0.98  # of the running averages
WARMUP = 20  # steps before spikes are detected


class Unstable(ValueError):
    """A run stopped because too many steps in a row were skipped."""


@dataclass
class GradientWatch:
    """Running averages of the loss and the gradient norm, and the number of skipped steps."""

    patience: int
    skip_spikes: bool = True
    norm: float = 0.0  # running averages
    loss: float = 0.0
    seen: int = 0  # finite steps so far
    skipped_in_a_row: int = 0
    skipped_steps: int = 0

    def check(self, loss: float, norm: float) -> str | None:
        """Returns the reason to skip this step, or None. Raises Unstable after `patience` skipped steps in a row."""
        reason = self._reason(loss, norm)
        if math.isfinite(loss) and math.isfinite(norm):
            self.seen += 1
            decay = min(DECAY, 1 - 1 / self.seen)
            early = self.seen <= WARMUP
            self.norm = decay * self.norm + (1 - decay) * (norm if early else min(norm, NORM_FACTOR * self.norm))
            self.loss = decay * self.loss + (1 - decay) * (loss if early else min(loss, spike(self.loss)))
        if reason is None:
            self.skipped_in_a_row = 0
            return None
        self.skipped_in_a_row, self.skipped_steps = self.skipped_in_a_row + 1, self.skipped_steps + 1
        if self.skipped_in_a_row >= self.patience:
            raise Unstable(
                f"stopped after {self.skipped_in_a_row} skipped steps in a row: {reason}; lower optim.lr or raise optim.warmup"
            )
        return reason

    def _reason(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if not self.skip_spikes or self.seen < WARMUP:
            return None
        if norm > NORM_FACTOR * self.norm:
            return f"the gradient norm {norm:.3g} is more than {NORM_FACTOR:.0f} times its average {self.norm:.3g}"
        if loss > spike(self.loss):
            return f"the loss {loss:.3g} is far above its average {self.loss:.3g}"
        return None

    def state(self) -> dict[str, Any]:
        return asdict(self)


def spike(average: float) -> float:
    """Returns the loss above which a loss is far above an average."""
    return max(average + LOSS_MARGIN, 2 * average)
