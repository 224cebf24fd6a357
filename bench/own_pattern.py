"""Time of each kernel on patterns of a user's own, which state nothing but their predicate, and the kernel that `auto` takes.

    python -m bench.own_pattern > own_pattern.txt

One forward and backward pass of `attend`, as `everyformer bench attention` measures it: 65,536 positions in a pass on a GPU, 8 heads of
width 64, bfloat16. The kernels are timed in turn, several times, and the median is printed.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from torch import Tensor

from everyformer.attention.attend import KERNELS, UnsupportedKernel, attend, choose
from everyformer.attention.context import Context
from everyformer.attention.kernels.request import Request
from everyformer.attention.pattern import Causal, Pattern
from everyformer.study.bench import TOKENS, milliseconds
from everyformer.train.provenance import start_log
from everyformer.value import Value

LENGTHS = (4096, 16384)


class DilatedGlobal(Pattern, Value, frozen=True):
    """Every fourth of the last 1,024 keys, and the first 16 of all."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((q - k) % 4 == 0) & (q - k < 1024) | (k < 16)


class RandomBlocks(Pattern, Value, frozen=True):
    """About an eighth of all blocks of 64 keys, the same for all heads, and the query's own block."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        block, other = q // 64, k // 64
        return ((block * 7919 + other * 104729) % 1009 < 126) | (block == other)


class Halves(Pattern, Value, frozen=True):
    """The keys of the query's own block of 2,048 positions."""

    def allows(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q // 2048 == k // 2048


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    repeats = parser.parse_args().repeats
    start_log(seed=0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for length in LENGTHS:
        for own in (DilatedGlobal(), RandomBlocks(), Halves()):
            measure(Causal() & own, length, device, repeats)


def measure(pattern: Pattern, length: int, device: torch.device, repeats: int) -> None:
    half = device.type == "cuda"
    batch = TOKENS // length if half else 1
    tensors = [torch.randn(batch, length, 8, 64, device=device) for _ in range(3)]
    qkv = [x.to(torch.bfloat16 if half else x.dtype).transpose(1, 2).requires_grad_() for x in tensors]
    gradient = torch.randn_like(qkv[0])
    context = Context.of(length, length, device)
    request = Request(qkv[0], qkv[1], qkv[2], pattern, (), (), context, 0.125, 0.0)
    automatic = choose(request, "auto")
    times: dict[str, list[float]] = {}

    def once(kernel: str) -> None:
        torch.autograd.grad(attend(*qkv, pattern, context=context, kernel=kernel), qkv, gradient)

    for name in KERNELS:
        if name != "reference":
            try:
                once(name)
                times[name] = []
            except UnsupportedKernel:
                pass
    for _ in range(repeats):
        for name, measured in times.items():
            measured.append(milliseconds(lambda name=name: once(name), device))
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    chosen = next(name for name, kernel in KERNELS.items() if kernel is automatic)
    print(
        f"{type(pattern.parts[1]).__name__:14} {length:6,} positions: "
        + ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(medians.items(), key=lambda one: one[1]))
        + f"; auto takes {chosen}",
        flush=True,
    )


if __name__ == "__main__":
    main()
