"""What every request passes first: its host and origin, the API key, the size of the body, the time it takes to arrive, and the count
of requests."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everyformer.serve.engine import FAILED, Limits
from everyformer.serve.error import RequestError
from everyformer.serve.metrics import Metrics

OPEN = ("/health",)  # paths that need no key
DRAINED = 64 << 20  # bytes of a body that is too large that are read, at most
ARRIVAL = 30.0  # seconds in which the headers, and then the body, must arrive, at most
log = logging.getLogger("everyformer.serve")


def is_local(host: str) -> bool:
    """Returns whether a host can be reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """Wraps an application. Errors of any kind become answers in OpenAI's form.

    With `local`, requests are refused that a page of another site makes: their host is not this machine (a name that was made to point
    here), or their origin is not the page that this application serves.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        metrics: Metrics,
        paths: frozenset[str],
        api_key: str | None = None,
        local: bool = False,
    ):
        self.app, self.limits, self.metrics, self.paths, self.local = app, limits, metrics, paths, local
        self.key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start, status = time.monotonic(), 499  # the client has gone before an answer started

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._answer(scope, receive, counted)
        except ClientDisconnect:
            pass
        except Exception as error:
            if not isinstance(error, RequestError):
                log.exception("a request failed")
                error = RequestError(500, FAILED)
            if status != 499:  # an answer has started: the connection is closed
                raise
            await refusal(error)(scope, receive, counted)
        finally:
            path = scope["path"] if scope["path"] in self.paths else "other"
            self.metrics.request(path, status, time.monotonic() - start)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if self.local:
            _check_origin(headers)
        if self.key is not None and scope["path"] not in OPEN:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.key):
                raise RequestError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
        if scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        body = await self._read(headers, receive)
        first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def again() -> Any:
            return first.pop() if first else await receive()

        await self.app(scope, again, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        too_large = RequestError(413, f"the body has more than {self.limits.body} bytes; send less in one request")
        length = headers.get("content-length", "0")
        large = length.isdecimal() and len(length) < 20 and int(length) > self.limits.body
        chunks, size = list[bytes](), 0
        try:
            async with asyncio.timeout(min(ARRIVAL, self.limits.timeout)):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise RequestError(400, "the client closed the connection before the whole body")
                    size += len(message.get("body", b""))
                    large = large or size > self.limits.body
                    if large and (size > DRAINED or not message.get("more_body")):
                        raise too_large
                    if not large:  # what is refused is read, so that the client reads the answer, but not kept
                        chunks.append(message.get("body", b""))
                    if not message.get("more_body"):
                        return b"".join(chunks)
        except TimeoutError:
            raise RequestError(
                408, f"the body did not arrive within {min(ARRIVAL, self.limits.timeout):g} seconds"
            ) from None


def _check_origin(headers: Headers) -> None:
    """Raises RequestError unless the request comes from this machine's browser, from a page of this address."""
    host, origin = headers.get("host", ""), headers.get("origin")
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    if not is_local(name.strip("[]")):
        raise RequestError(403, f"the host {host[:100]!r} is not this machine; use the address that was printed")
    if origin is not None and origin != f"http://{host}":
        raise RequestError(403, f"a page of {origin[:100]!r} asks; only the page of this address may")


def refusal(error: RequestError) -> JSONResponse:
    """Returns the answer to a request that is refused. After 408 and 413 the connection is closed: more of the body may come."""
    close = {"Connection": "close"} if error.status in (408, 413) else {}
    return JSONResponse(error.body(), error.status, headers=error.headers() | close)
