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
    row_Q1 = weight_QK.sum(1, keepdim=True)
    count = int((row_Q1 > 0).sum())
    if not count:
        return {"keys": 0.0, "first": 0.0}
    weight_QK = weight_QK / row_Q1.where(row_Q1 > 0, 1.0)
    entropy_Q = -(weight_QK * weight_QK.clamp(min=1e-30).log2()).sum(1)
    result: dict[str, Any] = {
        "keys": float(2 ** (entropy_Q.sum() / count)), "first": float(weight_QK[:, 0].sum()) / count,
    }  # fmt: skip
    if same_sequence:
        queries, keys = weight_QK.shape
        at_K = torch.arange(keys, dtype=weight_QK.dtype)
        back_QK = torch.arange(queries, dtype=weight_QK.dtype)[:, None] - at_K
        result["distance"] = float((weight_QK * back_QK.abs_()).sum()) / count
        result["by_distance"] = [
            float(weight_QK.diagonal(-distance).sum()) / count for distance in range(min(NEAREST, keys, queries))
        ]
        result["ahead"] = float(weight_QK.triu(1).sum()) / count
    return result
