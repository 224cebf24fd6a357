"""Text generation: predict the next token, append it, repeat.

The next token is sampled (see `everyformer.infer.sample`) from the model's distribution given the last `context` tokens. The
cache only saves computation: cached and uncached generation give equal texts. When the context is full the window slides;
all positions in it change, so the window is computed again for each token. A model with a segment memory has no window: it
reads on and attends to as many earlier positions as its memory holds.

    for tokens in stream(network, [prompt], 200, temperature=0.8): ...     # one token per row, as they are generated
    generate(network, prompts, 200, top_p=0.9, seed=0)                     # each prompt with its continuation

The text of a row depends on the seed and its prompt alone (and, among equal prompts, on their order): not on the other rows
of the batch, nor on its index in the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Generator, Tensor

from everyformer.attention.context import SideInputs
from everyformer.infer.batching import Batcher
from everyformer.infer.decode import WORTHWHILE, Decoder, choose_fused, static_reason
from everyformer.infer.draw import Sampling
from everyformer.infer.forward import Forward
from everyformer.infer.prompts import Prompts, check_prefix, check_tokens, language_head, pad_left, prompt_rows
from everyformer.infer.sample import BROKEN, check_sampling, sample, seeded_generator
from everyformer.network.cache import Cache
from everyformer.network.network import Network, evaluating
from everyformer.value import nearest

__all__ = ["generate", "sample", "stream"]

NETWORK_OPTIONS = {"encoder_output", "side_inputs", "kernel", "probe"}  # the same in every call of the network
SAMPLING_OPTIONS = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "stop",
    "context",
    "cached",
    "static",
    "fused",
    "packed",
}
BATCHER_OPTIONS = {"temperature", "top_k", "top_p", "min_p", "seed", "stop", "kernel", "fused", "packed"}
TOGETHER = 64  # prompts that are generated together, unless rows= says otherwise


def generate(
    network: Network, prompts: Prompts, tokens: int, *, rows: int | None = None, **options: Any
) -> list[list[int]]:
    """Returns each of `prompts` with at most `tokens` new tokens of the `network`; prompts may differ in length.

    rows   how many prompts are generated together; when one has ended the next takes its place, which bounds the memory and changes
           no text. Default: 64, or all where an option (encoder_output, side_inputs, probe, context, cached, static) needs that
    The options, such as temperature, top_k and seed, are those of `everyformer.infer.generate.stream`.
    Example: `generate(network, [list(b"Once")], tokens=40, temperature=0.8, seed=1)`.
    """
    texts = prompt_rows(prompts)
    together = {name for name in options if name not in BATCHER_OPTIONS}
    together |= {"prefix"} & network.reads if isinstance(network, Network) else set()
    if rows is not None and together:
        raise ValueError(
            f"with {together.pop()}= all prompts are generated together; leave rows= out, or give fewer prompts at a time"
        )
    if rows is None and (together or len(texts) <= TOGETHER):
        for new_tokens in stream(network, texts, tokens, **options):
            for text, token in zip(texts, new_tokens, strict=True):
                if token is not None:
                    text.append(token)
        return texts
    run = {name: options.pop(name) for name in ("kernel", "fused", "packed") if name in options}
    seed = options.pop("seed", None)
    seed = int(torch.randint(1 << 62, ())) if seed is None else seed
    batcher = Batcher(network, TOGETHER if rows is None else rows, **run)
    numbers = {
        batcher.submit(text, tokens, seed=seed, copy=copy, logprobs=None, **options): text
        for text, copy in zip(texts, copies(texts), strict=True)
    }
    while batcher.active or batcher.waiting:
        for event in batcher.step():
            if event.ended == "error":
                raise ValueError(BROKEN)
            numbers[event.number] += [] if event.token is None else [event.token]
    return texts


def stream(
    network: Network,
    prompts: Prompts,
    tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int | None = None,
    stop: Collection[int] = (),
    context: int | None = None,
    cached: bool = True,
    static: bool | None = None,
    fused: bool | None = None,
    packed: bool | None = None,
    **options: Any,
) -> Iterator[list[int | None]]:
    """Yields at each step one new token per row, None for a row that has ended.

    seed      equal seeds give equal texts; None draws a seed from torch's global generator
    stop      a row ends after the first of these tokens
    static    True decodes in slots of a fixed size, on a GPU as one CUDA graph a token: equal texts. None: on a GPU, and on a CPU where
              steps are fused
    fused     True computes each step in slots without the modules, on a GPU with few Triton programs: outputs equal up to rounding.
              None: where the model's parts allow it; on a GPU, where it is four times as fast or so, for 64 tokens or more
    packed    True computes with weights in the order in which a CPU reads them fastest, which packs them first: outputs equal up to
              rounding. None: on a CPU in float32 for 32 tokens or more
    context   the largest number of tokens that the model reads; None: as many as it has positions, or all
    cached    False computes everything again for each token: equal texts, but slow
    options   go to the network: `encoder_output=`, `side_inputs=`, `kernel=`, `probe=`

    The prefix of a prefix language model is the prompt, unless `side_inputs=` gives another one.
    """
    for name in set(options) - NETWORK_OPTIONS:
        known = NETWORK_OPTIONS | SAMPLING_OPTIONS
        raise ValueError(f"generate has no option {name!r}; {nearest(name, known)}")
    rows, head = prompt_rows(prompts), language_head(network)
    check_sampling(temperature, top_k, top_p, min_p)
    check_tokens(tokens, stop)
    context = _context(network, context, cached, max(map(len, rows)) + tokens)
    seed = int(torch.randint(1 << 62, ())) if seed is None else seed
    generators, sampling = _generators(rows, seed), (temperature, top_k, top_p, min_p)
    check_prefix(network, rows)
    # Without causality new tokens change earlier outputs. The first call covers the prefix.
    cached = cached and network.value.body.is_language_model()
    window = _Window(Forward(network, head, tokens, packed), rows, context, cached, options)
    on_gpu = window.token_BT.is_cuda
    fuses = choose_fused(network, fused, options.get("kernel") or "auto")
    if static is None:
        static = on_gpu or (fuses and options.get("probe") is None)
    static = cached and static
    if fused and not static:
        raise ValueError("fused=True, but only steps in slots are fused; leave fused=, cached=, static= and probe= out")
    fused = False if fused is None and on_gpu and tokens < WORTHWHILE else fused
    return _steps(window, _new_tokens(window, tokens, generators, sampling, static, fused), frozenset(stop))


def _context(network: Network, context: int | None, cached: bool, length: int) -> int:
    """The largest number of tokens that the model reads of a text of this length."""
    if context is not None and context < 1:
        raise ValueError(f"context is {context}: give a context of 1 or more, or leave it out")
    if network.value.memory is not None and (context is not None or not cached):
        raise ValueError(
            "the outputs of a model with a segment memory depend on that memory, so there is no window to compute again; leave "
            "context= and cached=False out"
        )
    context = context or network.limit or length
    if network.limit is not None and context > network.limit:
        raise ValueError(
            f"context is {context}, but the model has {network.limit} positions; give at most {network.limit}"
        )
    return context


@torch.no_grad()
def _steps(window: _Window, new_tokens: Iterator[Tensor], stop: frozenset[int]) -> Iterator[list[int | None]]:
    ended, rows = window.ended, window.rows
    with evaluating(window.forward.network):
        for new_B in new_tokens:
            new = dict(zip(window.running, new_B.tolist(), strict=True))
            yield [None if row in ended else new[row] for row in range(rows)]
            ended |= {row for row, token in new.items() if token in stop}
            if len(ended) == rows:
                return


def _new_tokens(
    window: _Window, tokens: int, generators: list[Generator], sampling: Sampling, static: bool, fused: bool | None
) -> Iterator[Tensor]:
    """Yields the new tokens of all rows. With `static` they are decoded in slots while the context is not full."""
    temperature, top_k, top_p, min_p = sampling
    left = tokens
    while left > 0:
        if (kept := window.kept()) is not None:
            window.keep(kept)
        running = [generators[row] for row in window.running]
        new_B = sample(window.logits(), temperature, running, top_k=top_k, top_p=top_p, min_p=min_p)
        window.append(new_B[:, None])
        left -= 1
        yield new_B
        count = min(left, window.context + 1 - window.length)
        if static and count > 0 and window.static_reason() is None:
            new: list[Tensor] = []
            decoder = window.decoder(new_B, running, sampling, fused)
            for new_B in decoder.tokens(count):
                new.append(new_B)
                left -= 1
                yield new_B
                # The step of a GPU is recorded for all rows.
                if not window.token_BT.is_cuda and (kept := window.kept()) is not None:
                    window.append(torch.stack(new, dim=1))
                    new = []
                    window.keep(kept)
                    decoder.keep(kept)
            if new:
                window.append(torch.stack(new, dim=1))
            static = False


class _Window:
    """The last tokens of every row, and the network's cache of them."""

    def __init__(
        self,
        forward: Forward,
        rows: list[list[int]],
        context: int,
        cached: bool,
        options: dict[str, Any],
    ):
        self.forward, self.context, self.cached, self.options = forward, context, cached, options
        self.token_BT, self.visible_BT = pad_left(rows, next(forward.network.parameters()).device)
        self.new_BT, self.cache = self.token_BT, Cache(forget=True)
        self.rows, self.length = self.token_BT.shape
        self.running, self.ended = (
            list(range(self.rows)),
            set[int](),
        )  # rows of the batch, and those that need no more tokens
        self.padding = self.length - min(map(len, rows))  # of the shortest prompt, on its left
        side = options.get("side_inputs")
        gives_prefix = "prefix" in forward.network.reads and (side is None or side.prefix is None)
        self.prompt_B = self.visible_BT.sum(1) if gives_prefix else None  # the prefix of each row
        self.prompt_end = self.length

    def logits(self) -> Tensor:
        """Returns the logits of the next token: B, V."""
        context, cache, start = self.context, self.cache, max(0, self.length - self.context)
        if self.cached and start == 0:
            # The cache stores which positions are padding, so only the first call passes `visible`.
            visible = self.visible_BT if self.padding and cache.length == 0 else None
            logits_BV, after = self.forward(self.new_BT, cache, visible=visible, **self.call_options(0))
            self.cache = after or cache
            return logits_BV
        self.cache = Cache()  # frees the old cache, which is not used again
        visible = self.visible_BT[:, -context:] if start < self.padding else None
        return self.forward(self.token_BT[:, -context:], None, visible=visible, **self.call_options(start))[0]

    def kept(self) -> list[int] | None:
        """The rows that have not ended, once a quarter has: what is left of the cache is copied then. Otherwise None."""
        rows = [index for index, row in enumerate(self.running) if row not in self.ended]
        few = 4 * len(rows) <= 3 * len(self.running)
        return rows if few and all(self.options.get(name) is None for name in ("side_inputs", "probe")) else None

    def keep(self, rows: list[int]) -> None:
        """Leaves out the other rows."""
        self.running = [self.running[index] for index in rows]
        index_B = torch.tensor(rows, device=self.token_BT.device)
        self.token_BT, self.visible_BT, self.new_BT = (
            x_BT[index_B] for x_BT in (self.token_BT, self.visible_BT, self.new_BT)
        )
        self.prompt_B = None if self.prompt_B is None else self.prompt_B[index_B]
        self.cache = self.cache.reorder(index_B) if self.cache.length else self.cache
        source = self.options.get("encoder_output")
        if source is not None:
            self.options = self.options | {"encoder_output": source.of_rows(index_B)}

    def call_options(self, start: int) -> dict[str, Any]:
        """The options of a call from the index `start` on; the prefix is what the window has of the prompt."""
        if self.prompt_B is None:
            return self.options
        prefix_B = self.prompt_B.clamp(max=max(0, self.prompt_end - start))
        side = replace(self.options.get("side_inputs") or SideInputs(), prefix=prefix_B)
        return self.options | {"side_inputs": side}

    def static_reason(self) -> str | None:
        """Why the tokens cannot be decoded in slots, or None if they can."""
        return static_reason(self.cache.entries)

    def decoder(self, new_B: Tensor, generators: list[Generator], sampling: Sampling, fused: bool | None) -> Decoder:
        """Continues the cached tokens in slots."""
        options = {name: x for name, x in self.options.items() if name in ("encoder_output", "kernel")}
        cache, self.cache = self.cache, Cache()
        return Decoder(self.forward, cache, new_B, generators, sampling, fused=fused, **options)

    def append(self, new_BT: Tensor) -> None:
        self.new_BT = new_BT.to(self.token_BT.device)
        self.length += new_BT.shape[1]
        # Only the window is kept, so the cost of a step does not grow with the text.
        self.token_BT = torch.cat((self.token_BT[:, -self.context :], self.new_BT), dim=1)
        if self.padding:
            visible_BT = torch.ones_like(self.new_BT, dtype=torch.bool)
            self.visible_BT = torch.cat((self.visible_BT[:, -self.context :], visible_BT), dim=1)


def _generators(rows: list[list[int]], seed: int) -> list[Generator]:
    """One generator per row, seeded by the prompt and the number of equal prompts before it."""
    return [seeded_generator(seed, copy, row) for copy, row in zip(copies(rows), rows, strict=True)]


def copies(rows: list[list[int]]) -> list[int]:
    """Returns for each prompt the number of equal ones before it."""
    counts: Counter[tuple[int, ...]] = Counter()
    found = []
    for row in rows:
        found.append(counts[tuple(row)])
        counts[tuple(row)] += 1
    return found
