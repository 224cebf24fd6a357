"""Counts floating-point operations and the bytes of live tensors while code runs.

    with CostCounter(device) as cost: ...               # counts what really runs
    with CostCounter(device, fake=True) as cost: ...    # the same on fake tensors: shapes only, nothing is computed

Every tensor that an operation returns is followed by its storage until the storage is freed; `peak` is the largest number of
bytes alive. Memory that a kernel uses only while it runs is not seen, with two exceptions that can be as large as its output:
a CPU without bf16 instructions computes a bf16 matrix product in float32 first, and a safe softmax is computed from a plain
softmax and a mask.

Fake tensors are PyTorch's: the same code runs, chooses the same kernels and saves the same tensors for the backward pass.
Integer and boolean tensors stay real unless they are very large, because code reads them (padding, token ranges).

Matrix products and attention are counted, a multiplication and an addition as two operations, by the formulas of
torch.utils.flop_counter: attention over all pairs, causal or not, and its backward pass with recomputed scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

FREED = -1
LARGE = 2**26  # elements
_aten, _DEVICE = torch.ops.aten, torch.ops.prim.device.default
# flop_registry has fused attention for CUDA only.
_SAME_FLOPS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
# It has no recurrent layers: the number of matrix products by the weights, forward 1, backward 2 (input and weights).
_RECURRENT = {
    _aten.mkldnn_rnn_layer: 1,
    _aten.mkldnn_rnn_layer_backward: 2,
    _aten._cudnn_rnn: 1,
    _aten._cudnn_rnn_backward: 2,
}


class CostCounter(TorchDispatchMode):
    """Counts while it is entered. Read `flops`, `live` and `peak` (bytes on the device) at any time."""

    def __init__(self, device: torch.device, fake: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.flops = device, 0
        self.fake = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
        self.granularity = 512 if device.type == "cuda" else 1  # the CUDA allocator rounds up to blocks of 512 bytes
        self.widens_bf16 = device.type == "cpu" and not torch.cpu.get_capabilities().get("avx512_bf16")
        self.events: list[tuple[int, int]] = []  # (number of an allocation, its bytes or FREED), in order
        self.storages: dict[int, Any] = {}  # a weak reference to every live storage

    @property
    def peak(self) -> int:
        """The largest number of bytes alive at once."""
        return max(self._bytes_alive(), default=0)

    @property
    def live(self) -> int:
        """The bytes alive now."""
        return ([0, *self._bytes_alive()])[-1]

    def _bytes_alive(self) -> Iterator[int]:
        """The bytes alive after each event."""
        sizes, live = dict[int, int](), 0
        for number, size in self.events:
            live -= sizes.pop(number, 0)
            if size != FREED:
                sizes[number] = size
                live += size
            yield live

    def repeat_since(self, event: int) -> None:
        """Repeat the events since this one. What they left alive, such as an optimizer's state, is not allocated again."""
        freed = {number for number, size in self.events[event:] if size == FREED}
        self.events += [pair for pair in self.events[event:] if pair[0] in freed]

    def __enter__(self) -> CostCounter:
        if self.fake is not None:
            self.fake.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self.fake is not None:
            self.fake.__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # called so often that the full path would take most of the time
        kwargs = kwargs or {}
        output = self._run(func, args, kwargs)
        packet = func._overloadpacket
        flops_of: Callable[..., int] | None = flop_registry.get(_SAME_FLOPS.get(packet, packet))
        if flops_of is not None:
            self.flops += flops_of(*args, **kwargs, out_val=output)
        if packet in _RECURRENT:
            weights = args[1] if isinstance(args[1], list | tuple) else args[1:3]
            products = sum(x.numel() for x in weights if x.dim() == 2)
            self.flops += _RECURRENT[packet] * 2 * args[0].shape[0] * args[0].shape[1] * products
            if self.fake is not None and packet is _aten.mkldnn_rnn_layer and args[15]:
                # oneDNN's workspace for the backward pass, which fake tensors lack: 60 bytes per element of the output.
                output = (*output[:3], output[0].new_empty(60 * output[0].numel(), dtype=torch.uint8))
        temporary = []
        if packet is _aten._safe_softmax and _device(output).type == self.device.type:
            temporary = [self._allocate(output.numel() * size) for size in (output.element_size(), 1)]
        self.add(output)
        self.events += [(number, FREED) for number in temporary]
        if flops_of is not None and self.widens_bf16 and isinstance(output, Tensor) and output.dtype == torch.bfloat16:
            self.events.append((self._allocate(4 * output.numel() + 128), FREED))  # oneDNN's size
        return output

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.fake is None:
            return func(*args, **kwargs)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not inputs:
            created = func(*args, **kwargs)
            if not isinstance(created, Tensor) or created.is_floating_point():
                return created
        elif any(isinstance(x, FakeTensor) for x in inputs) or _is_large(inputs):
            # The number of rows that a mask selects depends on its values, which fake tensors do not read.
            return func(*(_masks_to_indices(x) if isinstance(x, list | tuple) else x for x in args), **kwargs)
        if func is _aten.lift_fresh.default and args[0].is_floating_point():  # torch.tensor(0.5)
            return self.fake.from_tensor(args[0])
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def add(self, tree: Any) -> None:
        """Count all tensors in nested lists and dictionaries as alive."""
        for x in tree_leaves(tree):
            if isinstance(x, Tensor) and _device(x).type == self.device.type:
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.storages:
                    number = self._allocate(storage.nbytes())
                    self.storages[key] = weakref.ref(storage, partial(self._free, number, key))

    def _allocate(self, size: int) -> int:
        self.events.append((len(self.events), -(-size // self.granularity) * self.granularity))
        return len(self.events) - 1

    def _free(self, number: int, key: int, _: Any) -> None:
        self.events.append((number, FREED))
        del self.storages[key]


def _is_large(inputs: Sequence[Tensor]) -> bool:
    """Whether tensors broadcast to a large one, as the positions do from which a mask is made for each row of a batch. Masks
    over queries and keys alone stay real: kernels read them to skip blocks that no query sees."""
    sizes = [max(size) for size in zip_longest(*(reversed(x.shape) for x in inputs), fillvalue=1)]
    return len(sizes) > 2 and prod(sizes) > LARGE


def _masks_to_indices(indices: Sequence[Any]) -> list[Any]:
    """Replace real boolean masks by the indices that they select."""
    result: list[Any] = []
    for x in indices:
        if isinstance(x, Tensor) and x.dtype == torch.bool and not isinstance(x, FakeTensor):
            with unset_fake_temporarily():
                result += x.nonzero().unbind(1)
        else:
            result.append(x)
    return result


def _device(x: Tensor) -> torch.device:
    return x.fake_device if isinstance(x, FakeTensor) else x.device
