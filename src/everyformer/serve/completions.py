"""/v1/completions: the choices of each prompt, at once or as a stream of server-sent events."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from everyformer.data.tokenizer import Tokenizer
from everyformer.infer.events import Event
from everyformer.serve.engine import Completion, Engine
from everyformer.serve.error import RequestError
from everyformer.serve.request import CompletionRequest, inputs_of
from everyformer.serve.text import TextStream, token_text

DONE = b"data: [DONE]\n\n"


@dataclass
class Logprobs:
    """The tokens of a choice with their log probabilities, since the last `take`."""

    tokenizer: Tokenizer
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[dict[str, float] | None] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)

    def add(self, event: Event, offset: int) -> None:
        assert event.token is not None
        text = token_text(self.tokenizer, event.token)
        self.tokens.append(text)
        self.token_logprobs.append(event.logprob)
        self.text_offset.append(offset)
        top: dict[str, float] | None = None
        if event.logprob is not None:
            top = {}
            for token, logprob in event.top:
                top.setdefault(token_text(self.tokenizer, token), logprob)
            top.setdefault(text, event.logprob)
        self.top_logprobs.append(top)

    def cut(self, end: int) -> None:
        """Removes the tokens that begin at the end of the text or later: those of a stop string."""
        while self.text_offset and self.text_offset[-1] >= end:
            for values in (self.tokens, self.token_logprobs, self.top_logprobs, self.text_offset):
                values.pop()

    def take(self) -> dict[str, Any]:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        taken = {name: getattr(self, name) for name in names}
        for name in names:
            setattr(self, name, [])
        return taken


class Choice:
    """One sequence on its way from events to text."""

    def __init__(
        self, index: int, completion: Completion, prompt: list[int], request: CompletionRequest, tokenizer: Tokenizer
    ):
        self.index, self.completion, self.request, self.prompt = index, completion, request, prompt
        self.stream = TextStream(tokenizer, prompt, request.stops)
        self.echoed = TextStream(tokenizer, [])
        self.logprobs = None if request.logprobs is None else Logprobs(tokenizer)
        self.offset = 0 if request.echo else len(tokenizer.decode(prompt))
        self.tokens = 0
        self.reason: str | None = None

    def end(self) -> int:
        """The length of the text so far, with the prompt."""
        return self.offset + self.echoed.length + self.stream.length

    def push(self, event: Event) -> str:
        """Returns the text that an event adds."""
        text = ""
        if event.token is not None:
            stream = self.echoed if event.echo else self.stream
            if self.request.echo and not event.echo and not self.tokens:
                text = self.echoed.finish()
            if self.logprobs is not None:
                self.logprobs.add(event, self.end())
            text += stream.push(event.token)
            self.tokens += not event.echo
        if self.stream.stopped:
            if self.logprobs is not None:
                self.logprobs.cut(self.end())
            self.reason = "stop"
            self.completion.cancel()
        elif event.ended is not None:
            self.reason = event.ended
            text += self.echoed.finish() if event.echo else self.stream.finish()
            self.reason = "stop" if self.stream.stopped else self.reason
        return text

    async def pieces(self) -> AsyncIterator[str]:
        """Yields the text piece by piece."""
        try:
            async for event in self.completion:
                yield self.push(event)
                if self.reason is not None:
                    return
        finally:
            self.completion.cancel()

    def answer(self, text: str) -> dict[str, Any]:
        logprobs = None if self.logprobs is None else self.logprobs.take()
        return {"index": self.index, "text": text, "logprobs": logprobs, "finish_reason": self.reason}


class Completions:
    """The choices of one request."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, name: str, request: CompletionRequest, prompts: list[list[int]]
    ):
        self.request, self.prompts, self.choices = request, prompts, list[Choice]()
        self.head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": name,
        }
        count = request.n or 1
        engine.check_room(count * len(prompts))
        seen: dict[tuple[int, ...], int] = {}
        options = {
            "temperature": 1.0 if request.temperature is None else request.temperature, "top_k": request.top_k,
            "top_p": request.top_p, "min_p": request.min_p, "seed": request.seed, "logprobs": request.logprobs,
            "echo": bool(request.echo), "stop": tokenizer.end,
        }  # fmt: skip
        tokens = 16 if request.max_tokens is None else request.max_tokens
        try:
            for prompt in prompts:
                for _ in range(count):
                    copy = seen[tuple(prompt)] = seen.get(tuple(prompt), -1) + 1
                    completion = engine.submit(prompt, tokens, copy=copy, **options)
                    self.choices.append(Choice(len(self.choices), completion, prompt, request, tokenizer))
        except ValueError as error:
            self.cancel()
            raise RequestError(400, " ".join(str(error).split())) from None

    def cancel(self) -> None:
        for choice in self.choices:
            choice.completion.cancel()

    def usage(self) -> dict[str, int]:
        read, made = sum(map(len, self.prompts)), sum(choice.tokens for choice in self.choices)
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made}

    async def answer(self) -> dict[str, Any]:
        """Returns all choices."""

        async def whole(choice: Choice) -> dict[str, Any]:
            return choice.answer("".join([text async for text in choice.pieces()]))

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(whole(choice)) for choice in self.choices]
        except* RequestError as errors:
            raise first_of(errors) from None
        return self.head | {"choices": [task.result() for task in tasks], "usage": self.usage()}

    async def events(self) -> AsyncIterator[bytes]:
        """Yields the server-sent events of all choices, in the order in which their tokens come."""
        merged: asyncio.Queue[dict[str, Any] | RequestError | None] = asyncio.Queue()

        async def read(choice: Choice) -> None:
            async for text in choice.pieces():
                if text or choice.logprobs is not None or choice.reason is not None:
                    merged.put_nowait(choice.answer(text))

        async def read_all() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for choice in self.choices:
                        group.create_task(read(choice))
                merged.put_nowait(None)
            except* RequestError as errors:
                merged.put_nowait(first_of(errors))

        task = asyncio.create_task(read_all())
        try:
            while (item := await merged.get()) is not None:
                if isinstance(item, RequestError):
                    yield as_event(item.body())
                    return
                yield as_event(self.head | {"choices": [item]})
            if self.request.stream_options is not None and self.request.stream_options.include_usage:
                yield as_event(self.head | {"choices": [], "usage": self.usage()})
            yield DONE
        finally:
            task.cancel()
            self.cancel()


def first_of(errors: BaseExceptionGroup[RequestError]) -> RequestError:
    """Returns the first error of a group."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RequestError)
    return error


def as_event(content: Any) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


async def open_completions(engine: Engine, tokens: Any, name: str, request: CompletionRequest) -> Completions:
    """Returns the sequences of a request, which have started. `tokens` encodes prompts. Raises RequestError if they cannot begin."""
    request.check()
    if (request.max_tokens or 0) > engine.limits.max_tokens:
        raise RequestError(
            400,
            f"max_tokens is {request.max_tokens}; this service generates at most {engine.limits.max_tokens}",
            "max_tokens",
        )
    prompts = await tokens.encode(inputs_of(request.prompt, "prompt"), "prompt")
    return Completions(engine, tokens.tokenizer, name, request, prompts)
