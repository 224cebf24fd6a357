"""One thread that computes everything: continuous batching of completions, and other calls of the model between its steps.

    engine = Engine(model, Limits())
    engine.start()                                          # in the event loop that awaits its results
    completion = engine.submit(prompt_ids, tokens=20)       # raises RequestError if the queue is full
    async for event in completion: ...
    vectors = await engine.call(lambda: model.embed(texts))

The event loop never waits for the model: events come back to it in one call for each step.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from everyformer.infer.batching import Batcher
from everyformer.infer.events import Event
from everyformer.network.network import Network
from everyformer.serve.error import RequestError
from everyformer.serve.memory import EVERY, memory_trimmer
from everyformer.train.trained import TrainedRun

FAILED = "the model could not compute this request; see the server's log"
log = logging.getLogger("everyformer.serve")


@dataclass(frozen=True)
class Limits:
    """What a service accepts."""

    rows: int = 32  # sequences that are decoded together
    queue: int = 256  # sequences that may wait for a row, and other calls that may wait
    max_tokens: int = 2048  # new tokens of a sequence
    max_prompt: int = 16384  # tokens of a prompt, or of an input
    body: int = 2 << 20  # bytes of a request
    timeout: float = 300.0  # seconds until a request is answered, or a stream ends

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; give more than 0")


@dataclass(eq=False)
class Completion:
    """One sequence that is being generated: an asynchronous iterator over its events."""

    engine: Engine
    number: int
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    ended: bool = False

    async def __aiter__(self) -> AsyncIterator[Event]:
        while not self.ended:
            event = await self.events.get()
            self.ended = event.ended is not None
            if event.ended == "error":
                raise RequestError(500, FAILED)
            yield event

    def cancel(self) -> None:
        """Frees the row, if the sequence has not ended."""
        if not self.ended:
            self.ended = True
            self.engine.cancel(self)


class Engine:
    """The thread and its queues. All methods but `start` and `stop` are called in the event loop."""

    def __init__(self, model: TrainedRun, limits: Limits):
        self.model, self.limits = model, limits
        self.generates = "score" in model.methods  # whether it is a language model
        self.batcher = self._new_batcher() if self.generates else None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.work, self.stopping = threading.Condition(), False
        self.completions: dict[int, Completion] = {}
        self.cancelled: deque[int] = deque()
        self.calls: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self.generated = 0  # tokens, of all sequences
        self.steps, self.trim_memory = 0, memory_trimmer()
        self.thread = threading.Thread(target=self._run, name="everyformer-serve", daemon=True)

    def _new_batcher(self) -> Batcher:
        assert isinstance(self.model.network, Network)
        return Batcher(self.model.network, self.limits.rows)

    def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> None:
        """Ends the thread after the step that it is computing."""
        with self.work:
            self.stopping = True
            self.work.notify()
        self.thread.join()

    @property
    def active(self) -> int:
        """The number of sequences that have a row."""
        return min(len(self.completions), self.limits.rows)

    @property
    def waiting(self) -> int:
        """The number of sequences that wait for a row, and of other calls."""
        return len(self.completions) - self.active + len(self.calls)

    def check_room(self, sequences: int) -> None:
        """Raises RequestError if so many sequences do not fit into the queue, now or ever."""
        room = self.limits.rows + self.limits.queue
        if sequences > room:
            raise RequestError(
                400, f"the request has {sequences} sequences (prompts times n), but at most {room} fit into the queue"
            )
        if len(self.completions) + len(self.calls) + sequences > room:
            raise RequestError(429, f"the queue is full with {self.waiting} waiting sequences; try again later")

    def submit(self, prompt: list[int], tokens: int, **options: Any) -> Completion:
        """Adds a sequence. Raises ValueError for a bad option."""
        with self.work:
            assert self.batcher is not None
            completion = Completion(self, self.batcher.submit(prompt, tokens, **options))
            self.completions[completion.number] = completion
            self.work.notify()
        return completion

    def cancel(self, completion: Completion) -> None:
        with self.work:
            if self.completions.get(completion.number) is completion:
                del self.completions[completion.number]
                self.cancelled.append(completion.number)
                self.work.notify()

    async def call(self, function: Callable[[], Any]) -> Any:
        """Returns what the function returns, which the thread computes between two steps."""
        assert self.loop is not None
        self.check_room(1)
        future = self.loop.create_future()
        with self.work:
            self.calls.append((function, future))
            self.work.notify()
        return await future

    def _run(self) -> None:
        while True:
            with self.work:
                self.work.wait_for(lambda: self.stopping or self.calls or self.cancelled or self.completions)
                if self.stopping:
                    return
                while self.cancelled and self.batcher is not None:
                    self.batcher.cancel(self.cancelled.popleft())
                call = self.calls.popleft() if self.calls else None
            if call is not None:
                self._call(*call)
            if self.completions:
                self._step()
                self.steps += 1
                if self.steps % EVERY == 0:
                    self.trim_memory()

    def _call(self, function: Callable[[], Any], future: asyncio.Future[Any]) -> None:
        if future.cancelled():  # its client has gone
            return
        try:
            result, error = function(), None
        except ValueError as refused:
            result, error = None, RequestError(400, " ".join(str(refused).split()))
        except Exception:
            log.exception("a call of the model failed")
            result, error = None, RequestError(500, FAILED)
        self._in_loop(_settle, future, result, error)

    def _step(self) -> None:
        assert self.batcher is not None
        try:
            events = self.batcher.step()
        except Exception:  # such as out of memory: these sequences are lost, the service is not
            log.exception("a step failed")
            with self.work:
                numbers, self.batcher = list(self.completions), self._new_batcher()
                lost, self.completions = self.completions, {}
                self.cancelled.clear()  # the new batcher gives the same numbers again
            self._in_loop(_deliver, [(lost[number], Event(number, None, ended="error")) for number in numbers])
            return
        self.generated += sum(event.token is not None and not event.echo for event in events)
        delivered = []
        with self.work:
            for event in events:
                completion = self.completions.get(event.number)
                if completion is not None:
                    delivered.append((completion, event))
                    if event.ended is not None:
                        del self.completions[event.number]
        self._in_loop(_deliver, delivered)

    def _in_loop(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self.loop is not None
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)


def _deliver(events: list[tuple[Completion, Event]]) -> None:
    for completion, event in events:
        completion.events.put_nowait(event)


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
