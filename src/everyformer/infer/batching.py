"""Continuous batching: many prompts of different lengths over a bounded number of rows.

    batcher = Batcher(network, rows=32)
    number = batcher.submit(prompt_ids, 200, temperature=0.8, seed=0)
    while batcher.active or batcher.waiting:
        for event in batcher.step(): print(event.number, event.token, event.ended)

Each step gives every active request one token. A request that has ended (a stop token, its length, `cancel`) frees its row at once,
and the next waiting prompt takes it; a prompt is read in one pass, and the rows of a batch stand at different positions. The text
of a request is that of `generate` with its prompt alone, whatever else is in the batch.

How a request is decoded follows from the model:

    slots     a row of preallocated keys and values and recurrent states (network/slots.py), all rows in one call
    window    where the context is full, or later tokens change earlier outputs, the last tokens are read again for each new one:
              no cache is exact there. All such requests in one call
    alone     a causal convolution reads the inputs before the token in order, which slots do not keep, nor cache entries of your
              own: each request continues a cache of its own, one after the other
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor

from everyformer.infer.decode import most_slots, static_reason
from everyformer.infer.forward import WORTHWHILE, Forward
from everyformer.infer.prompts import check_prefix, check_tokens, language_head, pad_left, prefix_inputs, prompt_rows
from everyformer.infer.sample import check_sampling, choose, seeded_generator
from everyformer.network.cache import Cache
from everyformer.network.network import Network
from everyformer.network.slots import Slots

FEWEST = 64  # slots to begin with
PREFILL = 8192  # tokens of prompts that one call reads, unless one prompt is longer
AHEAD = 64  # random numbers that are drawn at once
Sampling = tuple[float, int | None, float | None, float | None]  # temperature, top_k, top_p, min_p


@dataclass(frozen=True)
class Event:
    """One token of a request. Example: `Event(number=1, token=65).ended is None`.

    number    of the request, as `submit` returned it
    token     the token; None if a request ends without one, because 0 tokens were asked for
    logprob   the logarithm of its probability at temperature 1; None for the first token of an echo, and with `logprobs=None`
    top       the most likely tokens here with their logprobs, as many as `logprobs`
    ended     with the last event of a request "stop" or "length", or "error" if its logits are NaN or infinite
    echo      whether this is a token of the prompt
    """

    number: int
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    ended: str | None = None
    echo: bool = False


@dataclass(eq=False)
class _Request:
    """A prompt with its options, and what has become of it."""

    number: int
    text: list[int]
    prompt: int  # its length
    left: int
    sampling: Sampling
    generator: Generator
    stop: frozenset[int]
    logprobs: int | None
    echo: bool
    drawn: deque[float] = field(default_factory=deque)
    cache: Cache | None = None  # of a request that is decoded alone
    gone: bool = False

    def uniform(self) -> float:
        """The next random number of this request; drawn ahead they are the same as one at a time."""
        if not self.drawn:
            self.drawn.extend(torch.rand(AHEAD, generator=self.generator, dtype=torch.float64).tolist())
        return self.drawn.popleft()


class Batcher:
    """Generates the continuations of many prompts, at most `rows` of them at a time.

    Example: `batcher = Batcher(network, rows=8); batcher.submit([1, 2, 3], tokens=4); events = batcher.step()`.
    """

    def __init__(self, network: Network, rows: int = 32, *, kernel: str = "auto", packed: bool | None = None):
        self.network, self.rows, self.kernel = network, rows, kernel
        self.forward = Forward(network, language_head(network), WORTHWHILE, packed)
        if not isinstance(rows, int) or rows < 1:
            raise ValueError(f"rows is {rows!r}: give the number of requests to be decoded together, 1 or more")
        if needed := network.reads - {"hashes", "prefix", "tokens"}:
            raise ValueError(
                f"the model reads {' and '.join(sorted(needed))} besides its tokens, which requests do not have; use generate with "
                "encoder_output= or side_inputs="
            )
        self.cached = network.value.body.is_language_model()
        self.alone = self.cached and static_reason(network.body.new_entries()) is not None
        self._numbers = 0
        self._waiting: deque[_Request] = deque()
        self._in_slots: list[_Request] = []  # in the order of their rows
        self._others: list[_Request] = []  # windows, and requests with a cache of their own
        self._slots: Slots | None = None

    def submit(
        self,
        prompt: Sequence[int],
        tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: Collection[int] = (),
        logprobs: int | None = 0,
        echo: bool = False,
        copy: int = 0,
    ) -> int:
        """Adds a request, and returns its number. It may be called between steps, also from another thread.

        tokens     the largest number of new tokens
        stop       the request ends after the first of these tokens
        logprobs   how many of the most likely tokens each event lists; None leaves out the event's own logprob too
        echo       the tokens of the prompt come as events first, with their logprobs
        copy       equal prompts with equal seeds have equal texts, unless this number differs

        The other options are those of `generate`. Raises ValueError for a bad option.
        """
        (row,) = prompt_rows([prompt])
        check_sampling(temperature, top_k, top_p, min_p)
        check_tokens(tokens, stop)
        check_prefix(self.network, [row])
        if logprobs is not None and not (isinstance(logprobs, int) and logprobs >= 0):
            raise ValueError(f"logprobs is {logprobs!r}: give a whole number of 0 or more, or None for none")
        self.network.embed.check(torch.tensor([row]))
        if echo and (reason := self._no_echo_reason(len(row))):
            raise ValueError(f"the logprobs of the prompt are those of one pass, but {reason}")
        seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        sampling, generator = (temperature, top_k, top_p, min_p), seeded_generator(seed, copy, row)
        self._numbers = number = self._numbers + 1
        request = _Request(number, row, len(row), tokens, sampling, generator, frozenset(stop), logprobs, echo)
        self._waiting.append(request)
        return number

    def cancel(self, number: int) -> bool:
        """Ends a request, which frees its row. Returns whether it had not ended yet."""
        for request in (*self._waiting, *self._in_slots, *self._others):
            if request.number == number and not request.gone:
                request.gone = True
                return True
        return False

    @property
    def active(self) -> int:
        """The number of requests that have a row."""
        return sum(not request.gone for request in (*self._in_slots, *self._others))

    @property
    def waiting(self) -> int:
        """The number of requests that wait for a row."""
        return sum(not request.gone for request in self._waiting)

    def step(self) -> list[Event]:
        """Gives every active request its next token. Waiting requests take the free rows first, which reads their prompts."""
        events: list[Event] = []
        with self.forward.used():
            self._drop()
            slots, new = list(self._in_slots), []
            for request in self._admitted():
                if request.left == 0 and not request.echo:
                    request.gone = True
                    events.append(Event(request.number, None, ended="length"))
                elif self.alone or self._is_window(request):
                    self._others.append(request)
                else:
                    new.append(request)
            for calls in (self._next_in_slots(slots), self._next_of_others(list(self._others)), self._first(new)):
                for requests, logits_BTV in calls:
                    events += _events(requests, logits_BTV)
            self._drop()
        return events

    def _admitted(self) -> Iterator[_Request]:
        """The waiting requests that take the free rows."""
        free = self.rows - len(self._in_slots) - len(self._others)
        while self._waiting and free > 0:
            request = self._waiting.popleft()
            if not request.gone:
                free -= 1
                yield request

    def _drop(self) -> None:
        """Frees the rows of the requests that are gone, and of those whose context is full: these become windows."""
        for row in reversed(range(len(self._in_slots))):
            request, last = self._in_slots[row], len(self._in_slots) - 1
            if not (request.gone or self._is_window(request)):
                continue
            assert self._slots is not None
            if row < last:
                self._slots.move(last, row)
                self._in_slots[row] = self._in_slots[last]
            self._in_slots.pop()
            self._others.append(request)
        self._others = [request for request in self._others if not request.gone]
        if not (self._in_slots or self._waiting):
            self._slots = None  # frees the memory

    def _is_window(self, request: _Request) -> bool:
        """Whether the next token follows from the last tokens alone, which are read again for it."""
        limit = self.network.limit
        return not self.cached or (limit is not None and len(request.text) > limit)

    def _next_in_slots(self, requests: list[_Request]) -> Iterator[tuple[list[_Request], Tensor]]:
        """The next logits of the requests in slots."""
        if not requests:
            return
        length = max(len(request.text) for request in requests)
        slots = self._room(length, len(requests))
        # Slots beyond the longest text are empty in every row, so nothing needs to read them.
        view = slots.view(len(requests), min(slots.capacity, length))
        token_B1 = torch.tensor([request.text[-1:] for request in requests], device=slots.next_B1.device)
        found = view.step(token_B1, logits=False)
        found = found[self.forward.head] if isinstance(found, tuple) else found
        yield requests, self.forward.logits(found, last=False)

    def _first(self, requests: list[_Request]) -> Iterator[tuple[list[_Request], Tensor]]:
        """The logits of new requests, after one pass through their prompts, and their rows."""
        for group in _groups([(request, request.text) for request in requests]):
            logits_BTV, cache = self._read(group, Cache())
            start = len(self._in_slots)
            self._in_slots += [request for request, _ in group]
            if self._slots is None:
                capacity, rows = self._size(cache.length, len(group))
                self._slots = Slots.of(self.network, cache, capacity, rows=rows, kernel=self.kernel)
            else:
                self._room(cache.length, len(self._in_slots)).put(range(start, len(self._in_slots)), cache)
            yield self._in_slots[start:], logits_BTV

    def _next_of_others(self, requests: list[_Request]) -> Iterator[tuple[list[_Request], Tensor]]:
        """The next logits of windows, and of requests with a cache of their own, one after the other."""
        windows: list[tuple[_Request, list[int]]] = []
        for request in requests:
            if self._is_window(request):
                request.cache = None
                windows.append((request, request.text[-(self.network.limit or len(request.text)) :]))
                continue
            text = request.text if request.cache is None else request.text[-1:]
            logits_BTV, request.cache = self._read([(request, text)], request.cache or Cache())
            yield [request], logits_BTV
        for group in _groups(windows):
            yield [request for request, _ in group], self._read(group, None)[0]

    def _read(self, group: _Group, cache: Cache | None) -> tuple[Tensor, Cache]:
        """The logits after these texts, or for an echo of every token, and the cache after them."""
        token_BT, visible_BT = pad_left([text for _, text in group], next(self.network.parameters()).device)
        padded = len({len(text) for _, text in group}) > 1
        last = not any(request.echo for request, _ in group)
        options: dict[str, Any] = {"visible": visible_BT if padded else None, "kernel": self.kernel}
        # The prefix of a prefix language model is what the call has of the prompt.
        starts = [0 if cache is not None else len(request.text) - len(text) for request, text in group]
        prefix = [max(0, request.prompt - start) for (request, _), start in zip(group, starts, strict=True)]
        options["side_inputs"] = prefix_inputs(self.network, torch.tensor(prefix, device=token_BT.device))
        logits, after = self.forward(token_BT, cache, last=last, **options)
        return logits[:, None] if last else logits, after or Cache()

    def _room(self, length: int, rows: int) -> Slots:
        """The slots, with room for texts of this length in so many rows."""
        assert self._slots is not None
        capacity, wanted = self._size(length, rows)
        if capacity > self._slots.capacity or wanted > self._slots.rows:
            self._slots = self._slots.grown(max(capacity, self._slots.capacity), max(wanted, self._slots.rows))
        return self._slots

    def _size(self, length: int, rows: int) -> tuple[int, int]:
        """The number of slots and of rows; both double."""
        capacity = max(FEWEST, 1 << (length - 1).bit_length())
        most = most_slots(self.network)
        return capacity if most is None else min(capacity, most), min(self.rows, 1 << (rows - 1).bit_length())

    def _no_echo_reason(self, length: int) -> str | None:
        limit = self.network.limit
        if not self.network.value.body.is_causal():
            return "the outputs of this model depend on later tokens; leave echo out"
        if limit is not None and length > limit:
            return f"it has {length} tokens and the model {limit} positions; give at most {limit} tokens, or leave echo out"
        return None


_Group = list[tuple[_Request, list[int]]]  # requests, with the part of their texts that is read


def _groups(requests: _Group) -> Iterator[_Group]:
    """Splits requests into calls of similar lengths, so that little of a call is padding."""
    group: _Group = []
    for request, text in sorted(requests, key=lambda one: len(one[1])):
        if group and ((len(group) + 1) * len(text) > PREFILL or 4 * len(text) > 5 * len(group[0][1]) + 32):
            yield group
            group = []
        group.append((request, text))
    if group:
        yield group


def _events(requests: list[_Request], logits_BTV: Tensor) -> Iterator[Event]:
    """The next token of each request, drawn from its last logits, after the tokens of an echo."""
    last_BV = logits_BTV[:, -1]
    finite, drawn = last_BV.amax(-1).isfinite().tolist(), _drawn(requests, last_BV)
    wanted = [row for row, request in enumerate(requests) if request.logprobs is not None]
    most = max((requests[row].logprobs or 0 for row in wanted), default=0)
    listed = dict(zip(wanted, _logprobs(last_BV[wanted], [drawn[row] for row in wanted], most), strict=True))
    for row, request in enumerate(requests):
        if request.echo:
            yield from _echo(request, logits_BTV[row])
        if request.gone:
            continue
        if not finite[row]:
            request.gone = True
            yield Event(request.number, None, ended="error")
            continue
        token, (logprob, top) = drawn[row], listed.get(row, (None, ()))
        request.text.append(token)
        request.left -= 1
        ended = "stop" if token in request.stop else "length" if request.left == 0 else None
        request.gone = ended is not None
        yield Event(request.number, token, logprob, top[: request.logprobs], ended)


def _echo(request: _Request, logits_TV: Tensor) -> Iterator[Event]:
    """The tokens of the prompt, each with the logprob after those before it."""
    request.echo = False
    listed: list[tuple[float | None, tuple[tuple[int, float], ...]]] = [(None, ())] * len(request.text)
    if request.logprobs is not None and len(request.text) > 1:
        before_TV = logits_TV[-len(request.text) : -1]
        listed[1:] = _logprobs(before_TV, request.text[1:], request.logprobs)
    request.gone = request.left == 0
    for index, (token, (logprob, top)) in enumerate(zip(request.text, listed, strict=True), start=1):
        ended = "length" if request.gone and index == len(request.text) else None
        yield Event(request.number, token, logprob, top, ended, echo=True)


def _drawn(requests: list[_Request], logits_BV: Tensor) -> list[int]:
    """The next token of each request, by its own options and its own random numbers."""
    same: dict[Sampling, list[int]] = {}
    for row, request in enumerate(requests):
        same.setdefault(request.sampling, []).append(row)
    token_B = torch.empty(len(requests), dtype=torch.long, device=logits_BV.device)
    for sampling, rows in same.items():
        some_BV = logits_BV if len(same) == 1 else logits_BV[rows]
        u_B1: Tensor | None = None
        if sampling[0]:
            numbers = [[requests[row].uniform()] for row in rows]
            u_B1 = torch.tensor(numbers, dtype=torch.float64, device=logits_BV.device)
        token_B[rows] = choose(some_BV, u_B1, *sampling)
    drawn: list[int] = token_B.tolist()
    return drawn


def _logprobs(logits_NV: Tensor, tokens: list[int], count: int) -> list[tuple[float, tuple[tuple[int, float], ...]]]:
    """The log probability of a token after each row of logits, and the `count` most likely tokens with theirs."""
    if not tokens:
        return []
    log_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)).log_softmax(-1)
    of_token = log_NV.gather(1, torch.tensor(tokens, device=log_NV.device)[:, None])[:, 0].tolist()
    values, ids = (x.tolist() for x in log_NV.topk(min(count, log_NV.shape[1])))
    return [(log, tuple(zip(*top, strict=True))) for log, *top in zip(of_token, ids, values, strict=True)]
