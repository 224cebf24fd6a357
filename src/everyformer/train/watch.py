"""The watch: training grows less stable as it goes on, so every step's loss and gradient norm are looked at.

A step whose loss or gradient is not finite, or far above what is usual, is skipped and reported. What is usual follows
what is seen, also in skipped steps: a spike passes, but a run whose gradients have grown for good (they do when it leaves a
plateau) goes on after a few steps. Too many bad steps in a row stop the run; the last good checkpoint is there to go on
from.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

SPIKE = 10.0  # times the usual norm
LEAP = 2.0  # nats above the usual loss, and at least twice it
MEMORY = 0.98  # of what is usual
EARLY = 20  # steps before spikes are looked for


class Unstable(ValueError):
    """The run was stopped because it no longer learns."""


@dataclass
class Watch:
    """What is usual, and how many bad steps there were."""

    patience: int
    norm: float = 0.0  # the usual ones
    loss: float = 0.0
    seen: int = 0
    bad: int = 0  # in a row
    skipped: int = 0

    def look(self, loss: float, norm: float) -> str | None:
        """Why this step must be skipped, or None."""
        reason = self._reason(loss, norm)
        if math.isfinite(loss) and math.isfinite(norm):
            self.seen += 1
            memory = min(MEMORY, 1 - 1 / self.seen)
            early = self.seen <= EARLY
            self.norm = memory * self.norm + (1 - memory) * (norm if early else min(norm, SPIKE * self.norm))
            self.loss = memory * self.loss + (1 - memory) * (loss if early else min(loss, _leap(self.loss)))
        if reason is None:
            self.bad = 0
            return None
        self.bad, self.skipped = self.bad + 1, self.skipped + 1
        if self.bad >= self.patience:
            raise Unstable(
                f"stopped after {self.bad} bad steps in a row: {reason}; lower optim.lr or raise optim.warmup"
            )
        return reason

    def _reason(self, loss: float, norm: float) -> str | None:
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient's norm is {norm}"
        if self.seen >= EARLY and norm > SPIKE * self.norm:
            return f"the gradient's norm {norm:.3g} is more than {SPIKE:.0f} times the usual {self.norm:.3g}"
        if self.seen >= EARLY and loss > _leap(self.loss):
            return f"the loss {loss:.3g} is far above the usual {self.loss:.3g}"
        return None

    def state(self) -> dict[str, Any]:
        return asdict(self)


def _leap(loss: float) -> float:
    return max(loss + LEAP, 2 * loss)
