"""Measures what halting saves: a Universal Transformer in which a share of the positions halts after one step.

    python -m bench.halting --rounds 5
    python -m bench.halting --device cuda --width 1024 --length 1024 --batch 32 --rounds 20

The halting is prescribed: in each sequence a random share of the positions halts after the first of `--steps` steps, the others never.
`all` computes every position in every step until the last one halts; `gather` (run.gather) computes only the keys of halted
positions; `fixed` is the same network without halting. `forward` is without gradients, `step` is forward and backward, `token` is one
more token for each sequence after `--length` tokens; it halts after one step if `halted` is 1, never if 0.
Prints one JSON line each, with medians; on a CPU in processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import everyformer
from bench.recurrent import clock
from everyformer import Cache
from everyformer.train.learner import set_gather
from everyformer.train.provenance import start_log

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


class PrescribedHalting(nn.Module):
    """A halting unit that returns 1 for the positions that halt and 0 for the others."""

    def __init__(self) -> None:
        super().__init__()
        self.h_BT = torch.zeros(1, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.h_BT + 0 * x_BTD[..., 0]


def build(options: argparse.Namespace, halting: str | None) -> Any:
    torch.manual_seed(0)
    size = {"width": options.width, "steps": options.steps, "dropout": 0.0}
    return everyformer.build("universal-transformer", "language", halting=halting, **size).to(options.device)


def timed(compute: Callable[[], Any], rounds: int, now: Callable[[], float]) -> float:
    times = []
    for _ in range(rounds + 1):  # the first is a warm-up
        start = now()
        compute()
        times.append(now() - start)
    return round(1000 * statistics.median(times[1:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    start_log(seed=0)
    now = clock(options.device)
    token_BT = torch.randint(0, 256, (options.batch, options.length + 1), device=options.device)
    network, fixed = build(options, "freeze"), build(options, None)
    unit = network.body.unit = PrescribedHalting()

    def forward(one: Any) -> None:
        with torch.no_grad():
            one(token_BT[:, :-1])

    def step(one: Any) -> None:
        one(token_BT[:, :-1]).logits.float().logsumexp(-1).mean().backward()
        one.zero_grad(set_to_none=True)

    def token(one: Any, cache: Cache) -> None:
        with torch.no_grad():
            one(token_BT[:, -1:], cache=cache)

    def report(way: str, halted: float | None, steps: float, **times: float) -> None:
        print(json.dumps({"way": way, "halted": halted, "steps_per_position": steps} | times), flush=True)

    with torch.no_grad():
        cache = fixed(token_BT[:, :-1], cache=Cache()).cache
    times = {name: timed(partial(f, fixed), options.rounds, now) for name, f in (("forward", forward), ("step", step))}
    report("fixed", None, options.steps, **times, token=timed(lambda: token(fixed, cache), options.rounds, now))
    order_BT = (
        torch.rand(options.batch, options.length, generator=torch.Generator().manual_seed(0)).argsort(1).argsort(1)
    )
    for share in SHARES:
        h_BT = (order_BT < share * options.length).float().to(options.device)
        for way in ("all", "gather"):
            set_gather(network, way == "gather")
            unit.h_BT = h_BT
            times = {"forward": timed(lambda: forward(network), options.rounds, now)}
            times["step"] = timed(lambda: step(network), options.rounds, now)
            if share in (0.0, 1.0):
                with torch.no_grad():
                    cache = network(token_BT[:, :-1], cache=Cache()).cache
                unit.h_BT = h_BT[:, :1]
                times["token"] = timed(partial(token, network, cache), options.rounds, now)
            report(way, share, round(1 + (options.steps - 1) * float(1 - h_BT.mean()), 2), **times)


if __name__ == "__main__":
    main()
