"""Measures generation: new tokens per second, beside transformers where it is installed.

    for row in bench(["bytes"], [1, 16], torch.device("cpu")): print(row)

The models are GPT-2's, with random weights. With transformers, both have the same weights and must write the same texts (greedy, up
to rounding), with its dynamic cache and fused attention. Ways: `cache` grows a cache, `slots` decodes in slots of a fixed size (on a
GPU one CUDA graph a token), `transformers`. All ways of one size are measured in turn, several times, after one time that is not
counted, so other load on the machine affects all alike. The ceiling is the time of the products with the weights alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from everyformer.family.pretrained import from_pretrained
from everyformer.family.table import build
from everyformer.infer.generate import generate
from everyformer.network.linear_cross_entropy import LogitMap
from everyformer.network.network import Network
from everyformer.network.packed import Packed
from everyformer.value import nearest

MODELS = {  # width, layers, heads, positions, vocabulary
    "bytes": (256, 12, 8, 256, 256),
    "gpt2": (768, 12, 12, 1024, 50257),
}
PROMPT = 8  # tokens
Texts = list[list[int]]


@dataclass(frozen=True)
class Speed:
    """One way of generation: new tokens per second (median, least, most) and milliseconds of processor time per step."""

    model: str
    batch: int
    threads: int
    way: str
    rate: float
    least: float
    most: float
    processor: float
    same_texts: int | None = None  # how many texts equal those of `cache`; None for the ceiling


def bench(
    models: Sequence[str],
    batches: Sequence[int],
    device: torch.device,
    *,
    threads: Sequence[int] = (1,),
    tokens: int = 64,
    repeats: int = 5,
) -> Iterator[list[Speed]]:
    """Yields the speeds of all ways, for each model, number of threads and batch."""
    for name in models:
        if name not in MODELS:
            raise ValueError(f"no model is named {name!r}; {nearest(name, MODELS)}")
        limit = MODELS[name][3] - PROMPT
        if tokens > limit:
            raise ValueError(
                f"tokens is {tokens}, but the model {name} has room for {limit} after the prompt; give fewer"
            )
    before = torch.get_num_threads()
    try:
        for name in models:
            network, peer = pair(name, device)
            for count in threads:
                torch.set_num_threads(count)
                for batch in batches:
                    yield _speeds(name, network, peer, batch, count, tokens, repeats)
    finally:
        torch.set_num_threads(before)


def pair(name: str, device: torch.device) -> tuple[Network, Any]:
    """Returns our network and that of transformers, None where it is not installed, with the same weights."""
    width, layers, heads, positions, vocabulary = MODELS[name]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    if not find_spec("transformers"):
        sizes: dict[str, Any] = {
            "width": width,
            "layers": layers,
            "heads": heads,
            "context": positions,
            "vocabulary": vocabulary,
        }
        alone = build("gpt2", **sizes).eval().to(device, dtype)
        assert isinstance(alone, Network)
        return alone, None
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, n_positions=positions, vocab_size=vocabulary,
        activation_function="gelu_pytorch_tanh", attn_implementation="sdpa", bos_token_id=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    peer = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in peer.parameters():  # so that texts are not one token again and again
            weight.add_(torch.randn_like(weight), alpha=0.02)
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        network = from_pretrained(folder)
    assert isinstance(network, Network)
    return network.to(device, dtype), peer.to(device, dtype)


def _speeds(name: str, network: Network, peer: Any, batch: int, threads: int, tokens: int, repeats: int) -> list[Speed]:
    device = next(network.parameters()).device
    prompts = [[(7 * row + i) % 256 for i in range(PROMPT)] for row in range(batch)]
    ways: dict[str, Callable[[], Texts]] = {
        "cache": lambda: generate(network, prompts, tokens, temperature=0, static=False),
        "slots": lambda: generate(network, prompts, tokens, temperature=0, static=True),
    }
    if peer is not None:
        ways["transformers"] = lambda: _theirs(peer, prompts, tokens, device)
    texts = {way: once() for way, once in ways.items()}
    same = {way: sum(one == two for one, two in zip(texts[way], texts["cache"], strict=True)) for way in ways}
    products = _products(network, batch, tokens)
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in (*ways, "ceiling")}
    for _ in range(repeats):
        for way, once in (*ways.items(), ("ceiling", products)):
            times[way].append(_timed(once, device))
    return [_speed(name, batch, threads, way, tokens, times[way], same.get(way)) for way in times]


def _speed(
    name: str, batch: int, threads: int, way: str, tokens: int, times: list[tuple[float, float]], same: int | None
) -> Speed:
    wall, processor = zip(*times, strict=True)
    rates = [batch * tokens / one for one in wall]
    milliseconds = 1000 * statistics.median(processor) / tokens
    return Speed(name, batch, threads, way, statistics.median(rates), min(rates), max(rates), milliseconds, same)


def _timed(once: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Seconds by the clock, and of the processor in all threads."""
    started, processor = time.perf_counter(), time.process_time()
    once()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - processor


def _theirs(peer: Any, prompts: Texts, tokens: int, device: torch.device) -> Texts:
    prompt_BT = torch.tensor(prompts, device=device)
    with torch.no_grad():
        text_BT = peer.generate(
            prompt_BT, attention_mask=torch.ones_like(prompt_BT), do_sample=False, max_new_tokens=tokens, pad_token_id=0
        )
    texts: Texts = text_BT.tolist()
    return texts


def _products(network: Network, batch: int, tokens: int) -> Callable[[], None]:
    """The products with the weights of every linear map, once for each token: what no way of decoding can leave out."""
    table = getattr(network.embed, "table", None)
    packed, weight = Packed(network), next(network.parameters())
    maps = [module for module in network.modules() if isinstance(module, nn.Linear)]
    inputs = [torch.randn(batch, 1, module.in_features).to(weight) for module in maps]
    x_B1D = torch.randn(batch, 1, network.value.width).to(weight)

    @torch.no_grad()
    def once() -> None:
        with packed.used():
            for _ in range(tokens):
                for module, x in zip(maps, inputs, strict=True):
                    module(x)
                if isinstance(table, nn.Embedding):
                    packed.logits(LogitMap(x_B1D, table.weight))

    return once
