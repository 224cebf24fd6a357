"""Continuous batching: many prompts of different lengths over a bounded number of rows.

    batcher = Batcher(network, rows=32)
    number = batcher.submit(prompt_ids, 200, temperature=0.8, seed=0)
    while batcher.active or batcher.waiting:
        for event in batcher.step(): print(event.number, event.token, event.ended)

Each step gives every active request one token. A request that has ended (a stop token, its length, `cancel`) frees its row at once,
and the next waiting prompt takes it; a prompt is read in one pass, and the rows of a batch stand at different positions. The text
of a request is that of `generate` with its prompt alone, whatever else is in the batch.

How a request is decoded follows from the model:

    slots     a row of preallocated keys and values and recurrent states (network/slots.py), all rows in one call, which a GPU
              records as a CUDA graph for each power of two of rows
    window    where the context is full, or later tokens change earlier outputs, the last tokens are read again for each new one:
              no cache is exact there. All such requests in one call
    alone     a causal convolution reads the inputs before the token in order, which slots do not keep, nor cache entries of your
              own: each request continues a cache of its own, one after the other
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from everyformer.infer.decode import choose_fused, most_slots, static_reason
from everyformer.infer.events import Event, Request, draw_events
from everyformer.infer.forward import WORTHWHILE, Forward
from everyformer.infer.prompts import check_prefix, check_tokens, language_head, pad_left, prefix_inputs, prompt_rows
from everyformer.infer.recorded import Recorded
from everyformer.infer.sample import check_sampling, seeded_generator
from everyformer.network.cache import Cache
from everyformer.network.network import Network
from everyformer.network.slots import Slots, room

FEWEST = 64  # slots to begin with
PREFILL = 8192  # tokens of prompts that one call reads, unless one prompt is longer


class Batcher:
    """Generates the continuations of many prompts with a `network`, at most `rows` of them at a time.

    kernel   of the attention, a name of `KERNELS`, or auto
    fused    whether steps take the fused programs; True refuses a model that they do not support. Default: where they can be
    packed   whether the weights are kept in the order in which oneDNN reads them. Default: on a CPU, where it saves time
    Example: `batcher = Batcher(network, rows=8); batcher.submit([1, 2, 3], tokens=4); events = batcher.step()`.
    """

    def __init__(
        self,
        network: Network,
        rows: int = 32,
        *,
        kernel: str = "auto",
        fused: bool | None = None,
        packed: bool | None = None,
    ):
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
        self.fused = choose_fused(network, fused, kernel)
        self._steps: dict[int, _Step] = {}  # by the number of rows
        self._numbers = 0
        self._waiting: deque[Request] = deque()
        self._in_slots: list[Request] = []  # in the order of their rows
        self._others: list[Request] = []  # windows, and requests with a cache of their own
        self._slots: Slots | None = None
        self._view: Slots | None = None  # of the rows and slots in use, on a CPU

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
        request = Request(number, row, len(row), tokens, sampling, generator, frozenset(stop), logprobs, echo)
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
                    events += draw_events(requests, logits_BTV, self.fused)
            self._drop()
        return events

    def _admitted(self) -> Iterator[Request]:
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
            self._slots, self._view, self._steps = None, None, {}  # frees the memory

    def _is_window(self, request: Request) -> bool:
        """Whether the next token follows from the last tokens alone, which are read again for it."""
        limit = self.network.limit
        return not self.cached or (limit is not None and len(request.text) > limit)

    def _next_in_slots(self, requests: list[Request]) -> Iterator[tuple[list[Request], Tensor]]:
        """The next logits of the requests in slots."""
        if not requests:
            return
        length = max(len(request.text) for request in requests)
        slots = self._room(length, len(requests))
        token_B1 = torch.tensor([request.text[-1:] for request in requests])
        if slots.next_B1.is_cuda:
            rows = 1 << (len(requests) - 1).bit_length()
            if rows not in self._steps:
                view = slots.view(min(rows, slots.rows), slots.capacity)
                self._steps[rows] = _Step(view, self.forward, len(requests))
            yield requests, self._steps[rows](token_B1)
            return
        # Slots beyond the longest text are empty in every row, so nothing needs to read them.
        rows, capacity = len(requests), min(slots.capacity, self._size(length, 1)[0])
        if self._view is None or (self._view.rows, self._view.capacity) != (rows, capacity):
            self._view = slots.view(rows, capacity)
        yield requests, self.forward.next_logits(self._view, token_B1)

    def _first(self, requests: list[Request]) -> Iterator[tuple[list[Request], Tensor]]:
        """The logits of new requests, after one pass through their prompts, and their rows."""
        for group in _groups([(request, request.text) for request in requests]):
            logits_BTV, cache = self._read(group, Cache())
            start = len(self._in_slots)
            self._in_slots += [request for request, _ in group]
            if self._slots is None:
                capacity, rows = self._size(cache.length, len(group))
                options = {"kernel": self.kernel, "fused": self.fused}
                self._slots = Slots.of(self.network, cache, capacity, rows=rows, **options)
            else:
                self._room(cache.length, len(self._in_slots)).put(range(start, len(self._in_slots)), cache)
            yield self._in_slots[start:], logits_BTV

    def _next_of_others(self, requests: list[Request]) -> Iterator[tuple[list[Request], Tensor]]:
        """The next logits of windows, and of requests with a cache of their own, one after the other."""
        windows: list[tuple[Request, list[int]]] = []
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
            self._view, self._steps = None, {}
        return self._slots

    def _size(self, length: int, rows: int) -> tuple[int, int]:
        """The number of slots, and of rows, which doubles."""
        capacity = room(length, FEWEST, next(self.network.parameters()).device)
        most = most_slots(self.network)
        return capacity if most is None else min(capacity, most), min(self.rows, 1 << (rows - 1).bit_length())

    def _no_echo_reason(self, length: int) -> str | None:
        limit = self.network.limit
        if not self.network.value.body.is_causal():
            return "the outputs of this model depend on later tokens; leave echo out"
        if limit is not None and length > limit:
            return f"it has {length} tokens and the model {limit} positions; give at most {limit} tokens, or leave echo out"
        return None


_Group = list[tuple[Request, list[int]]]  # requests, with the part of their texts that is read


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


class _Step:
    """A recorded step of some rows, of which the first ones may be in use."""

    def __init__(self, slots: Slots, forward: Forward, used: int):
        self.slots = slots
        self._hide(used)
        self.token_B1 = torch.zeros_like(slots.next_B1)
        self.recorded = Recorded(lambda: forward.next_logits(slots, self.token_B1), slots.state())

    def __call__(self, token_B1: Tensor) -> Tensor:
        """The logits B, 1, V after these tokens, one for each row in use."""
        used = len(token_B1)
        self.token_B1[:used].copy_(token_B1)
        self._hide(used)
        return self.recorded.replay()[:used]

    def _hide(self, used: int) -> None:
        """Sets back the rows that are not in use, whose positions would leave the model's."""
        self.slots.next_B1[used:] = 0
