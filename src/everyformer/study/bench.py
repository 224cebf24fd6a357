"""Measures time and memory of attention by sequence length: sparse kinds against dense causal attention.

    for row in bench([1024, 4096], torch.device("cpu")): print(row)

A measurement is one forward and backward pass of `attend` with the kernel that `auto` chooses. All kinds of one length are
measured in turn, several times, and the median is reported, so other load on the machine affects all kinds alike. Memory is the
peak of live tensors in such a pass, without its inputs. On a GPU some memory is zeroed first: caches are cold, and the GPU has a
queue of work, as in a training step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from everyformer.attention.attend import attend
from everyformer.attention.context import Context
from everyformer.attention.four_term import FourTerm
from everyformer.attention.hashing import Hash, hashing
from everyformer.attention.pattern import Causal, Hashed, Local, Pattern, Window, fixed, strided
from everyformer.attention.score_mod import ScoreMod
from everyformer.attention.span import Span
from everyformer.study.cost import CostCounter
from everyformer.value import nearest

TOKENS = 65_536  # per pass on a GPU: the batch has as many sequences as fit
CLEARED, TIMES = 2**28, 24  # bytes zeroed, and how often: milliseconds on any GPU
Kind = Callable[[int], tuple[Pattern, tuple[ScoreMod, ...]]]

KINDS: dict[str, Kind] = {
    "dense": lambda length: (Causal(), ()),
    "local": lambda length: (Causal() & Local(128, 128), ()),
    "window": lambda length: (Causal() & Window(256), ()),
    "fixed": lambda length: (_either(fixed(128, 8)), ()),
    "strided": lambda length: (_either(strided(2 ** round(math.log2(length) / 2))), ()),
    "hashed": lambda length: (Hashed(4, 2 ** round(math.log2(length) / 2), 64), ()),
    "relative": lambda length: (Causal(), (FourTerm(64),)),
    "span": lambda length: (Causal(), (Span(length, ramp=32, start=min(1.0, 224 / length)),)),
}


@dataclass(frozen=True)
class Row:
    """One kind at one length: milliseconds (median, least, most), and peak bytes."""

    kind: str
    length: int
    batch: int
    time: float
    memory: int
    least: float
    most: float


def bench(
    lengths: Iterable[int],
    device: torch.device,
    *,
    kinds: Sequence[str] = tuple(KINDS),
    heads: int = 8,
    width: int = 64,
    repeats: int = 5,
) -> Iterator[Row]:
    """Yields rows, length by length. Dense attention is always measured too, for comparison."""
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"no kind of attention is named {kind!r}; {nearest(kind, KINDS)}")
    kinds = ["dense", *(kind for kind in kinds if kind != "dense")]
    half = device.type == "cuda"
    for length in lengths:
        batch = max(1, TOKENS // length) if half else 1
        # Strides as a projection to heads produces them.
        tensors = [torch.randn(batch, length, heads, width, device=device) for _ in range(3)]
        qkv = [x.to(torch.bfloat16 if half else x.dtype).transpose(1, 2).requires_grad_() for x in tensors]
        passes = {kind: _pass(KINDS[kind](length), qkv) for kind in kinds}
        memory = {kind: _memory(one, device) for kind, one in passes.items()}  # also the first pass, which is not timed
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(repeats):
            for kind, one in passes.items():
                times[kind].append(milliseconds(one, device))
        for kind in kinds:
            found = times[kind]
            yield Row(kind, length, batch, statistics.median(found), memory[kind], min(found), max(found))


def exponent(pairs: Iterable[tuple[float, float]]) -> float:
    """The p of y ~ x^p by least squares of the logarithms."""
    x, y = zip(*((math.log(a), math.log(b)) for a, b in pairs), strict=True)
    return statistics.linear_regression(x, y).slope


def growth(rows: Sequence[Row]) -> Iterator[tuple[str, float, float]]:
    """Yields each kind with the exponents of its time and memory per sequence, by length."""
    for kind in dict.fromkeys(row.kind for row in rows):
        series = [row for row in rows if row.kind == kind]
        time = exponent((row.length, row.time / row.batch) for row in series)
        yield kind, time, exponent((row.length, row.memory / row.batch) for row in series)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draw time and memory of one sequence by its length, and return the path."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("time", "memory"), strict=True):
        for number, kind in enumerate(dict.fromkeys(row.kind for row in rows)):
            series = [row for row in rows if row.kind == kind]
            unit = 1 if name == "time" else 2**20
            values = [getattr(row, name) / row.batch / unit for row in series]
            style = (
                {"color": "black", "lw": 2.5} if kind == "dense" else {"color": f"C{number}", "marker": "o", "ms": 4}
            )
            axes.plot([row.length for row in series], values, label=kind, **style)
        axes.set(xscale="log", yscale="log", xlabel="positions", ylabel="ms" if name == "time" else "MiB", title=name)
        axes.set_xticks(sorted({row.length for row in rows}), [f"{n:,}" for n in sorted({row.length for row in rows})])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(frameon=False, ncols=2)
    figure.savefig(path, dpi=120)
    return path


def _either(patterns: tuple[Pattern, Pattern]) -> Pattern:
    """Both patterns of a Sparse Transformer in one head."""
    return patterns[0] | patterns[1]


def _pass(kind: tuple[Pattern, tuple[ScoreMod, ...]], qkv: list[Tensor]) -> Callable[[], None]:
    pattern, score_mods = kind
    heads, width, q = qkv[0].shape[1], qkv[0].shape[3], qkv[0]
    modules = [score_mod.build(heads, width, width).to(q.device, q.dtype) for score_mod in score_mods]
    hashes = [Hash(part, heads, width).to(q.device) for part in hashing(pattern)]
    weights = [*qkv, *(weight for module in modules for weight in module.parameters())]
    gradient = torch.randn_like(q)

    def once() -> None:
        context = Context.of(q.shape[2], q.shape[2], q.device)
        for hash_ in hashes:  # hashing is timed too
            context = context.with_hashes(hash_(hash_.buckets(qkv[1]), context))
        torch.autograd.grad(attend(qkv[0], qkv[1], qkv[2], pattern, modules, context=context), weights, gradient)

    return once


def milliseconds(once: Callable[[], None], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        cleared = torch.empty(CLEARED, dtype=torch.uint8, device=device)
        for _ in range(TIMES):
            cleared.zero_()
        start.record()
        once()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    started = time.perf_counter()
    once()
    return 1000 * (time.perf_counter() - started)


def _memory(once: Callable[[], None], device: torch.device) -> int:
    with CostCounter(device) as cost:
        once()
    return cost.peak
