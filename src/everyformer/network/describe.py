"""How an error message describes what it was given."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def describe(x: Any) -> str:
    """Returns the dtype and shape of a tensor, or the type of anything else."""
    return f"{x.dtype} of the shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(type(x).__name__)
