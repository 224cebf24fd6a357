"""A training step of the LSTM and the ablated LSTM, the equations step by step against the fast way, and a Transformer beside.

    python -m bench.recurrent --lengths 64,256,1024 --rounds 5
    python -m bench.recurrent --device cuda --lengths 256,1024,4096 --batch 32 --rounds 20

A step is: forward, cross-entropy, backward, of `--size` (tiny, or byte: 9.7 million parameters each, as byte-language paper). All
run in one process, one step each in turn; medians. On a CPU the time is the processor's, steadier than the clock on a machine that
is shared; on a GPU the clock's, with the device waited for. One JSON line for each model and length.
`recurrence` is c_t = x_t + f_t c_{t-1} of one layer of the ablated LSTM alone, its gates given: in a loop and by the scan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

import everyformer
from everyformer.network.scan import scan

WAYS = [("lstm", "reference"), ("lstm", "auto"), ("ablated-lstm", "reference"), ("ablated-lstm", "auto")]


def clock(device: str) -> Callable[[], float]:
    def waited() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return waited if device == "cuda" else time.process_time


def loop(f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    c_BD, found = torch.zeros_like(x_BTD[:, 0]), []
    for f_BD, x_BD in zip(f_BTD.unbind(1), x_BTD.unbind(1), strict=True):
        c_BD = torch.addcmul(x_BD, f_BD, c_BD)
        found.append(c_BD)
    return torch.stack(found, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="byte", choices=("tiny", "byte"))
    parser.add_argument("--lengths", default="64,256")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    given = parser.parse_args()
    now = clock(given.device)
    for length in map(int, given.lengths.split(",")):
        torch.manual_seed(0)
        runs = {way: everyformer.build(way[0], given.size).to(given.device) for way in WAYS}
        beside = "paper" if given.size == "byte" else "tiny"
        runs["byte-language", "auto"] = everyformer.build("byte-language", beside, context=length).to(given.device)
        token_BT = torch.randint(0, 256, (given.batch, length + 1), device=given.device)
        times: dict[tuple[str, str], list[float]] = {way: [] for way in runs}
        shape = (given.batch, length, runs["ablated-lstm", "auto"].value.width)
        f_BTD, x_BTD = (torch.rand(shape, device=given.device, requires_grad=True) for _ in range(2))
        for _ in range(given.rounds + 1):  # the first round warms up
            for kernel, compute in (("loop", loop), ("scan", scan)):
                begun = now()
                compute(f_BTD, x_BTD).sum().backward()
                times.setdefault(("recurrence", kernel), []).append(now() - begun)
            for way, network in runs.items():
                begun = now()
                with torch.autocast(given.device, torch.bfloat16, enabled=given.precision == "bf16"):
                    logits_BTV = network(token_BT[:, :-1], kernel=way[1]).logits
                F.cross_entropy(logits_BTV.flatten(0, 1).float(), token_BT[:, 1:].flatten()).backward()
                network.zero_grad(set_to_none=True)
                times[way].append(now() - begun)
        for (name, kernel), found in times.items():
            median = statistics.median(found[1:])
            line = {
                "member": name,
                "kernel": kernel,
                "length": length,
                "batch": given.batch,
                "ms": round(1000 * median, 1),
            }
            print(json.dumps(line | {"tokens_per_second": round(given.batch * length / median)}), flush=True)


if __name__ == "__main__":
    main()
