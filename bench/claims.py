"""Measures three claims of the sources, on the embedded text of Shakespeare, byte by byte.

    python -m bench.claims norms --norms BatchNorm > docs/results/logs/norms_batch.txt    # two minutes on a free core
    python -m bench.claims positions --steps 500 > docs/results/logs/claims_positions.txt
    python -m bench.claims depth > docs/results/logs/claims_depth.txt          # about a minute on an H200

norms      BatchNorm in a Transformer is "far less stable" (source K): the same encoder with each of four norms fills in masked bytes,
           at five learning rates. It is an encoder because three of the norms mix positions, which a causal model refuses. Its
           positions are relative (a bias of the scores): with added ones its loss stays that of single bytes for a thousand steps.
positions  Sinusoids are as good as learned positions within the trained length, and go beyond it (source B doubts that they are good
           there): the same decoder with each, trained on 32 positions.
depth      The Sparse Transformer (Child et al. 2019): 128 layers on 16,384 positions, in bfloat16, with recomputed activations and
           block-sparse attention.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from everyformer import (
    Attention,
    BatchNorm,
    Causal,
    FeedForward,
    Full,
    InstanceNorm,
    Language,
    Layer,
    LayerNorm,
    Learned,
    Masked,
    Model,
    PreNorm,
    SequenceNorm,
    Sinusoidal,
    Stack,
    Standard,
    T5Bias,
    Tokens,
    build,
)
from everyformer.data.synthetic import shakespeare
from everyformer.infer.sample import seeded_generator
from everyformer.train.learner import set_checkpoint_segments
from everyformer.train.provenance import start_log

NORMS = {
    "LayerNorm": LayerNorm(),
    "BatchNorm": BatchNorm(),
    "InstanceNorm": InstanceNorm(),
    "SequenceNorm": SequenceNorm(),
}
POSITIONS = {"sinusoidal": Sinusoidal(), "learned": Learned(32)}
MASK, LENGTH, BATCH = 256, 32, 32
RATES = (1e-3, 3e-3, 1e-2)
NORM_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
NORM_SEEDS = 3  # final seeds of the norms
FINAL_SEEDS = range(1, 9)  # of the positions
BEYOND = (32, 40, 64, 128)  # the ends of the ranges of positions in which the loss is measured


class Text:
    """The embedded text as bytes; the last tenth is held out."""

    def __init__(self, device: torch.device) -> None:
        token_N = torch.frombuffer(bytearray(shakespeare().encode()), dtype=torch.uint8).long().to(device)
        self.parts = {"train": token_N[: len(token_N) * 9 // 10], "valid": token_N[len(token_N) * 9 // 10 :]}

    def windows(self, part: str, length: int, batch: int, *key: int | str) -> Tensor:
        """Windows at random positions, the same for the same key."""
        token_N = self.parts[part]
        start_B1 = torch.randint(0, len(token_N) - length, (batch, 1), generator=seeded_generator(part, *key))
        return token_N[(start_B1 + torch.arange(length)).to(token_N.device)]


def network_of(attention: Attention, position: Any, norm: Any, vocabulary: int, device: torch.device) -> nn.Module:
    head = Language() if isinstance(attention.pattern, Causal) else Masked()
    body = Stack(2, (Layer((attention, FeedForward(256))),), PreNorm(norm))
    model = Model(width=64, embed=Tokens(vocabulary), position=position, body=body, outputs=(head,))
    return model.build().to(device)


class Step:
    """A step of AdamW with clipping to 1; on a GPU it may be a CUDA graph. Returns the loss and the norm of the gradient."""

    def __init__(self, network: nn.Module, loss_of: Callable[[Tensor], Tensor], lr: float, graph: bool) -> None:
        self.weights, self.loss_of, self.calls = list(network.parameters()), loss_of, 0
        device = self.weights[0].device
        self.captures = graph and device.type == "cuda"
        self.lr = torch.tensor(lr, device=device)
        settings = {"lr": self.lr, "betas": (0.9, 0.99), "weight_decay": 0.01, "capturable": device.type == "cuda"}
        self.adam = torch.optim.AdamW(self.weights, **settings)  # type: ignore[arg-type]

    def __call__(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        if not self.captures:
            return self._compute(batch)
        if self.calls < 4:  # on a side stream, as a capture needs it
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                outputs = self._compute(batch)
            torch.cuda.current_stream().wait_stream(stream)
            return outputs
        if self.calls == 4:
            torch.cuda.synchronize()
            self.batch, self.graph = batch.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.outputs = self._compute(self.batch)
        self.batch.copy_(batch)
        self.graph.replay()
        return self.outputs

    def _compute(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        self.adam.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.adam.step()
        return loss.detach(), norm


def train(
    network: nn.Module,
    loss_of: Callable[[Tensor], Tensor],
    batch_of: Callable[[int], Tensor],
    steps: int,
    lr: float,
    graph: bool = True,
) -> tuple[list[float], list[float]]:
    """With 100 steps of warm-up. Returns the losses and the norms of the gradient before clipping."""
    network.train()
    step = Step(network, loss_of, lr, graph)
    found = []
    for number in range(steps):
        step.lr.fill_(lr * min(1.0, (number + 1) / 100))
        found.append(torch.stack(step(batch_of(number))))
    losses, gradients = torch.stack(found).T.tolist()
    return losses, gradients


def norms(device: torch.device, steps: int, names: Sequence[str] = tuple(NORMS)) -> None:
    """Seed 0 chooses a rate by its loss on validation windows; the others are trained with every rate and evaluated on other windows."""
    text = Text(device)
    for name, norm in ((name, NORMS[name]) for name in names):
        for lr in NORM_RATES:
            for seed in range(1 + NORM_SEEDS):
                torch.manual_seed(seed)
                network = network_of(Attention(Standard(4), Full(), (T5Bias(),)), None, norm, MASK + 1, device)

                def batch_of(step: int, part: str = "train", key: int | str = seed) -> Tensor:
                    """Bytes, and those of them that are masked."""
                    token_BT = text.windows(part, LENGTH, BATCH, key, step)
                    masked_BT = torch.rand(token_BT.shape, generator=seeded_generator(part, "mask", key, step)) < 0.15
                    return torch.stack([token_BT, masked_BT.to(token_BT)])

                def loss_of(batch_2BT: Tensor, network: nn.Module = network) -> Tensor:
                    token_BT, masked_BT = batch_2BT[0], batch_2BT[1].bool()
                    logits = network(token_BT.masked_fill(masked_BT, MASK)).logits
                    return F.cross_entropy(logits.flatten(0, 1), token_BT.masked_fill(~masked_BT, -100).flatten())

                losses, gradients = train(network, loss_of, batch_of, steps, lr)
                network.eval()
                with torch.no_grad():
                    windows = (batch_of(step, "valid", "final" if seed else "tuning") for step in range(16))
                    found = statistics.mean(float(loss_of(one)) for one in windows)
                late = losses[steps // 2 :]
                print(json.dumps({
                    "claim": "norms", "norm": name, "lr": lr, "seed": seed, "steps": steps,
                    "final" if seed else "tuning": round(found, 4), "train": round(statistics.mean(late[-50:]), 4),
                    "jumps": round(statistics.stdev(b - a for a, b in pairwise(late)), 4),
                    "largest_gradient": round(max(gradients[steps // 2 :]) / statistics.median(gradients[steps // 2 :]), 2),
                }), flush=True)  # fmt: skip


def positions(device: torch.device, steps: int) -> None:
    """The rate of each is chosen by the loss of seed 0 on validation windows; the other seeds are evaluated on other windows."""
    text = Text(device)
    for name, position in POSITIONS.items():
        found = dict[float, float]()
        for seed, rate in [*((0, rate) for rate in RATES), *((seed, None) for seed in FINAL_SEEDS)]:
            lr = rate or min(found, key=lambda one: found[one])
            torch.manual_seed(seed)
            network = network_of(Attention(Standard(4), Causal()), position, LayerNorm(), 256, device)

            def batch_of(step: int, seed: int = seed) -> Tensor:
                return text.windows("train", LENGTH + 1, BATCH, seed, step)

            def loss_of(token_BT: Tensor, network: nn.Module = network) -> Tensor:
                return F.cross_entropy(network(token_BT[:, :-1]).logits.flatten(0, 1), token_BT[:, 1:].flatten())

            train(network, loss_of, batch_of, steps, lr)
            network.eval()
            line: dict[str, Any] = {"claim": "positions", "position": name, "lr": lr, "seed": seed, "steps": steps}
            if seed == 0:
                found[lr] = line["tuning"] = round(bits(network, text, 0, LENGTH, "tuning"), 4)
            start = 0
            for end in BEYOND if seed else ():
                try:
                    line[f"{start}-{end - 1}"] = round(bits(network, text, start, end), 4)
                except ValueError as error:
                    line[f"{start}-{end - 1}"] = f"refused: {error}"
                start = end
            print(json.dumps(line), flush=True)


@torch.no_grad()
def bits(network: nn.Module, text: Text, start: int, end: int, *key: str) -> float:
    """Bits per byte of the predictions at the positions start to end - 1, of windows that begin at position 0."""
    total = 0.0
    for number in range(8):
        token_BT = text.windows("valid", end + 1, 32, *key, number)
        logits = network(token_BT[:, :-1]).logits[:, start:]
        total += float(F.cross_entropy(logits.flatten(0, 1), token_BT[:, 1 + start :].flatten()))
    return total / 8 / 0.6931471805599453


def depth(device: torch.device, steps: int, length: int = 16_384, layers: int = 128) -> None:
    """One sequence in a step."""
    text = Text(device)
    torch.manual_seed(0)
    sizes = {
        "layers": layers,
        "width": 256,
        "heads": 4,
        "context": length,
        "stride": 128,
        "columns": 32,
        "dropout": 0.0,
    }
    network: Any = build("sparse-transformer", **sizes).to(device)  # type: ignore[arg-type]
    set_checkpoint_segments(network, layers)
    first, last = (network.body.layers[index].sublayers[-1].out.weight for index in (0, -1))
    started: list[float] = []

    def batch_of(step: int) -> Tensor:
        if device.type == "cuda":
            torch.cuda.synchronize()
        started.append(time.perf_counter())
        return text.windows("train", length + 1, 1, 0, step)

    def loss_of(token_BT: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            logits = network(token_BT[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), token_BT[:, 1:].flatten())

    losses, gradients = train(network, loss_of, batch_of, steps, 1e-3, graph=False)
    if device.type == "cuda":
        torch.cuda.synchronize()
    memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    print(json.dumps({
        "claim": "depth", **sizes, "parameters": sum(p.numel() for p in network.parameters()), "steps": steps,
        "precision": "bfloat16", "first_loss": round(losses[0], 4), "last_losses": [round(x, 4) for x in losses[-5:]],
        "seconds_a_step": round((started[-1] - started[len(started) // 2]) / max(1, len(started) - 1 - len(started) // 2), 3),
        "peak_gib": memory and round(memory, 2), "largest_gradient": round(max(gradients), 3),
        "gradient_first_over_last_layer": round(float(first.grad.norm() / last.grad.norm()), 3),
    }), flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    claims = {"norms": (norms, 400), "positions": (positions, 3000), "depth": (depth, 40)}
    parser.add_argument("claims", nargs="*", choices=[[], *claims], help="default: all")
    parser.add_argument("--norms", nargs="+", choices=[*NORMS], help="those that are trained; default: all")
    parser.add_argument("--steps", type=int, help="default: 400, 3000 and 40")
    options = parser.parse_args()
    start_log(seed=range(1 + NORM_SEEDS) if options.claims == ["norms"] else [0, *FINAL_SEEDS])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name in options.claims or claims:
        run, steps = claims[name]
        run(device, options.steps or steps, *([options.norms] if name == "norms" and options.norms else []))


if __name__ == "__main__":
    main()
