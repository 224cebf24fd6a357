"""The gradient watch skips training steps that would damage the weights.

A step is skipped if its loss or gradient is not finite or, unless optim.skip_spikes=false, if it is a spike: a gradient norm or
a loss far above the running average. The average also follows skipped steps (bounded), so that single spikes are skipped, but
a run whose gradients have grown for good (as when it leaves a plateau) continues after a few steps. Too many skipped steps in
a row stop the run; it can be resumed from its last checkpoint.

`StepCheck` decides on the device and nothing waits for it: the update of the weights is multiplied away if the step is skipped.
`GradientWatch` is what the host has once the numbers of a step have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

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

    def take(self, numbers: Sequence[float]) -> str | None:
        """Take over the numbers of a `StepCheck`. Returns why the step was skipped, or None.

        Raises Unstable after `patience` skipped steps in a row.
        """
        loss, norm, skip, *state = numbers
        reason = self._reason(loss, norm) if skip else None
        self.loss, self.norm = state[:2]
        self.seen, self.skipped_in_a_row, self.skipped_steps = map(int, state[2:])
        if self.skipped_in_a_row >= self.patience:
            raise Unstable(
                f"stopped after {self.skipped_in_a_row} skipped steps in a row: {reason}; lower optim.lr or raise optim.warmup"
            )
        return reason

    def _reason(self, loss: float, norm: float) -> str:
        """Why a step is skipped, from the averages before it."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        if norm > NORM_FACTOR * self.norm:
            return f"the gradient norm {norm:.3g} is more than {NORM_FACTOR:.0f} times its average {self.norm:.3g}"
        return f"the loss {loss:.3g} is far above its average {self.loss:.3g}"

    def state(self) -> dict[str, Any]:
        return asdict(self)


class StepCheck:
    """Decides whether to skip a step, in float64 on the device.

    `numbers` are the loss and the norm of the last step, 1 if it was skipped (else 0), and then the state of the watch: the averages
    of the loss and the norm, the finite steps, and the skipped ones in a row and in all.
    """

    def __init__(self, device: torch.device, skip_spikes: bool):
        self.skip_spikes = skip_spikes
        self.numbers = torch.zeros(8, dtype=torch.float64, device=device)
        self.step_2, self.skip, self.average_2 = self.numbers[:2], self.numbers[2], self.numbers[3:5]
        self.seen, self.in_a_row, self.skipped = self.numbers[5:].unbind()
        # The limit of the loss is `spike` of its average, that of the norm NORM_FACTOR times its average.
        self.factor_2 = torch.tensor([2.0, NORM_FACTOR], dtype=torch.float64, device=device)
        self.margin_2 = torch.tensor([LOSS_MARGIN, -math.inf], dtype=torch.float64, device=device)

    def load(self, watch: GradientWatch) -> None:
        """Continue from the state of a watch."""
        state = (watch.loss, watch.norm, watch.seen, watch.skipped_in_a_row, watch.skipped_steps)
        self.numbers[3:] = torch.tensor(state, dtype=torch.float64)

    def check(self, loss: Tensor, norm: Tensor) -> Tensor:
        """Returns 1 if the step is to be skipped, else 0, as float32, and updates the numbers."""
        self.step_2.copy_(torch.stack((loss, norm)))
        limit_2 = torch.maximum(self.factor_2 * self.average_2, self.average_2 + self.margin_2)
        limit_2.masked_fill_(self.seen < WARMUP, math.inf)
        is_finite = (self.step_2.abs() < math.inf).all()
        skip = ~is_finite
        if self.skip_spikes:
            skip |= (self.step_2 > limit_2).any()
        self.seen += is_finite
        decay = (1 - self.seen.reciprocal()).clamp(max=DECAY)
        average_2 = decay * self.average_2 + (1 - decay) * torch.minimum(self.step_2, limit_2)
        self.average_2.copy_(torch.where(is_finite, average_2, self.average_2))
        self.skip.copy_(skip)
        self.in_a_row.add_(1).mul_(self.skip)
        self.skipped.add_(self.skip)
        return self.skip.float()


def spike(average: float) -> float:
    """Returns the loss above which a loss is far above an average."""
    return max(average + LOSS_MARGIN, 2 * average)
