"""What the long-context members save: activations by reversing, encoding by keeping a state, attention by short spans.

    python -m bench.long_context depth              # reformer, reversible against plain layers, 6 to 48 of them
    python -m bench.long_context reuse              # transformer-xl, a byte with its state against encoding all again
    python -m bench.long_context spans              # adaptive-span, a training step as the spans shrink

`--device cuda` computes in bf16 there. Memory is that of the tensors alive at the peak of a forward and backward pass, besides
weights and their gradients. Times are medians; on a CPU the processor's, on a GPU the clock's. One JSON line for each row.
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


def step(network: nn.Module, token_BT: Tensor) -> None:
    """Forward, cross-entropy and backward, into gradients that are there."""
    with torch.autocast(token_BT.device.type, torch.bfloat16, enabled=token_BT.is_cuda):
        output = network(token_BT[:, :-1])
    loss = F.cross_entropy(output.logits.flatten(0, 1).float(), token_BT[:, 1:].flatten())
    (loss + sum(output.aux.values(), torch.zeros((), device=loss.device))).backward()


def measured(network: nn.Module, token_BT: Tensor, rounds: int) -> dict[str, float]:
    for weight in network.parameters():
        weight.grad = torch.zeros_like(weight)
    with CostCounter(token_BT.device) as tally:
        step(network, token_BT)
    return {
        "ms": median(lambda: step(network, token_BT), rounds, token_BT.is_cuda),
        "MiB": round(tally.peak / 2**20, 1),
    }


def median(once: Callable[[], Any], rounds: int, cuda: bool) -> float:
    times = []
    for _ in range(rounds + 1):  # the first warms up
        began = now(cuda)
        once()
        times.append(now(cuda) - began)
    return round(1000 * statistics.median(times[1:]), 2)


def now(cuda: bool) -> float:
    if cuda:
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def depth(device: str, rounds: int) -> None:
    token_BT = torch.randint(0, 256, (4, 513), device=device)
    for layers in (6, 12, 24, 48):
        value = everyformer.member("reformer", "tiny", layers=layers, context=512, axial_columns=16, dropout=0.0)
        plain = replace(value, body=replace(value.body, residual=PreNorm()))
        for name, one in (("reversible", value), ("plain", plain)):
            tell(layers=layers, residual=name, **measured(one.build().to(device), token_BT, rounds))


def reuse(device: str, rounds: int) -> None:
    segment = 64
    network = everyformer.build("transformer-xl", "tiny", width=256, heads=4, layers=6, dropout=0.0).to(device).eval()
    for memory in (256, 512, 1024, 2048, 3800):
        token_BT = torch.randint(0, 256, (1, memory), device=device)
        with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            cache = network(token_BT, cache=Cache(), memory=memory).cache
            again = median(lambda: network(token_BT), rounds, device == "cuda")  # noqa: B023
            kept = median(lambda: network(token_BT[:, :segment], cache=cache, memory=memory), rounds, device == "cuda")  # noqa: B023
        row = {
            "attention_length": memory,
            "ms_a_byte_encoding_again": again,
            "ms_a_byte_with_state": round(kept / segment, 4),
        }
        tell(**row, faster=round(again * segment / kept))


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
        tell(span=span, **measured(network, token_BT, rounds))


def tell(**row: Any) -> None:
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("depth", "reuse", "spans"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.manual_seed(0)
    {"depth": depth, "reuse": reuse, "spans": spans}[given.what](given.device, given.rounds)


if __name__ == "__main__":
    main()
