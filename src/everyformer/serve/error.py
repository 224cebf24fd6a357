"""What the service refuses, in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 504: "server_error"}
CODES = {
    401: "invalid_api_key",
    404: "not_found",
    413: "body_too_large",
    429: "queue_full",
    408: "timeout",
    504: "timeout",
}
RETRY_AFTER = "1"  # seconds after which a client may try again when the queue is full


class RequestError(Exception):
    """A request that is refused, with an HTTP status and one sentence."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        error = {"message": str(self), "type": kind, "param": self.param, "code": CODES.get(self.status)}
        return {"error": error}

    def headers(self) -> dict[str, str]:
        if self.status == 429:
            return {"Retry-After": RETRY_AFTER}
        return {"WWW-Authenticate": "Bearer"} if self.status == 401 else {}
