"""Measures what long-context members save: reversible layers, reused states, short spans.

    python -m bench.long_context depth              # reformer: reversible against plain layers, 6 to 48
    python -m bench.long_context reuse              # transformer-xl: one byte with its memory, against encoding all again
    python -m bench.long_context spans              # adaptive-span: a training step by the length of the spans

`--device cuda` computes in bf16. Memory is the peak of live tensors in a forward and backward pass, without weights and gradients.
Times are medians, on a CPU in processor time. Prints one JSON line per row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.nn import functional as F

import everyformer
from everyformer.network.cache import Cache
from everyformer.network.residual import PreNorm
from everyformer.study.cost import CostCounter
from everyformer.train.provenance import start_log


def step(network: nn.Module, token_BT: Tensor) -> None:
    """Forward, cross-entropy and backward, into existing gradients."""
    with torch.autocast(token_BT.device.type, torch.bfloat16, enabled=token_BT.is_cuda):
        output = network(token_BT[:, :-1])
    loss = F.cross_entropy(output.logits.flatten(0, 1).float(), token_BT[:, 1:].flatten())
    (loss + sum(output.aux.values(), torch.zeros((), device=loss.device))).backward()


def measured(network: nn.Module, token_BT: Tensor, rounds: int) -> dict[str, float]:
    for weight in network.parameters():
        weight.grad = torch.zeros_like(weight)
    with CostCounter(token_BT.device) as cost:
        step(network, token_BT)
    return {
        "ms": median(lambda: step(network, token_BT), rounds, token_BT.is_cuda),
        "MiB": round(cost.peak / 2**20, 1),
    }


def median(once: Callable[[], Any], rounds: int, cuda: bool) -> float:
    times = []
    for _ in range(rounds + 1):  # the first is a warm-up
        start = now(cuda)
        once()
        times.append(now(cuda) - start)
    return round(1000 * statistics.median(times[1:]), 2)


def now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def depth(device: str, rounds: int) -> None:
    token_BT = torch.randint(0, 256, (4, 513), device=device)
    for layers in (6, 12, 24, 48):
        value: Any = everyformer.member("reformer", "tiny", layers=layers, context=512, axial_columns=16, dropout=0.0)
        plain = replace(value, body=replace(value.body, residual=PreNorm()))
        for name, one in (("reversible", value), ("plain", plain)):
            report(layers=layers, residual=name, **measured(one.build().to(device), token_BT, rounds))


def reuse(device: str, rounds: int) -> None:
    network = everyformer.build("transformer-xl", "tiny", width=256, heads=4, layers=6, dropout=0.0).to(device).eval()
    for memory in (256, 512, 1024, 2048, 3800):
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            report(**reuse_row(network, memory, device, rounds))


def reuse_row(network: nn.Module, memory: int, device: str, rounds: int, segment: int = 64) -> dict[str, float]:
    """Milliseconds per byte with a memory of this length, and without one."""
    token_BT = torch.randint(0, 256, (1, memory), device=device)
    cache = network(token_BT, cache=Cache(max_length=memory)).cache

    def read_segment() -> None:
        network(token_BT[:, :segment], cache=cache)

    encoded = median(lambda: network(token_BT), rounds, device == "cuda")
    reused = median(read_segment, rounds, device == "cuda")
    return {
        "attention_length": memory,
        "ms_per_byte_encoding_again": encoded,
        "ms_per_byte_with_memory": round(reused / segment, 4),
        "faster": round(encoded * segment / reused),
    }


def spans(device: str, rounds: int) -> None:
    longest = 4096
    token_BT = torch.randint(0, 256, (1, longest + 1), device=device)
    for span in (4096, 2048, 1024, 512, 256, 128, 64):
        changes = {
            "width": 128,
            "heads": 2,
            "layers": 2,
            "span": longest,
            "initial_span": span / longest,
            "dropout": 0.0,
        }
        network = everyformer.build("adaptive-span", "tiny", **changes).to(device)
        report(span=span, **measured(network, token_BT, rounds))


def report(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("depth", "reuse", "spans"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    start_log(seed=0)
    {"depth": depth, "reuse": reuse, "spans": spans}[options.what](options.device, options.rounds)


if __name__ == "__main__":
    main()
