"""The parity task of Graves 2016: do harder inputs take more steps of adaptive computation time?

    OMP_NUM_THREADS=1 python -m bench.ponder > docs/results/logs/ponder.txt

An input is one vector of `--size` numbers, of which the first n are 1 or -1 in a random order of places and the others 0, n from 1 to
`--size`; the answer is whether the number of ones is odd. The more numbers, the harder. A plain
recurrent net of width 64 takes at most 10 steps on the input and pays for each. Its learning rate is chosen by the accuracy on
validation inputs with seed 0, for a net with halting and one with a single step; twenty other seeds are then tested on new inputs. Seeds
1 to 5 are not among them, because they showed how many are needed.
Prints a JSON line for each run: its accuracy, and the mean number of steps by n.
"""

from __future__ import annotations

import argparse
import json

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.results import Rows, json_lines, mean, mean_range, table
from everyformer import Classify, Features, Layer, Model, Network, NoResidual, PonderRnn, Stack
from everyformer.attention.context import Probe
from everyformer.infer.sample import seeded_generator
from everyformer.train.provenance import start_log

WIDTH, STEPS, BATCH = 64, 10, 256
RATES = (1e-3, 3e-3, 1e-2)
SEEDS = range(6, 26)
KINDS = {"halting": STEPS, "one step": 1}


def batch(size: int, *key: int | str) -> tuple[Tensor, Tensor, Tensor]:
    """Vectors, their classes, and how many numbers each has; the same for the same key."""
    random = seeded_generator(*key)
    count_B = torch.randint(1, size + 1, (BATCH,), generator=random)
    sign_BF = torch.randint(0, 2, (BATCH, size), generator=random)
    filled_BF = torch.rand(BATCH, size, generator=random).argsort(1).argsort(1) < count_B[:, None]
    odd_B = (sign_BF * filled_BF).sum(1) % 2
    return ((2 * sign_BF - 1) * filled_BF).float()[:, None], odd_B, count_B


def trained(kind: str, rate: float, seed: int, options: argparse.Namespace) -> Network:
    torch.manual_seed(seed)
    layer = Layer((PonderRnn(KINDS[kind], "rnn", cost=options.cost),))
    value = Model(
        width=WIDTH,
        embed=Features(options.size),
        body=Stack(1, (layer,), NoResidual()),
        outputs=(Classify(2, "last"),),
    )
    network = value.build().train()
    optimizer = torch.optim.Adam(network.parameters(), lr=rate)
    for step in range(options.steps):
        for group in optimizer.param_groups:  # warm-up over 100 steps, then decay to 0
            group["lr"] = rate * min(1, (step + 1) / 100, 2 * (1 - step / options.steps))
        x_BTF, odd_B, _ = batch(options.size, "train", seed, step)
        output = network(x_BTF)
        loss = F.cross_entropy(output.logits, odd_B) + sum(output.aux.values(), torch.zeros(()))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return network.eval()


@torch.no_grad()
def tested(network: Network, split: str, options: argparse.Namespace) -> dict[str, object]:
    """The accuracy, and the mean number of steps by the count of numbers in the input."""
    right, steps = [], [list[float]() for _ in range(options.size)]
    for number in range(16):
        x_BTF, odd_B, count_B = batch(options.size, split, number)
        probe = Probe()
        right.append((network(x_BTF, probe=probe).logits.argmax(-1) == odd_B).float().mean())
        for count, taken in zip(count_B.tolist(), (probe.halts[0][:, 0] > 0).sum(-1).tolist(), strict=True):
            steps[count - 1].append(taken)
    return {"accuracy": round(float(torch.stack(right).mean()), 4), "steps": [round(mean(some), 3) for some in steps]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=6, help="most numbers in an input")
    parser.add_argument("--steps", type=int, default=1000, help="training steps of 256 inputs")
    parser.add_argument("--cost", type=float, default=1e-2, help="of a step on an input")
    options = parser.parse_args()
    start_log(seed=(0, *SEEDS))
    for kind in KINDS:
        found = dict[float, float]()
        for seed, rate in [*((0, rate) for rate in RATES), *((seed, None) for seed in SEEDS)]:
            rate = rate or max(found, key=lambda one: found[one])
            line = tested(trained(kind, rate, seed, options), "test" if seed else "valid", options)
            if not seed:
                found[rate] = line["accuracy"]  # type: ignore[assignment]
            print(
                json.dumps({"kind": kind, "rate": rate, "seed": seed, "training_steps": options.steps} | line),
                flush=True,
            )


@table("steps by difficulty")
def steps_by_difficulty(log: str) -> Rows:
    found = [one for one in json_lines(log) if one["seed"]]
    counts = range(1, len(found[0]["steps"]) + 1)
    rows = [["net", "seeds", "rate", "accuracy", *(f"{count} number{'s' * (count > 1)}" for count in counts)]]
    for kind in KINDS:
        some = [one for one in found if one["kind"] == kind]
        steps = (mean_range([one["steps"][count - 1] for one in some]) for count in counts)
        accuracy = mean([one["accuracy"] for one in some])
        rows.append([kind, str(len(some)), f"{some[0]['rate']:g}", f"{accuracy:.3f}", *steps])
    return rows


if __name__ == "__main__":
    main()
