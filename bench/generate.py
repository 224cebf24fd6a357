"""Tokens per second of generation: in slots (static), with a growing cache, and in transformers where it is installed.

    python -m bench.generate > generate.txt

The first 50 new tokens are not timed. Each way runs in turn, three times, and the median is printed. On a GPU in bfloat16.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch

from everyformer.family.table import find
from everyformer.infer.generate import stream
from everyformer.network.network import Network
from everyformer.train.provenance import start_log

MODELS = {"byte model 12 x 256": ("byte-language", "paper"), "GPT-2 124M": ("gpt2", "small")}
TOKENS, UNTIMED, PROMPT = 200, 50, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 64])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    start_log(seed=0, packages=("transformers",))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| model | batch | in slots | growing cache | transformers |\n| --- | --- | --- | --- | --- |")
    for name, (member, size) in MODELS.items():
        network = find(member).value(size).build().eval().to(device)
        network = network.to(torch.bfloat16) if device.type == "cuda" else network
        peer = transformers_gpt2(device) if member == "gpt2" and find_spec("transformers") else None
        for batch in options.batches:
            ways: dict[str, Callable[[], float]] = {
                "slots": lambda network=network, batch=batch: ours(network, batch, static=True),
                "cache": lambda network=network, batch=batch: ours(network, batch, static=False),
            }
            if peer is not None:
                ways["transformers"] = lambda peer=peer, batch=batch: theirs(peer, batch, device)
            speeds: dict[str, list[float]] = {way: [] for way in ways}
            for _ in range(options.repeats):
                for way, measure in ways.items():
                    speeds[way].append(measure())
            row = [
                f"{statistics.median(speeds[way]):,.0f}" if way in speeds else ""
                for way in ("slots", "cache", "transformers")
            ]
            print(f"| {name} | {batch} | " + " | ".join(row) + " |", flush=True)


def ours(network: Network, batch: int, static: bool) -> float:
    prompts = [[(row + i) % 256 for i in range(PROMPT)] for row in range(batch)]
    return tokens_per_second(stream(network, prompts, TOKENS, seed=0, static=static), batch)


def tokens_per_second(steps: Iterator[object], batch: int) -> float:
    marks = [time.perf_counter() for _ in steps]
    return (len(marks) - UNTIMED) * batch / (marks[-1] - marks[UNTIMED - 1])


def transformers_gpt2(device: torch.device) -> object:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    half = torch.bfloat16 if device.type == "cuda" else torch.float32
    return GPT2LMHeadModel(GPT2Config()).eval().to(device, half)


def theirs(peer: object, batch: int, device: torch.device) -> float:
    """Sampling with transformers' `generate` and its default cache; a processor of logits marks the time of each token."""
    marks: list[float] = []

    def mark(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        if device.type == "cuda":
            torch.cuda.synchronize()
        marks.append(time.perf_counter())
        return logits

    prompt = torch.randint(0, 50257, (batch, PROMPT), device=device)
    peer.generate(  # type: ignore[attr-defined]
        prompt, attention_mask=torch.ones_like(prompt), do_sample=True, min_new_tokens=TOKENS, max_new_tokens=TOKENS,
        logits_processor=[mark], pad_token_id=0,
    )  # fmt: skip
    return (len(marks) - UNTIMED) * batch / (marks[-1] - marks[UNTIMED - 1])


if __name__ == "__main__":
    main()
