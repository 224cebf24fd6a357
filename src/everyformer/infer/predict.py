"""Predictions for a list of examples, in batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

PREDICTED = 64  # examples in one call


@dataclass(frozen=True)
class Predictions:
    """The predictions of N examples, which `predict` and `classify` return: `isinstance(run.predict(["good"]), Predictions)`.

    values          N classes, numbers or texts: array(['pos', 'neg'])
    probabilities   N, C: of all classes, in the order of `classes`. None: the predictions are no classes
    classes         the names of all C classes
    """

    values: NDArray[Any]
    probabilities: NDArray[np.float32] | None = None
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row of a table for each example: its prediction and, of classes, the probability of this one and of each."""
        values = [float(f"{one:.7g}") if isinstance(one, float) else one for one in self.values.tolist()]
        rows: list[dict[str, Any]] = [{"prediction": value} for value in values]
        if self.probabilities is not None:
            for row, probability_C in zip(rows, self.probabilities.tolist(), strict=True):
                row["probability"] = round(max(probability_C), 6)
                row |= {f"p({name})": round(p, 6) for name, p in zip(self.classes, probability_C, strict=True)}
        return rows


@torch.no_grad()
def in_batches(rows: Sequence[Any], forward: Callable[[list[Any]], Tensor], size: int = PREDICTED) -> Tensor:
    """Returns the outputs of all rows, on the CPU and in their order. Rows of similar length are computed together.

    Raises ValueError if there are no rows.
    """
    if not rows:
        raise ValueError("there is nothing to predict; give a list with at least one input")
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    outputs: list[Tensor] = [
        forward([rows[index] for index in order[start : start + size]]).cpu() for start in range(0, len(order), size)
    ]
    output = torch.cat(outputs)
    return output[torch.tensor(order).argsort()]
