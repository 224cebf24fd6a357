"""Measures generation: new tokens per second, beside transformers where it is installed.

    for row in bench(["bytes"], [1, 16], torch.device("cpu")): print(row)

The models are GPT-2's, with random weights. With transformers, both have the same weights. All ways of one size are measured in turn,
several times, after one time that is not counted, so other load on the machine affects all alike.

    way            on a CPU: float32, greedy, all tokens         on a GPU: bfloat16, sampling, without the first quarter of the tokens
    cache          grows a cache                                 the same
    slots          slots of a fixed size                         one CUDA graph a token, of PyTorch's kernels
    fused          the same, without the modules                 the same, of the programs of network/fused_step.py
    transformers   its dynamic cache and fused attention         the same
    static         -                                             its static cache, which it compiles
    ceiling        the products with the weights alone           the time to read the weights, as fast as memory is copied in this run
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
from torch import Tensor, nn

from everyformer.family.pretrained import from_pretrained
from everyformer.family.table import build
from everyformer.infer.generate import stream
from everyformer.network.fused_step import fused_reason
from everyformer.network.linear_cross_entropy import LogitMap
from everyformer.network.network import Network
from everyformer.network.output_head import LanguageModule
from everyformer.network.packed import Packed
from everyformer.value import nearest

MODELS = {  # width, layers, heads, positions, vocabulary
    "bytes": (256, 12, 8, 256, 256),
    "gpt2": (768, 12, 12, 1024, 50257),
}
PROMPT = 8  # tokens
COMPILING = 0.4  # share of the time limit after which nothing is compiled any more
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
    same_texts: int | None = (
        None  # how many texts equal those of `cache`; None for the ceiling, and other random numbers
    )


class Clock:
    """Counts the time after the first `skip` tokens."""

    def __init__(self, device: torch.device, skip: int):
        self.device, self.left = device, skip
        self._start()

    def _start(self) -> None:
        self._wait()
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def token(self) -> None:
        self.left -= 1
        if self.left == 0:
            self._start()

    def read(self) -> tuple[float, float]:
        """Seconds by the clock, and of the processor in all threads."""
        self._wait()
        return time.perf_counter() - self.wall, time.process_time() - self.processor


Way = Callable[[Clock], Texts]


def bench(
    models: Sequence[str],
    batches: Sequence[int],
    device: torch.device,
    *,
    threads: Sequence[int] = (1,),
    tokens: int = 64,
    repeats: int = 5,
    seconds: float = 150.0,
) -> Iterator[list[Speed]]:
    """Yields the speeds of all ways, for each model, number of threads and batch.

    Once two fifths of the `seconds` have passed, ways that transformers compiles are left out.
    """
    started = time.perf_counter()
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
                    compiles = time.perf_counter() - started < COMPILING * seconds
                    ways = _ways(network, peer, batch, tokens, compiles)
                    yield _speeds((name, batch, count), ways, device, tokens, repeats)
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


def _ways(network: Network, peer: Any, batch: int, tokens: int, compiles: bool) -> dict[str, Way]:
    """The ways to generate so many tokens; the ceiling is the last one."""
    device = next(network.parameters()).device
    on_gpu = device.type == "cuda"
    prompts = [[(7 * row + i) % 256 for i in range(PROMPT)] for row in range(batch)]
    chosen: dict[str, Any] = {"seed": 0} if on_gpu else {"temperature": 0}

    def ours(**options: Any) -> Way:
        return lambda clock: _ours(network, prompts, tokens, clock, **chosen, **options)

    def theirs(**options: Any) -> Way:
        sampling = {"do_sample": True, "top_k": 0} if on_gpu else {"do_sample": False}
        return lambda clock: _theirs(peer, prompts, tokens, clock, **sampling, **options)

    ways = {"cache": ours(static=False), "slots": ours(static=True, fused=False)}
    if fused_reason(network) is None:
        ways["fused"] = ours(fused=True)
    if peer is not None:
        ways["transformers"] = theirs()
        if on_gpu and compiles:
            ways["static"] = theirs(cache_implementation="static")
    products = _reading(network, tokens) if on_gpu else _products(network, batch, tokens)
    return ways | {"ceiling": products}


def _speeds(
    size: tuple[str, int, int], ways: dict[str, Way], device: torch.device, tokens: int, repeats: int
) -> list[Speed]:
    skip = tokens // 4 if device.type == "cuda" else 0
    texts = {way: once(Clock(device, skip)) for way, once in ways.items()}
    same: dict[str, int] = {}
    for way, of_way in texts.items():
        if way != "ceiling" and (device.type == "cpu" or way in ("cache", "slots", "fused")):
            same[way] = sum(one == two for one, two in zip(of_way, texts["cache"], strict=True))
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way, once in ways.items():
            clock = Clock(device, skip)
            once(clock)
            times[way].append(clock.read())
    return [_speed(size, way, tokens - skip, times[way], same.get(way)) for way in times]


def _speed(
    size: tuple[str, int, int], way: str, tokens: int, times: list[tuple[float, float]], same: int | None
) -> Speed:
    wall, processor = zip(*times, strict=True)
    rates = [size[1] * tokens / one for one in wall]
    milliseconds = 1000 * statistics.median(processor) / tokens
    return Speed(*size, way, statistics.median(rates), min(rates), max(rates), milliseconds, same)


def _ours(network: Network, prompts: Texts, tokens: int, clock: Clock, **options: Any) -> Texts:
    texts = [list(prompt) for prompt in prompts]
    for new in stream(network, prompts, tokens, **options):
        for text, token in zip(texts, new, strict=True):
            assert token is not None
            text.append(token)
        clock.token()
    return texts


def _theirs(peer: Any, prompts: Texts, tokens: int, clock: Clock, **options: Any) -> Texts:
    prompt_BT = torch.tensor(prompts, device=clock.device)

    def count(text_BT: Tensor, scores: Any, **_: Any) -> Tensor:
        clock.token()
        return torch.zeros(len(text_BT), dtype=torch.bool, device=text_BT.device)

    with torch.no_grad():
        text_BT = peer.generate(
            prompt_BT, attention_mask=torch.ones_like(prompt_BT), max_new_tokens=tokens, pad_token_id=0,
            stopping_criteria=[count], **options,
        )  # fmt: skip
    texts: Texts = text_BT.tolist()
    return texts


def _reading(network: Network, tokens: int) -> Way:
    """Copies memory for as long as it takes to read the weights of all maps once for each token."""
    weights = [module.weight for module in network.modules() if isinstance(module, nn.Linear)]
    heads = [head.weight(network.embed) for head in network.outputs if isinstance(head, LanguageModule)]
    distinct = {id(weight): weight.numel() * weight.element_size() for weight in (*weights, *heads)}
    source = torch.empty(1 << 29, dtype=torch.uint8, device=next(network.parameters()).device)
    target = torch.empty_like(source)

    def once(clock: Clock) -> Texts:
        counted = tokens - max(0, clock.left)
        left = counted * sum(distinct.values()) // 2  # a copy reads and writes
        while left > 0:
            target[:left].copy_(source[:left])
            left -= len(source)
        return []

    return once


def _products(network: Network, batch: int, tokens: int) -> Way:
    """The products with the weights of every linear map, once for each token: what no way of decoding can leave out."""
    table = getattr(network.embed, "table", None)
    packed, weight = Packed(network), next(network.parameters())
    maps = [module for module in network.modules() if isinstance(module, nn.Linear)]
    inputs = [torch.randn(batch, 1, module.in_features).to(weight) for module in maps]
    x_B1D = torch.randn(batch, 1, network.value.width).to(weight)

    @torch.no_grad()
    def once(clock: Clock) -> Texts:
        with packed.used():
            for _ in range(tokens):
                for module, x in zip(maps, inputs, strict=True):
                    module(x)
                if isinstance(table, nn.Embedding):
                    packed.logits(LogitMap(x_B1D, table.weight))
        return []

    return once
