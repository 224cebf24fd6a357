"""What halting saves: a pass of the Universal Transformer where a share of the positions halts after one step, the others never.

    python -m bench.halting --rounds 5
    python -m bench.halting --device cuda --width 1024 --length 1024 --batch 32 --rounds 20

The halting is given, not learned: of each sequence the stated share of positions, drawn by a seed, halts after the first of `--steps`
steps. `all` computes every position in every step until the last has halted; `gather` (run.gather) of halted positions the keys
alone; `fixed` is the same net without halting. `forward` is without gradients, `step` forward and backward. `write` is one more
token for each sequence after `--length` of them, which halts after one step where `halted` is 1 and never where it is 0.
Medians; on a CPU the processor's time. One JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import everyformer
from bench.recurrent import clock
from everyformer import Cache
from everyformer.train.learner import set_gather

SHARES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)


class Given(nn.Module):
    """A halting unit that says 1 of the positions that are to halt and 0 of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.h_BT = torch.zeros(1, 1)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.h_BT + 0 * x_BTD[..., 0]


def build(given: argparse.Namespace, halting: str | None) -> Any:
    torch.manual_seed(0)
    size = {"width": given.width, "steps": given.steps, "dropout": 0.0}
    return everyformer.build("universal-transformer", "language", halting=halting, **size).to(given.device)


def timed(compute: Callable[[], Any], rounds: int, now: Callable[[], float]) -> float:
    times = []
    for _ in range(rounds + 1):  # the first warms up
        begun = now()
        compute()
        times.append(now() - begun)
    return round(1000 * statistics.median(times[1:]), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    now = clock(given.device)
    token_BT = torch.randint(0, 256, (given.batch, given.length + 1), device=given.device)
    network, fixed = build(given, "freeze"), build(given, None)
    unit = network.body.unit = Given()

    def forward(one: Any) -> None:
        with torch.no_grad():
            one(token_BT[:, :-1])

    def step(one: Any) -> None:
        one(token_BT[:, :-1]).logits.float().logsumexp(-1).mean().backward()
        one.zero_grad(set_to_none=True)

    def write(one: Any, cache: Cache) -> None:
        with torch.no_grad():
            one(token_BT[:, -1:], cache=cache)

    def tell(way: str, halted: float | None, steps: float, **times: float) -> None:
        print(json.dumps({"way": way, "halted": halted, "steps_a_position": steps} | times), flush=True)

    with torch.no_grad():
        begun = fixed(token_BT[:, :-1], cache=Cache()).cache
    times = {name: timed(lambda f=f: f(fixed), given.rounds, now) for name, f in (("forward", forward), ("step", step))}
    tell("fixed", None, given.steps, **times, write=timed(lambda: write(fixed, begun), given.rounds, now))
    order_BT = torch.rand(given.batch, given.length, generator=torch.Generator().manual_seed(0)).argsort(1).argsort(1)
    for share in SHARES:
        h_BT = (order_BT < share * given.length).float().to(given.device)
        for way in ("all", "gather"):
            set_gather(network, way == "gather")
            unit.h_BT = h_BT
            times = {"forward": timed(lambda: forward(network), given.rounds, now)}
            times["step"] = timed(lambda: step(network), given.rounds, now)
            if share in (0.0, 1.0):
                with torch.no_grad():
                    begun = network(token_BT[:, :-1], cache=Cache()).cache
                unit.h_BT = h_BT[:, :1]
                times["write"] = timed(lambda begun=begun: write(network, begun), given.rounds, now)
            tell(way, share, round(1 + (given.steps - 1) * float(1 - h_BT.mean()), 2), **times)


if __name__ == "__main__":
    main()
