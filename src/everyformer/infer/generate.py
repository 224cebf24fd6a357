"""Generating: the next token, again and again.

The definition: the next token is drawn (see `everyformer.infer.sample`) from the model's distribution on the last
`context` tokens. The cache is a way of computing that, so cached and uncached runs agree. Once the context is full the
window slides, and as every position in it has moved it is read anew. A model with a memory has no such window: it reads
on, and remembers so many positions.

    for new in stream(network, [prompt], 200, temperature=0.8): ...     # a token for each row, as they come
    generate(network, prompts, 200, top_p=0.9, seed=0)                  # each prompt with what follows it

A row's text follows from the seed and its prompt alone (and, among equal prompts, from which of them it is): not from
its neighbours in the batch, nor from its place there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from operator import index
from typing import Any

import torch
from torch import Generator, Tensor

from everyformer.infer.sample import check, generator, sample
from everyformer.network.cache import Cache
from everyformer.network.model import Model
from everyformer.network.network import Network, PairNetwork, evaluating
from everyformer.network.output_head import Language
from everyformer.value import nearest

__all__ = ["generate", "sample", "stream"]

SPARE = 64  # positions that a past may have more than is seen of it, so that it is not cut for each token
OPTIONS = {"encoder_output", "side_inputs", "kernel", "probe"}  # of the network that say the same in every call
WAYS = {"temperature", "top_k", "top_p", "min_p", "seed", "stop", "context", "cached"}
Prompts = Sequence[Sequence[int]] | Tensor


def generate(network: Network, prompts: Prompts, tokens: int, **options: Any) -> list[list[int]]:
    """Each prompt with at most `tokens` more; prompts may differ in length. The options are those of `stream`."""
    found = prompt_rows(prompts)
    for new in stream(network, found, tokens, **options):
        for row, token in zip(found, new, strict=True):
            if token is not None:
                row.append(token)
    return found


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
    **options: Any,
) -> Iterator[list[int | None]]:
    """The new tokens as they come: at each step one for every row, None for a row that has ended.

    seed      the same seed gives the same text; None takes one from torch's own random numbers
    stop      a row ends with the first of these tokens, which is its last
    context   how many tokens the model sees at most; None: as many as it knows positions for, or all
    cached    False computes everything anew for each token: the same, slowly
    options   go to the network: `encoder_output=`, `side_inputs=`, `kernel=`, `probe=`
    """
    for name in set(options) - OPTIONS:
        raise ValueError(f"there is no option {name!r} of generating; {nearest(name, OPTIONS | WAYS)}")
    rows, number = prompt_rows(prompts), language_head(network)
    check(temperature, top_k, top_p, min_p)
    if not isinstance(tokens, int) or tokens < 0 or (context is not None and context < 1):
        raise ValueError(
            f"{tokens} tokens from a context of {context}: give 0 tokens or more, and a context of 1 or more"
        )
    if not isinstance(stop, Collection) or not all(isinstance(token, int) and token >= 0 for token in stop):
        raise ValueError(f"stop is {stop!r}: give a list of token ids, empty for none")
    if network.value.memory is not None and (context is not None or not cached):
        raise ValueError(
            "the model's memory is a part of its answer: it has no window to read anew; leave context= and cached=False out"
        )
    context = context or network.limit or max(map(len, rows)) + tokens
    if network.limit is not None and context > network.limit:
        raise ValueError(
            f"a context of {context} is more than the {network.limit} positions that the model knows; give at most those"
        )
    seed = int(torch.randint(1 << 62, ())) if seed is None else seed
    random = _generators(rows, seed)

    def choose(logits_BV: Tensor) -> Tensor:
        return sample(logits_BV, temperature, random, top_k=top_k, top_p=top_p, min_p=min_p)

    cached = cached and network.value.body.is_causal()  # one that looks ahead has no past to go on from
    text = _Text(network, rows, number, context, cached, options)
    return _steps(text, choose, tokens, frozenset(stop))


@torch.no_grad()
def _steps(
    text: _Text, choose: Callable[[Tensor], Tensor], tokens: int, stop: frozenset[int]
) -> Iterator[list[int | None]]:
    ended = [False] * text.rows
    with evaluating(text.network):
        for _ in range(tokens):
            new_B = choose(text.logits())
            new = new_B.tolist()
            yield [None if over else token for over, token in zip(ended, new, strict=True)]
            ended = [over or token in stop for over, token in zip(ended, new, strict=True)]
            if all(ended):
                return
            text.append(new_B)


class _Text:
    """The last tokens of every row, and what the network has read of them."""

    def __init__(
        self,
        network: Network,
        rows: list[list[int]],
        number: int,
        context: int,
        cached: bool,
        options: dict[str, Any],
    ):
        self.network, self.number, self.context, self.cached, self.options = network, number, context, cached, options
        self.token_BT, self.visible_BT = pad(rows, next(network.parameters()).device)
        self.fresh_BT, self.cache = self.token_BT, Cache()
        self.rows, self.length = self.token_BT.shape
        self.holes = self.length - min(map(len, rows))  # of the shortest prompt, on its left

    def logits(self) -> Tensor:
        """Of the next token: B, V."""
        context, cache, begin = self.context, self.cache, max(0, self.length - self.context)
        if self.cached and begin == 0:
            # The past knows where the holes are: only the first call has to say it.
            visible = self.visible_BT if self.holes and cache.length == 0 else None
            output = self.network(self.fresh_BT, visible=visible, cache=cache, **self.options)
            self.cache = output.cache or cache
            if (
                self.cache.length > SPARE
                and (end := self.network.max_distance()) is not None
                and self.cache.length > end + SPARE
            ):
                self.cache = self.cache.trim(max(1, end))  # nobody looks further back
        else:
            self.cache = Cache()  # of no more use: its memory goes back
            visible = self.visible_BT[:, -context:] if begin < self.holes else None
            options = self.options
            output = self.network(self.token_BT[:, -context:], visible=visible, **options)
        logits_BTV: Tensor = output.logits_of(self.number)
        return logits_BTV[:, -1]

    def append(self, new_B: Tensor) -> None:
        self.length, self.fresh_BT = self.length + 1, new_B[:, None]
        # No more than the window is kept, so a step's work does not grow with the text.
        self.token_BT = torch.cat((self.token_BT[:, -self.context :], self.fresh_BT), dim=1)
        if self.holes:
            seen_B1 = self.visible_BT.new_ones(self.rows, 1)
            self.visible_BT = torch.cat((self.visible_BT[:, -self.context :], seen_B1), dim=1)


def _generators(rows: list[list[int]], seed: int) -> list[Generator]:
    """One for each row, seeded by the prompt and by how many equal ones stand before it."""
    found, seen = [], dict[tuple[int, ...], int]()
    for row in rows:
        turn = seen[tuple(row)] = seen.get(tuple(row), -1) + 1
        found.append(generator(seed, turn, row))
    return found


def language_head(network: Network) -> int:
    """Which of the heads tells the next token."""
    if isinstance(network, PairNetwork):
        raise ValueError(
            "a pair is generated from by its decoder: give pair.decoder and encoder_output=pair.encode(...), or use beam_search"
        )
    if isinstance(network, Model):
        raise ValueError("a model is what a network is built from; give model.build(), or a trained network")
    for number, head in enumerate(network.value.outputs):
        if isinstance(head, Language):
            return number
    raise ValueError("the model has no language head to tell the next token; build it with outputs=(Language(),)")


def prompt_rows(prompts: Prompts) -> list[list[int]]:
    """Prompts as lists of their own."""
    try:
        plain = prompts.tolist() if isinstance(prompts, Tensor) else prompts
        rows = [[index(token) for token in row] for row in plain]
    except TypeError:
        raise ValueError(f"prompts are {prompts!r}: give a list of lists of token ids, one for each prompt") from None
    if not rows or not all(rows):
        raise ValueError(
            "an empty prompt: the first token needs something before it; begin with a start token or a newline"
        )
    return rows


def pad(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows as one batch, padded on the left so that all end together, and what of it is real."""
    longest = max(map(len, rows))
    token_BT = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    visible_BT = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)
    return token_BT, visible_BT
