"""Packed weights: on a CPU, linear maps are up to twice as fast with weights in the order in which oneDNN reads them.

    packed = Packed(network)
    with packed.used(): network(token_BT)     # under torch.no_grad(); the modules are as before afterwards

The outputs are equal up to rounding. Packing takes the time of some tokens and the memory of the weights once more, so it is for
generation and other work with many calls. A weight that changes is packed again. Only plain `nn.Linear` maps and the output head
in float32 are packed, and no small ones; a network on another device, or compiled, has none. On Intel's processors a batch
of few sequences is multiplied by the weights as they are, which are packed at the first call with more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer.network.feedforward import Activation, activate
from everyformer.network.linear_cross_entropy import LogitMap

LINEAR = torch.ops.mkldnn._linear_pointwise.default
FEW = 8  # sequences from which on packed weights are faster on Intel's processors; elsewhere they are for one too
SMALL = 2**16  # weights up to which the call of a packed map takes longer than the plain one
FUSED = {
    None: ("none", ""),
    "relu": ("relu", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
}  # with a map


class PackedLinear:
    """A linear map whose weight is brought into oneDNN's order by the first call that uses it so."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.weight, self.bias, self.version = weight, bias, -1

    def _pack(self) -> None:
        self.version = self.weight._version
        # Packed for a few rows: such weights are the fastest for one row too.
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), 16)

    def __call__(self, x: Tensor, activation: Activation | None = None) -> Tensor:
        """Returns W x + b, with an activation of the outputs act(W x + b)."""
        plain = len(x) < FEW and on_intel()
        if plain or x.dtype != torch.float32 or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            y = F.linear(x, self.weight, self.bias)
            return y if activation is None else activate(y, activation)
        if self.weight._version != self.version:
            self._pack()
        name, algorithm = FUSED.get(activation, ("none", ""))
        y = LINEAR(x, self.packed, self.bias, name, [], algorithm)
        return y if activation in FUSED or activation is None else activate(y, activation)


class Packed:
    """The packed linear maps of a network. Example: `Packed(network).used()`."""

    def __init__(self, network: nn.Module):
        self.maps: list[tuple[nn.Module, PackedLinear]] = []
        self.heads: dict[int, PackedLinear] = {}
        if torch.backends.mkldnn.is_available() and not is_compiled(network):
            for module in network.modules():
                if type(module) is nn.Linear and _fits(module.weight):
                    self.maps.append((module, PackedLinear(module.weight, module.bias)))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Computes with the packed weights inside the block."""
        changed = [(module, packed) for module, packed in self.maps if "forward" not in vars(module)]
        for module, packed in changed:
            vars(module)["forward"] = packed  # before the method of the class
        try:
            yield
        finally:
            for module, _ in changed:
                del vars(module)["forward"]

    def logits(self, logits: LogitMap) -> Tensor:
        """The logits of an output head, whose weight is packed at the first call."""
        weight_VD = logits.weight_VD
        if not self.maps or not _fits(weight_VD):
            return logits.logits()
        packed = self.heads.get(id(weight_VD))
        if packed is None or packed.weight is not weight_VD:
            packed = self.heads[id(weight_VD)] = PackedLinear(weight_VD, logits.bias_V)
        return logits.capped(packed(logits.hidden))


@cache
def on_intel() -> bool:
    """Whether the processor is Intel's, on which MKL multiplies a few rows by a plain weight faster than oneDNN by a packed one."""
    try:
        return "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def is_compiled(network: nn.Module) -> bool:
    return any(module._compiled_call_impl is not None for module in network.modules())


def _fits(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.is_contiguous()
    return plain and weight.numel() > SMALL and type(weight) in (Tensor, nn.Parameter)
