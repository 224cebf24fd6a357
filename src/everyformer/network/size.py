"""The number of weights of a model, counted before it is built, and whether the machine can hold them."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from everyformer.attention.has_data import has_data

if TYPE_CHECKING:
    from everyformer.network.model import EncoderDecoder, Model

LONG = 256  # layers; beyond, only some are built to be counted, and the others are like them


class NoInit(TorchFunctionMode):
    """Skips the initialization of weights. On the meta device it has no effect, but imports torch's compiler (seconds)."""

    IN_PLACE = frozenset({"normal_", "uniform_", "trunc_normal_", "zero_", "fill_", "mul_", "copy_"})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.IN_PLACE:
            return args[0] if args else kwargs["tensor"]
        if func in (torch.randn, torch.rand):
            func = torch.empty
        return func(*args, **kwargs)


def empty_weights(value: Model | EncoderDecoder) -> dict[str, Tensor]:
    """Returns the state dict of a model as tensors without data. Raises ValueError if a tensor would be too large to have a size."""
    try:
        with torch.device("meta"), NoInit():
            return value.build().state_dict()
    except RuntimeError as error:
        _refuse_overflow(error)
        raise


@lru_cache(maxsize=256)
def parameters(value: Model | EncoderDecoder) -> int:
    """Returns the number of parameters, counted on a network on the meta device."""
    try:
        return _count(value)[0]
    except RuntimeError as error:
        _refuse_overflow(error)
        return sum(x.numel() for x in value.build().parameters())  # a part of your own that the meta device lacks


def parameters_without_embeddings(value: Model | EncoderDecoder) -> int:
    """Returns the number of parameters of the layers: not those of embeddings, positions and output heads."""

    def count(network: nn.Module) -> int:
        bodies = [getattr(module, "body", None) for module in network.modules()]
        layers = [body for body in bodies if isinstance(body, nn.Module)]
        return sum(x.numel() for x in {id(x): x for body in layers for x in body.parameters()}.values())

    try:
        with torch.device("meta"), NoInit():
            return count(value.build())
    except RuntimeError as error:
        _refuse_overflow(error)
        return count(value.build())  # a part of your own that the meta device lacks


@lru_cache(maxsize=256)
def _count(value: Model | EncoderDecoder) -> tuple[int, int]:
    """The number of parameters, and the bytes of parameters and buffers."""
    for name in ("encoder", "decoder", "body"):
        side: Any = getattr(value, name, None)
        body: Any = getattr(side, "body", side)
        layers = getattr(body, "num_layers", 0)
        if layers > LONG:  # linear in the number of times that the given layers are taken
            period = len(body.layers)
            few = [replace(body, num_layers=period * times) for times in (1, 2)]
            short = [replace(value, **{name: one if side is body else replace(side, body=one)}) for one in few]
            (count, size), (next_count, next_size) = map(_count, short)
            times = layers // period - 1
            return count + times * (next_count - count), size + times * (next_size - size)
    with torch.device("meta"), NoInit():
        network = value.build()
    weights = {id(x): x for x in network.parameters()}
    tensors: dict[int, Tensor] = weights | {id(x): x for x in network.buffers()}
    return sum(x.numel() for x in weights.values()), sum(x.numel() * x.element_size() for x in tensors.values())


def check_memory(value: Model | EncoderDecoder) -> None:
    """Raises ValueError if the weights of a model are larger than the memory of the device on which it is being built."""
    new = torch.empty(0)
    if type(new) is not Tensor or not has_data(new):  # nothing is allocated then
        return
    available = total_memory(new.device)
    try:
        count, size = _count(value)
    except RuntimeError as error:
        return _refuse_overflow(error)
    if size > available:
        raise ValueError(
            f"the model has {count:,} parameters, which take {size / 2**30:,.1f} GiB, but the {new.device.type} has "
            f"{available / 2**30:,.1f} GiB; choose fewer layers, a smaller width or a smaller vocabulary"
        )


def _refuse_overflow(error: RuntimeError) -> None:
    """Raises ValueError if a tensor would have more than 2^63 bytes."""
    if "overflow" in str(error):
        raise ValueError(
            "one tensor of the model would have more than 2^63 bytes; choose a smaller width or vocabulary"
        ) from None


def total_memory(device: torch.device) -> int:
    """Returns the memory of the device, or that of the machine or container that this process may use."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cgroup = Path("/sys/fs/cgroup/memory.max")
    text = cgroup.read_text().strip() if cgroup.is_file() else ""
    limits = [total, *([int(text)] if text.isdigit() else [])]
    with suppress(ImportError, AttributeError):  # not on every system
        import resource

        limits += [resource.getrlimit(one)[0] for one in (resource.RLIMIT_DATA, resource.RLIMIT_AS)]
    return min(limit for limit in limits if limit > 0)  # a negative limit means none
