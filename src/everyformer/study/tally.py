"""A tally of what is computed: floating-point operations, and the bytes of tensors that are alive, with their peak.

    with Tally(device) as tally: ...                   # watches what really happens
    with Tally(device, imagined=True) as tally: ...    # the same without computing: numbers have a shape, no memory

Watching, it follows every tensor that an operation makes, by its storage, until the storage is let go; `events` are
these beginnings and ends in their order. What a kernel keeps for itself while it runs is not seen, but for two things that
can be as large as its answer: a CPU without instructions for bf16 computes a product of bf16 in float32 first, and a safe
softmax is made of a plain one.

Imagined tensors are PyTorch's fake tensors, so the same code runs on them, picks the same kernels and saves the same
things for the backward pass. Whole numbers and booleans stay real unless they are very many: code looks at them (padding,
ranges of tokens).

Operations counted are those of matrix products and attention, a multiplication and an addition as two, by the formulas of
torch.utils.flop_counter: attention over all pairs, causal or not, its backward with the scores computed again.
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

from everyformer.study.malloc import FREED

MANY = 2**26  # numbers
_aten, _DEVICE = torch.ops.aten, torch.ops.prim.device.default
# torch counts fused attention of CUDA only.
_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
# Nor recurrent layers: the products of each, backward by the input and by the maps.
_RECURRENT = {
    _aten.mkldnn_rnn_layer: 1,
    _aten.mkldnn_rnn_layer_backward: 2,
    _aten._cudnn_rnn: 1,
    _aten._cudnn_rnn_backward: 2,
}


class Tally(TorchDispatchMode):
    """Counts while it is entered; `flops`, `events`, `live` and `peak` (bytes on the device) can be read at any time."""

    def __init__(self, device: torch.device, imagined: bool = False):
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self.flops = device, 0
        self.fake = FakeTensorMode(allow_non_fake_inputs=True) if imagined else None
        self.block = 512 if device.type == "cuda" else 1  # CUDA's allocator gives whole blocks of so many bytes
        self.widens = device.type == "cpu" and not torch.cpu.get_capabilities().get("avx512_bf16")
        self.events: list[tuple[int, int]] = []  # the number of a block with its bytes, or FREED
        self.known: dict[int, Any] = {}  # of each storage a reference that tells of its end

    @property
    def peak(self) -> int:
        """Of the bytes alive."""
        return max(self._course(), default=0)

    @property
    def live(self) -> int:
        """Bytes alive now."""
        return ([0, *self._course()])[-1]

    def _course(self) -> Iterator[int]:
        """The bytes alive after each event."""
        sizes, live = dict[int, int](), 0
        for number, size in self.events:
            live -= sizes.pop(number, 0)
            if size != FREED:
                sizes[number] = size
                live += size
            yield live

    def repeat(self, begun: int, times: int) -> None:
        """As if what came since `begun` came so many times more. What it left, such as an optimizer's state, stays."""
        ended = {number for number, size in self.events[begun:] if size == FREED}
        self.events += times * [event for event in self.events[begun:] if event[0] in ended]

    def __enter__(self) -> Tally:
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
            return args[0].fake_device  # asked so often that the long way round takes most of the time
        kwargs = kwargs or {}
        found = self._run(func, args, kwargs)
        packet = func._overloadpacket
        count: Callable[..., int] | None = flop_registry.get(_LIKE.get(packet, packet))
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=found)
        if packet in _RECURRENT:
            maps = args[1] if isinstance(args[1], list | tuple) else args[1:3]
            each = sum(x.numel() for x in maps if x.dim() == 2)
            self.flops += _RECURRENT[packet] * 2 * args[0].shape[0] * args[0].shape[1] * each
            if self.fake is not None and packet is _aten.mkldnn_rnn_layer and args[15]:
                # What oneDNN keeps for the backward pass and fakes have not: 60 bytes for each number of the answer are asked
                # for, about 36 ever touched, as seen.
                found = (*found[:3], found[0].new_empty(36 * found[0].numel(), dtype=torch.uint8))
        besides = []
        if packet is _aten._safe_softmax and _place(found).type == self.device.type:
            # It makes the softmax and a mask of its zeros, and from these the answer.
            besides = [self._begin(found.numel() * size) for size in (found.element_size(), 1)]
        self.add(found)
        self.events += [(number, FREED) for number in besides]
        if count is not None and self.widens and isinstance(found, Tensor) and found.dtype == torch.bfloat16:
            self.events.append((self._begin(4 * found.numel() + 128), FREED))  # as oneDNN asks for it
        return found

    def _run(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.fake is None:
            return func(*args, **kwargs)
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if not given:
            made = func(*args, **kwargs)
            if not isinstance(made, Tensor) or made.is_floating_point():
                return made
        elif any(isinstance(x, FakeTensor) for x in given) or _many(given):
            # How many rows a mask picks is in the mask, which fake tensors do not look into.
            return func(*(_numbered(x) if isinstance(x, list | tuple) else x for x in args), **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)

    def add(self, tree: Any) -> None:
        """Count the tensors in some nest of lists and dictionaries as alive."""
        for x in tree_leaves(tree):
            if isinstance(x, Tensor) and _place(x).type == self.device.type:
                storage = x.untyped_storage()
                key = storage._cdata
                if key not in self.known:
                    number = self._begin(storage.nbytes())
                    self.known[key] = weakref.ref(storage, partial(self._end, number, key))

    def _begin(self, size: int) -> int:
        self.events.append((len(self.events), -(-size // self.block) * self.block))
        return len(self.events) - 1

    def _end(self, number: int, key: int, _: Any) -> None:
        self.events.append((number, FREED))
        del self.known[key]


def _many(given: Sequence[Tensor]) -> bool:
    """Whether tensors are large together, as positions are of which masks are made for each row of a batch. Those of queries and
    keys alone are looked at by kernels that leave out what nobody sees."""
    sizes = [max(size) for size in zip_longest(*(reversed(x.shape) for x in given), fillvalue=1)]
    return len(sizes) > 2 and prod(sizes) > MANY


def _numbered(indices: Sequence[Any]) -> list[Any]:
    """Real masks among the indices as the numbers of what they pick."""
    found: list[Any] = []
    for x in indices:
        if isinstance(x, Tensor) and x.dtype == torch.bool and not isinstance(x, FakeTensor):
            with unset_fake_temporarily():
                found += x.nonzero().unbind(1)
        else:
            found.append(x)
    return found


def _place(x: Tensor) -> torch.device:
    return x.fake_device if isinstance(x, FakeTensor) else x.device
