"""Whether the values of a tensor exist, and whether the host may read them now.

The same code runs on tensors without values (meta tensors and PyTorch's fake tensors), under `torch.compile` and while a CUDA
graph is recorded. Where a value decides what to compute, code asks here first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def has_data(x: Tensor) -> bool:
    """Returns False for meta and fake tensors, which have a shape but no values."""
    # While torch.compile traces, tensors stand for those that the compiled graph will get.
    return torch.compiler.is_compiling() or x.untyped_storage().device.type != "meta"


def can_read(x: Tensor) -> bool:
    """Returns whether the host may read the values of x: not under torch.compile, nor while a CUDA graph is recorded."""
    return has_data(x) and not is_recorded()


def is_recorded() -> bool:
    """Returns whether torch.compile traces the code now, or a CUDA graph records it."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
