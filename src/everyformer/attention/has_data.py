"""Whether the values of a tensor exist, and whether the host may read them now.

The same code runs on tensors without values (meta tensors and PyTorch's fake tensors), under `torch.compile`, while a CUDA graph
is recorded, and inside the transforms of `torch.func`: `vmap` has many values where the code sees one. Where a value decides what
to compute, code asks here first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch


def has_data(x: Tensor) -> bool:
    """Returns False for meta and fake tensors, which have a shape but no values."""
    # While torch.compile traces, tensors stand for those that the compiled graph will get.
    if torch.compiler.is_compiling():
        return True
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x.untyped_storage().device.type != "meta"


def can_read(x: Tensor) -> bool:
    """Returns whether the host may read the values of x: not under torch.compile or vmap, nor while a CUDA graph is recorded."""
    if is_recorded():
        return False
    while _functorch.is_functorch_wrapped_tensor(x):
        if _functorch.is_batchedtensor(x):
            return False
        x = _functorch.get_unwrapped(x)
    return has_data(x)


def is_recorded() -> bool:
    """Returns whether torch.compile traces the code now, or a CUDA graph records it."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def is_exporting() -> bool:
    """Returns whether torch.export records the code now.

    In PyTorch 2.11 torch.compiler.is_exporting returns True under torch.compile too.
    """
    return torch.compiler._is_exporting_flag


def is_transformed() -> bool:
    """Returns whether code runs inside a transform of torch.func, which supports neither operations that write into their inputs
    nor gradients of our own."""
    return not torch.compiler.is_compiling() and _functorch.peek_interpreter_stack() is not None
