"""Times a training step of the LSTM and the ablated LSTM, step by step and by the fast path, beside a Transformer.

    python -m bench.recurrent --lengths 64,256,1024 --rounds 5
    python -m bench.recurrent --device cuda --lengths 256,1024,4096 --batch 32 --rounds 20

A step is forward, cross-entropy and backward, at `--size` (tiny, or byte: 9.7 million parameters each, as byte-language paper). All
models run in one process, one step each in turn; the median is reported, on a CPU in processor time, on a GPU by the clock after
synchronizing. Prints one JSON line per model and length.
`recurrence` is c_t = x_t + f_t c_{t-1} of one layer of the ablated LSTM alone, with given gates: in a loop and by the scan.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import everyformer
from everyformer.network.scan import scan
from everyformer.train.provenance import start_log

WAYS = [("lstm", "reference"), ("lstm", "auto"), ("ablated-lstm", "reference"), ("ablated-lstm", "auto")]


def clock(device: str) -> Callable[[], float]:
    def synchronized() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return synchronized if device == "cuda" else time.process_time


def loop(f_BTD: Tensor, x_BTD: Tensor) -> Tensor:
    c_BD, states = torch.zeros_like(x_BTD[:, 0]), []
    for f_BD, x_BD in zip(f_BTD.unbind(1), x_BTD.unbind(1), strict=True):
        c_BD = torch.addcmul(x_BD, f_BD, c_BD)
        states.append(c_BD)
    return torch.stack(states, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--size", default="byte", choices=("tiny", "byte"))
    parser.add_argument("--lengths", default="64,256")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
    options = parser.parse_args()
    start_log(seed=0)
    now = clock(options.device)
    for length in map(int, options.lengths.split(",")):
        torch.manual_seed(0)
        runs: dict[tuple[str, str], Any] = {
            way: everyformer.build(way[0], options.size).to(options.device) for way in WAYS
        }
        transformer_size = "paper" if options.size == "byte" else "tiny"
        runs["byte-language", "auto"] = everyformer.build("byte-language", transformer_size, context=length).to(
            options.device
        )
        token_BT = torch.randint(0, 256, (options.batch, length + 1), device=options.device)
        times: dict[tuple[str, str], list[float]] = {way: [] for way in runs}
        shape = (options.batch, length, runs["ablated-lstm", "auto"].value.width)
        f_BTD, x_BTD = (torch.rand(shape, device=options.device, requires_grad=True) for _ in range(2))
        for _ in range(options.rounds + 1):  # the first round is a warm-up
            for kernel, compute in (("loop", loop), ("scan", scan)):
                start = now()
                compute(f_BTD, x_BTD).sum().backward()
                times.setdefault(("recurrence", kernel), []).append(now() - start)
            for way, network in runs.items():
                start = now()
                with torch.autocast(options.device, torch.bfloat16, enabled=options.precision == "bf16"):
                    logits_BTV = network(token_BT[:, :-1], kernel=way[1]).logits
                F.cross_entropy(logits_BTV.flatten(0, 1).float(), token_BT[:, 1:].flatten()).backward()
                network.zero_grad(set_to_none=True)
                times[way].append(now() - start)
        for (name, kernel), seconds in times.items():
            median = statistics.median(seconds[1:])
            line = {
                "member": name,
                "kernel": kernel,
                "length": length,
                "batch": options.batch,
                "ms": round(1000 * median, 1),
            }
            print(json.dumps(line | {"tokens_per_second": round(options.batch * length / median)}), flush=True)


if __name__ == "__main__":
    main()
