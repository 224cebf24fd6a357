"""Runs a service until it is told to stop; then it finishes what it started."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from typing import Protocol

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from everyformer.serve.engine import Limits
from everyformer.serve.error import RequestError
from everyformer.serve.guard import ARRIVAL, refusal


class Served(Protocol):
    """What a server serves."""

    @property
    def app(self) -> ASGIApp: ...

    @property
    def limits(self) -> Limits: ...


def open_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that listens. Raises ValueError if it cannot."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"--port {port} is not a port; give 1 to 65535, or 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
            opened.listen(2048)
        except OSError:
            opened.close()
            raise
    except OSError as error:
        raise ValueError(
            f"cannot listen at {host} port {port} ({error.strerror or error}); give another --host or --port"
        ) from None
    return opened


class Http(H11Protocol):
    """HTTP/1.1. Bytes that are no request are refused in the form of every refusal, and so are headers that do not arrive in time."""

    headers_due: asyncio.TimerHandle | None = None  # set while a request is awaited or its headers are incomplete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._cancel_headers_due()
        elif self.headers_due is None:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_headers_due()
        super().connection_lost(exc)

    def _await_headers(self) -> None:
        self.headers_due = self.loop.call_later(ARRIVAL, self._headers_missing)

    def _cancel_headers_due(self) -> None:
        if self.headers_due is not None:
            self.headers_due.cancel()
            self.headers_due = None

    def _headers_missing(self) -> None:
        if self.transport.is_closing():
            return
        if self.conn.trailing_data[0]:
            self._refuse(RequestError(408, f"the headers did not arrive within {ARRIVAL:g} seconds"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(RequestError(400, "the bytes received are not a request of HTTP/1.1; send one"))

    def _refuse(self, error: RequestError) -> None:
        """Answers on a connection that has no request, and closes it."""
        answer = refusal(error)
        answer.headers["connection"] = "close"
        parts = h11.Response(status_code=error.status, headers=answer.raw_headers)
        for event in (parts, h11.Data(data=bytes(answer.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()


class Server(uvicorn.Server):
    """Answers requests until it is told to stop. `started` is called when it listens."""

    def __init__(self, service: Served, started: Callable[[], None] = lambda: None):
        super().__init__(
            uvicorn.Config(
                service.app,
                http=Http,
                ws="none",
                lifespan="on",
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_keep_alive=15,
                timeout_graceful_shutdown=int(service.limits.timeout) + 1,
                h11_max_incomplete_event_size=1 << 16,
            )
        )
        self.when_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self.when_started()


def serve_forever(service: Served, opened: socket.socket, started: Callable[[], None]) -> None:
    """Answers requests until SIGTERM or Ctrl-C, which ends it after the requests that it has started. A second one ends it at once."""
    # uvicorn raises its signals again when it has ended; here they have done their work.
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        Server(service, started).run(sockets=[opened])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        opened.close()
