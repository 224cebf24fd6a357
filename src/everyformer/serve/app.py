"""The application: paths, and what each answers. `Service(run).app` is an ASGI application."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from everyformer import __version__
from everyformer.data.subwords import ENDS
from everyformer.serve.completions import Completions, as_event, open_completions
from everyformer.serve.engine import Engine, Limits
from everyformer.serve.error import RequestError
from everyformer.serve.guard import Guard, refusal
from everyformer.serve.metrics import CONTENT_TYPE, Metrics
from everyformer.serve.request import (
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    inputs_of,
    read_body,
)
from everyformer.task.classify_data import SetData
from everyformer.task.classify_objective import TextClassifierInference
from everyformer.task.language_inference import LanguageInference
from everyformer.task.task import Inference
from everyformer.task.token_inference import TokenInference
from everyformer.train.trained import TrainedRun

T = TypeVar("T")
MAX_INPUTS = 2048  # of /v1/embeddings and /v1/classify


class Tokens:
    """Encodes prompts outside the event loop, and checks their length."""

    def __init__(self, inference: TokenInference, limits: Limits):
        self.inference, self.tokenizer, self.limits = inference, inference.tokenizer, limits

    async def encode(self, inputs: list[str | list[int]], name: str) -> list[list[int]]:
        """Returns the tokens of inputs; a prompt that is a text begins as the tokenizer begins a text."""
        inference = self.inference
        try:
            if name == "prompt" and isinstance(inference, LanguageInference):
                rows = await asyncio.to_thread(lambda: [inference.prompt(one) for one in inputs])
            else:
                rows = await asyncio.to_thread(lambda: [ids.tolist() for ids in inference.encode(inputs)])
        except ValueError as error:
            raise RequestError(400, " ".join(str(error).split()), name) from None
        for row in rows:
            if len(row) > self.limits.max_prompt:
                raise RequestError(
                    400, f"the {name} has {len(row)} tokens; this service reads at most {self.limits.max_prompt}", name
                )
        return rows


class Service:
    """A model and what it is asked. `app` is the ASGI application; its lifespan starts and ends the engine's thread.

    With `local`, requests that a web page of another site makes are refused, see `Guard`.
    """

    def __init__(
        self, model: TrainedRun, name: str, limits: Limits = Limits(), api_key: str | None = None, local: bool = False
    ):
        self.model, self.name, self.limits, self.metrics = model, name, limits, Metrics()
        self.engine, inference = Engine(model, limits), model.task.inference
        self.tokens = _tokens(inference, limits)
        self.created = int(time.time())
        can = {
            "completions": self.engine.generates,
            "embeddings": "embed" in model.methods,
            "classify": "classify" in model.methods,
        }
        # Not of images, which are given by their paths on this machine, and of graphs.
        offers = self.tokens is not None or isinstance(getattr(inference, "data", None), SetData)
        self.verbs = [verb for verb, offered in can.items() if offered and offers]
        if not self.verbs:
            raise ValueError(
                "this model has no completions, embeddings or classes to serve; give the run of another task"
            )
        post = {
            "/v1/completions": self.completions, "/v1/embeddings": self.embeddings, "/v1/classify": self.classify,
            "/tokenize": self.tokenize, "/detokenize": self.detokenize,
        }  # fmt: skip
        get = {
            "/v1/models": self.models, "/v1/models/{name:path}": self.one_model, "/health": self.health,
            "/metrics": self.show_metrics, "/tokenizer_info": self.tokenizer_info,
        }  # fmt: skip
        routes = [Route(path, verb, methods=["POST"]) for path, verb in post.items()]
        routes += [Route(path, verb, methods=["GET"]) for path, verb in get.items()]
        handlers: dict[Any, Any] = {RequestError: self._refused, HTTPException: self._not_found}
        inner = Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)
        self.app = Guard(inner, limits, self.metrics, frozenset({*post, *get}), api_key, local)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self.engine.start()
        yield
        await asyncio.to_thread(self.engine.stop)

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestError)
        return refusal(error)

    async def _not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path[:100], request.method[:20]
        message = f"there is no path {path!r}" if error.status_code == 404 else f"{path!r} does not take {method}"
        return refusal(RequestError(error.status_code, f"{message}; see docs/serve.md"))

    async def completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionRequest, "completions")
        assert self.tokens is not None
        opened = await open_completions(self.engine, self.tokens, self.name, body)
        self.metrics.tokens["prompt"] += sum(map(len, opened.prompts))
        if body.stream:
            return StreamingResponse(self._timed(opened), media_type="text/event-stream")
        try:
            return as_json(await self._in_time(request, opened.answer()))
        finally:
            opened.cancel()

    async def embeddings(self, request: Request) -> Response:
        body = await self._body(request, EmbeddingRequest, "embeddings")
        inputs, usage = await self._inputs(body.input)
        if body.encoding_format not in (None, "float", "base64"):
            raise RequestError(
                400, f"encoding_format is {body.encoding_format[:50]!r}; give float or base64", "encoding_format"
            )
        vector_ND = await self._called(request, partial(self.model.embed, inputs, body.pooling, body.normalize))
        if body.dimensions not in (None, vector_ND.shape[1]):
            raise RequestError(
                400,
                f"dimensions is {body.dimensions}, but the vectors have {vector_ND.shape[1]}; leave it out",
                "dimensions",
            )
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector_D, body.encoding_format)}
            for index, vector_D in enumerate(vector_ND)
        ]
        return as_json({"object": "list", "data": data, "model": self.name, "usage": usage})

    async def classify(self, request: Request) -> Response:
        body = await self._body(request, ClassifyRequest, "classify")
        inputs, usage = await self._inputs(body.input)
        predictions = await self._called(request, partial(self.model.classify, inputs))
        assert predictions.probabilities is not None
        rows = zip(predictions.values.tolist(), predictions.probabilities.tolist(), strict=True)
        data = [
            {"index": index, "label": label, "probs": probs, "num_classes": len(probs)}
            for index, (label, probs) in enumerate(rows)
        ]
        answer = {"object": "list", "data": data, "classes": list(predictions.classes), "model": self.name}
        return as_json(answer | {"usage": usage})

    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeRequest)
        (row,) = await self._tokenizer().encode([body.prompt], "text")
        return as_json({"tokens": row, "count": len(row), "max_model_len": self.limits.max_prompt})

    async def detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeRequest)
        tokens = self._tokenizer()
        (row,) = await tokens.encode([body.tokens], "tokens") if body.tokens else ([],)
        return as_json({"prompt": tokens.tokenizer.decode(row)})

    async def tokenizer_info(self, request: Request) -> Response:
        """What lm-evaluation-harness asks before it uses /tokenize. A text is taken to begin after a line end if there is no mark."""
        tokenizer = self._tokenizer().tokenizer
        end = next((mark for mark in ENDS if tokenizer.special_id(mark) is not None), "\n")
        return as_json(
            {"tokenizer_class": tokenizer.kind, "vocab_size": tokenizer.vocabulary, "eos_token": end, "bos_token": end}
        )

    async def models(self, request: Request) -> Response:
        return as_json({"object": "list", "data": [self._model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return as_json(self._model())

    async def health(self, request: Request) -> Response:
        alive = self.engine.thread.is_alive()
        return JSONResponse({"status": "ok" if alive else "failed", "version": __version__}, 200 if alive else 503)

    async def show_metrics(self, request: Request) -> Response:
        gauges: dict[str, float] = {"active_sequences": self.engine.active, "waiting_sequences": self.engine.waiting}
        return PlainTextResponse(self.metrics.text(gauges, self.engine.generated), media_type=CONTENT_TYPE)

    def _model(self) -> dict[str, Any]:
        what = {"id": self.name, "object": "model", "created": self.created, "owned_by": "everyformer"}
        return what | {"max_model_len": self.limits.max_prompt, "endpoints": [f"/v1/{verb}" for verb in self.verbs]}

    def _check_name(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise RequestError(404, f"there is no model {str(name)[:100]!r}; this service has {self.name!r}", "model")

    async def _body(self, request: Request, kind: type[Any], verb: str | None = None) -> Any:
        if verb is not None and verb not in self.verbs:
            raise RequestError(404, f"this model has no {verb}; it has {', '.join(self.verbs)}")
        body = read_body(await request.body(), kind)
        self._check_name(body.model)
        return body

    def _tokenizer(self) -> Tokens:
        if self.tokens is None:
            raise RequestError(404, "this model reads no text, so it has no tokens")
        return self.tokens

    async def _inputs(self, given: Any) -> tuple[list[Any], dict[str, int]]:
        """The inputs of a request, and how many tokens they have."""
        inputs = given if self.tokens is None and isinstance(given, list) and given else inputs_of(given, "input")
        if len(inputs) > MAX_INPUTS:
            raise RequestError(400, f"the request has {len(inputs)} inputs; give at most {MAX_INPUTS}", "input")
        self.engine.check_room(1)
        rows = [] if self.tokens is None else await self.tokens.encode(inputs, "input")
        if isinstance(self.model.task.inference, TextClassifierInference) and not isinstance(inputs[0], str):
            assert self.tokens is not None
            if self.tokens.tokenizer.kind != "ids":
                raise RequestError(
                    400, "this model reads texts, not token ids; give a text or a list of texts", "input"
                )
        count = sum(map(len, rows))
        self.metrics.tokens["prompt"] += count
        return inputs, {"prompt_tokens": count, "total_tokens": count}

    async def _called(self, request: Request, function: Callable[[], Any]) -> Any:
        return await self._in_time(request, self.engine.call(function))

    async def _in_time(self, request: Request, answer: Coroutine[Any, Any, T]) -> T:
        """Returns the answer. It is abandoned when the client goes away, and when it takes too long."""
        task, gone = asyncio.create_task(answer), asyncio.create_task(_gone(request.receive))
        try:
            await asyncio.wait({task, gone}, timeout=self.limits.timeout, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            if gone.done():
                raise RequestError(400, "the client closed the connection")
            raise RequestError(504, f"the answer took longer than {self.limits.timeout:g} seconds; ask for less")
        finally:
            task.cancel()
            gone.cancel()

    async def _timed(self, opened: Completions) -> AsyncIterator[bytes]:
        """The events of a stream, which ends with an error if it takes too long."""
        try:
            async with asyncio.timeout(self.limits.timeout):
                async for event in opened.events():
                    yield event
        except TimeoutError:
            yield as_event(
                RequestError(504, f"the stream took longer than {self.limits.timeout:g} seconds; ask for less").body()
            )
        finally:
            opened.cancel()


def _tokens(inference: Inference, limits: Limits) -> Tokens | None:
    """Returns what encodes the inputs of a model; None if it reads no texts."""
    if isinstance(inference, TextClassifierInference):
        return Tokens(TokenInference(inference.data.tokenizer), limits)
    return Tokens(inference, limits) if isinstance(inference, TokenInference) else None


async def _gone(receive: Callable[[], Awaitable[Any]]) -> None:
    """Returns when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


def as_json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


def _encoded(vector_D: Any, encoding: str | None) -> Any:
    if encoding == "base64":
        return base64.b64encode(vector_D.astype(np.float32).tobytes()).decode()
    return vector_D.tolist()
