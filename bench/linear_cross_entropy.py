"""Measures the loss in chunks: against whole logits, recomputed logits and PyTorch's function, and in a training step.

    python -m bench.linear_cross_entropy

The first table times the loss of a linear map with its gradients (processor time, median): with whole logits; in chunks whose
gradients are added up in the forward pass, which training uses; in chunks that are computed again in the backward pass; and by
torch.nn.functional.linear_cross_entropy with its default options. The second has the planned and the measured peak of the tensors
of a training step (see bench/plan_memory.py) with `run.loss=whole` and `run.loss=chunked`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bench.plan_memory import in_new_process, measured, planned
from everyformer.network.linear_cross_entropy import LogitMap, chunk_rows, cross_entropy
from everyformer.train.provenance import start_log

SHAPES = ((512, 512, 8192), (4096, 256, 256), (512, 768, 50257))  # vectors, width, vocabulary
ROWS: list[tuple[str, str, list[str]]] = [
    ("gpt2", "small", ["model.layers=2", "run.batch=8", "task.context=256"]),
    ("gpt2", "small", ["model.layers=2", "run.batch=8", "task.context=256", "run.precision=bf16"]),
    ("bert", "tiny", ["run.batch=64"]),
    ("byte-language", "tiny", ["run.batch=64"]),
]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def whole(h_ND: Tensor, w_VD: Tensor, target_N: Tensor) -> Tensor:
    return cross_entropy(LogitMap(h_ND, w_VD).logits(), target_N)


def chunked(h_ND: Tensor, w_VD: Tensor, target_N: Tensor) -> Tensor:
    return cross_entropy(LogitMap(h_ND, w_VD), target_N)


def recomputed(h_ND: Tensor, w_VD: Tensor, target_N: Tensor) -> Tensor:
    rows = chunk_rows(len(w_VD), h_ND.device)
    pieces = zip(h_ND.split(rows), target_N.split(rows), strict=True)
    losses: list[Any] = [checkpoint(whole, h, w_VD, target, use_reentrant=False) for h, target in pieces]
    return torch.stack(losses).sum()


def of_torch(h_ND: Tensor, w_VD: Tensor, target_N: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(h_ND, w_VD, target_N, reduction="sum", options=options)
    return loss


LOSSES: dict[str, Loss] = {"whole": whole, "chunked": chunked, "recomputed": recomputed, "torch": of_torch}


def times(vectors: int, width: int, vocabulary: int, rounds: int) -> dict[str, float]:
    """Milliseconds of processor time of each loss and its gradients."""
    torch.manual_seed(0)
    h_ND = torch.randn(vectors, width, requires_grad=True)
    w_VD = (torch.randn(vocabulary, width) * width**-0.5).requires_grad_()
    target_N = torch.randint(vocabulary, (vectors,))
    busy: dict[str, list[float]] = {name: [] for name in LOSSES}
    for number in range(rounds + 1):
        for name, loss in LOSSES.items():
            start = time.process_time()
            torch.autograd.grad(loss(h_ND, w_VD, target_N) / vectors, (h_ND, w_VD))
            if number:  # the first round warms up
                busy[name].append(1e3 * (time.process_time() - start))
    return {name: statistics.median(one) for name, one in busy.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.linear_cross_entropy", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    start_log(seed=0)
    print("| vectors | width | vocabulary | rows of a chunk | " + " | ".join(f"{name} ms" for name in LOSSES) + " |")
    print("| --- " * (4 + len(LOSSES)) + "|")
    for shape in SHAPES:
        found = times(*shape, options.rounds)
        sizes = [f"{size:,}" for size in (*shape, min(shape[0], chunk_rows(shape[2], torch.device("cpu"))))]
        print("| " + " | ".join([*sizes, *(f"{found[name]:.1f}" for name in LOSSES)]) + " |", flush=True)
    print("\n| model | settings | whole: planned MiB | measured MiB | chunked: planned MiB | measured MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for member, size, settings in ROWS:
        cells = []
        for loss in ("whole", "chunked"):
            row = (member, size, [*settings, f"run.loss={loss}"], 2, "cpu")
            for function, name in ((planned, "planned"), (measured, "measured")):
                cells.append(f"{in_new_process(function, row)[name] / 2**20:,.0f}")
        print(f"| {member} {size} | {' '.join(settings)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
