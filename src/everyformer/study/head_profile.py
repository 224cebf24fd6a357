"""Numbers that describe what one attention head attends to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NEAREST = 16  # distances that are listed


def profile(weight_QK: Tensor, same_sequence: bool = True) -> dict[str, Any]:
    """Means over the queries: the number of keys that share the weight (2 to the entropy), the weight on the first key, and in one
    sequence the distance to the keys and the weight by distance, 0 for the query itself and 1 for the position before it.

    Queries without keys are left out, and the weights of the others divided by their sum.
    """
    row_Q = weight_QK.sum(1)
    queries = row_Q > 0
    if not bool(queries.any()):
        return {"keys": 0.0, "first": 0.0}
    weight_QK = weight_QK[queries] / row_Q[queries, None]
    entropy_Q = -(weight_QK * weight_QK.clamp(min=1e-30).log2()).sum(1)
    result: dict[str, Any] = {"keys": float(2 ** entropy_Q.mean()), "first": float(weight_QK[:, 0].mean())}
    if same_sequence:
        at_Q = queries.nonzero()[:, 0]
        back_QK = at_Q[:, None] - torch.arange(weight_QK.shape[1])
        result["distance"] = float((weight_QK * back_QK.abs()).sum(1).mean())
        result["by_distance"] = [
            float((weight_QK * (back_QK == distance)).sum(1).mean())
            for distance in range(min(NEAREST, weight_QK.shape[1]))
        ]
        result["ahead"] = float((weight_QK * (back_QK < 0)).sum(1).mean())
    return result
