"""The watch: training grows less stable as it goes on, so every step's loss and gradient norm are looked at.

A step whose loss or gradient is not finite, or whose gradient is far above what was usual, is skipped and reported. Too
many in a row stop the run; the last good checkpoint is there to go on from.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

SPIKE = 10.0  # times the usual norm
MEMORY = 0.98  # of the usual norm
EARLY = 20  # steps before spikes are looked for


class Unstable(RuntimeError):
    """The run was stopped because it no longer learns."""


@dataclass
class Watch:
    """What is usual, and how many bad steps there were."""

    patience: int
    usual: float = 0.0
    seen: int = 0
    bad: int = 0  # in a row
    skipped: int = 0

    def look(self, loss: float, norm: float) -> str | None:
        """Why this step must be skipped, or None."""
        reason = None
        if not math.isfinite(loss):
            reason = f"the loss is {loss}"
        elif not math.isfinite(norm):
            reason = f"the gradient's norm is {norm}"
        elif self.seen >= EARLY and norm > SPIKE * self.usual:
            reason = f"the gradient's norm {norm:.3g} is more than {SPIKE:.0f} times the usual {self.usual:.3g}"
        if reason is None:
            self.seen, self.bad = self.seen + 1, 0
            memory = min(MEMORY, 1 - 1 / self.seen)
            self.usual = memory * self.usual + (1 - memory) * norm
            return None
        self.bad, self.skipped = self.bad + 1, self.skipped + 1
        if self.bad >= self.patience:
            raise Unstable(
                f"stopped after {self.bad} bad steps in a row: {reason}; lower optim.lr or raise optim.warmup"
            )
        return reason

    def state(self) -> dict[str, Any]:
        return asdict(self)
