"""The duplication task of Kitaev et al. 2020: predict the second w of sequences 0w0w, by the number of hash rounds.

    python -m bench.duplication --length 1024 --symbols 128 --steps 3000 --rounds 0,1,2,4 --device cuda
    python -m bench.duplication --length 64 --symbols 32 --steps 400 --width 64        # on a CPU, minutes

One layer as in the paper (width and feed-forward width 256, four heads) is trained with each number of rounds (0: full attention
with the same shared queries and keys), then evaluated on new sequences with 1, 2, 4 and 8 rounds of other hashes, and in full.
Of several rates the one with the best accuracy of seed 0, with the rounds of training, is taken; the other seeds are then trained with it.
Prints the accuracy on the second w. The paper's length is 1,024, its symbols 1 to 127, its steps 150,000.
"""

from __future__ import annotations

import argparse
import json
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer import (
    Attention,
    Causal,
    FeedForward,
    Hashed,
    Language,
    Layer,
    Learned,
    Model,
    Network,
    Normal,
    Reversible,
    Shared,
    Stack,
    Tokens,
    Window,
)
from everyformer.train.provenance import start_log

EVALUATED = (1, 2, 4, 8, 0)
TESTED = 1000  # added to the seed of a training run


def batch(random: torch.Generator, options: argparse.Namespace) -> Tensor:
    """Rows 0w0w, w of length / 2 - 1 symbols from 1 on."""
    w = torch.randint(1, options.symbols, (options.batch, options.length // 2 - 1), generator=random)
    return F.pad(w, (1, 0)).repeat(1, 2).to(options.device)


def build(rounds: int, options: argparse.Namespace) -> Network:
    """With 0 rounds a token attends to all earlier tokens, but not to itself, as with shared queries and keys."""
    pattern = Hashed(rounds, options.buckets, options.window) if rounds else Causal() & ~Window(1)
    layer = Layer((Attention(Shared(4), pattern), FeedForward(options.width)))
    value = Model(
        width=options.width,
        embed=Tokens(options.symbols),
        position=Learned(options.length),
        body=Stack(1, (layer,), Reversible()),
        outputs=(Language(tied=False),),
        initial=Normal(1.0, by_width=True),
    )
    return value.build().to(options.device)


def second(network: Network, token_BT: Tensor) -> tuple[Tensor, Tensor]:
    """The logits and the symbols of the second w."""
    half = token_BT.shape[1] // 2
    return network(token_BT[:, :-1]).logits[:, half:], token_BT[:, half + 1 :]


def train(rounds: int, rate: float, seed: int, options: argparse.Namespace) -> Network:
    torch.manual_seed(seed)
    network = build(rounds, options).train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    random, start = torch.Generator().manual_seed(seed), time.perf_counter()
    for step in range(options.steps):
        for group in optimizer.param_groups:  # warm-up over 100 steps, then decay to 0
            group["lr"] = rate * min(1, (step + 1) / 100, 2 * (1 - step / options.steps))
        logits, wanted = second(network, batch(random, options))
        loss = F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % max(1, options.steps // 5) == 0:
            seconds = time.perf_counter() - start
            print(f"rounds {rounds}  step {step + 1}  loss {loss.item():.4f}  {seconds:.0f} s", flush=True)
    return network.eval()


@torch.no_grad()
def accuracy(network: Network, rounds: int, seed: int, options: argparse.Namespace) -> float:
    """The accuracy of the trained weights with this number of rounds of new hashes, on sequences of no training run."""
    torch.manual_seed(TESTED + seed)
    other, random = build(rounds, options).eval(), torch.Generator().manual_seed(TESTED + seed)
    trained = {name: x for name, x in network.state_dict().items() if "rotation" not in name}
    other.load_state_dict(trained, strict=False)
    pairs = [second(other, batch(random, options)) for _ in range(8)]
    return float(torch.stack([(logits.argmax(-1) == wanted).float().mean() for logits, wanted in pairs]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"length": 256, "symbols": 128, "steps": 2000, "batch": 32, "width": 256}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--buckets", type=int, help="default: length / 8")
    parser.add_argument("--window", type=int, help="default: 16, twice the mean number of keys in a bucket")
    parser.add_argument("--rounds", default="0,1,2,4", help="rounds to train with; 0 is full attention")
    parser.add_argument("--rates", default="3e-3", help="with commas; of several the best for seed 0 is taken")
    parser.add_argument("--seeds", type=int, default=1, help="number of final runs")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    rates, several = [float(rate) for rate in options.rates.split(",")], "," in options.rates
    seeds = range(several, several + options.seeds)
    start_log(seed=range(seeds[-1] + 1))
    options.buckets, options.window = options.buckets or options.length // 8, options.window or 16
    for rounds in map(int, options.rounds.split(",")):
        best = rates[0]
        if several:
            found = {rate: accuracy(train(rounds, rate, 0, options), rounds, 0, options) for rate in rates}
            best = max(rates, key=lambda rate: found[rate])
            print(json.dumps({"tuned": rounds or "full", "accuracy_by_rate": found, "rate": best}), flush=True)
        for seed in seeds:
            network = train(rounds, best, seed, options)
            accuracies = {one or "full": round(accuracy(network, one, seed, options), 4) for one in EVALUATED}
            line = {"trained": rounds or "full", "rate": best, "seed": seed, "accuracy": accuracies}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
