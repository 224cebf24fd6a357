"""The application behind the page: its files, and the answers to what it asks. `Explorer(runs).app` is an ASGI application."""

from __future__ import annotations

import asyncio
import mimetypes
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from everyformer.explore.answer import Answer, Ask
from everyformer.explore.family import Family
from everyformer.explore.generate import Generate
from everyformer.explore.inside import Inside
from everyformer.explore.library import Library
from everyformer.explore.patterns import Patterns
from everyformer.explore.runs import Runs
from everyformer.serve.engine import Limits
from everyformer.serve.error import RequestError
from everyformer.serve.guard import Guard, refusal
from everyformer.serve.metrics import Metrics
from everyformer.serve.request import read_body

PAGE = Path(__file__).parent / "page"
BODY = 1 << 20  # bytes of a request
HEADERS = {
    # The page loads nothing from elsewhere, and a text that looks like a script stays a text.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Explorer:
    """The page for some runs. `app` is the ASGI application, `answer` what it is asked.

    `imports` are the files of own parts that have been imported; the commands that the page shows import them too.
    """

    def __init__(self, library: Library, imports: Sequence[str] = ()) -> None:
        self.library, self.limits, self.metrics = library, Limits(body=BODY), Metrics()
        views = (Patterns(imports), Family(imports), Inside(library), Generate(library), Runs(library))
        self.asks: dict[str, Ask] = {path: ask for view in views for path, ask in view.asks.items()}
        files = {"/" if path.name == "index.html" else f"/{path.name}": path for path in sorted(PAGE.iterdir())}
        routes = [Route(path, partial(_file, file=file)) for path, file in files.items()]
        routes += [Route(path, self._asked, methods=["POST"]) for path in self.asks]
        handlers: dict[Any, Any] = {RequestError: _refused, HTTPException: _not_found}
        inner = Starlette(routes=routes, exception_handlers=handlers)
        self.app = Guard(inner, self.limits, self.metrics, frozenset({*files, *self.asks}), local=True)

    def answer(self, path: str, body: bytes) -> Answer:
        """Returns the answer to a request. Raises RequestError if it cannot be answered."""
        ask = self.asks[path]
        request = read_body(body, ask.kind)
        try:
            return ask.answer(request)
        except ValueError as error:
            raise RequestError(400, " ".join(str(error).split())) from None

    async def _asked(self, request: Request) -> Response:
        answer = await asyncio.to_thread(self.answer, request.url.path, await request.body())
        return Response(answer.encode(), media_type=answer.media_type, headers=HEADERS)


async def _file(request: Request, file: Path) -> Response:
    kind = mimetypes.guess_type(file.name)[0] or "text/plain"
    return Response(file.read_bytes(), media_type=kind, headers=HEADERS)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refusal(error)


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return refusal(
        RequestError(error.status_code, f"there is nothing at {request.url.path[:100]!r}; open the page at /")
    )
