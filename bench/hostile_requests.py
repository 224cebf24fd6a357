"""Hostile requests: bytes that a client could send to `everyformer serve`, real ones with damage, and generated ones.

A request is a file `request.http`, and the command `request RUN` sends it to a service of the run that listens in this process. It ends
like a command of the command line: with a result, or with the sentence of the refusal. Afterwards the service must answer a good request.
"""

from __future__ import annotations

import functools
import gzip
import json
import random
import socket
import threading
import time
from contextlib import suppress
from http.client import HTTPResponse, RemoteDisconnected
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from bench.hostile_generated import generated
from bench.hostile_inputs import NESTED, dump, kind, mutate_bytes, mutate_json, value
from bench.hostile_types import values
from everyformer.serve.app import Service
from everyformer.serve.engine import Limits
from everyformer.serve.request import (
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from everyformer.serve.server import Server, open_socket
from everyformer.train.trained import load

FILE = "request.http"
LIMITS = Limits(rows=4, queue=32, max_tokens=16, max_prompt=64, body=1 << 20, timeout=5.0)
WAIT = 10.0  # seconds for an answer, before the client says that it sends no more
GOOD: dict[str, list[tuple[str, Any]]] = {
    "language": [
        ("/v1/completions", {"prompt": "the dog", "max_tokens": 3, "seed": 1}),
        ("/v1/completions", {"prompt": ["the", "fox"], "max_tokens": 2, "stream": True, "logprobs": 2, "n": 2}),
        ("/v1/completions", {"prompt": [1, 2], "max_tokens": 2, "echo": True, "stop": ["."], "temperature": 0}),
        ("/v1/embeddings", {"input": ["the dog", "a fox"], "encoding_format": "base64", "pooling": "mean"}),
        ("/tokenize", {"prompt": "the dog"}),
        ("/detokenize", {"tokens": [1, 2, 3]}),
    ],
    "classifier": [("/v1/classify", {"input": ["the dog", "a fox"]}), ("/v1/embeddings", {"input": "the dog"})],
}
KINDS_OF_BODY = {
    "/v1/completions": CompletionRequest, "/v1/embeddings": EmbeddingRequest, "/v1/classify": ClassifyRequest,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
HEADERS = (
    "Content-Type: text/plain; charset=utf-16", "Content-Type: multipart/form-data; boundary=", "Accept: image/png",
    "Content-Encoding: gzip", "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Expect: 100-continue",
    "Content-Length: -1", "Content-Length: 1e3", "Content-Length: 99999999999999999999", "Authorization: Bearer \xff",
    "Authorization: Basic eDp5", "Host:", "Host: a\r\nHost: b", "Range: bytes=5-1", "Upgrade: websocket", "Cookie: " + "a" * 9000,
    "X-" + "a" * 70_000 + ": 1", "Connection: close, upgrade, \0", "If-None-Match: *", "Origin: null",
)  # fmt: skip
PATHS = (
    "/", "/v1/models", "/v1/models/language", "/v1/models/%00%ff", "/v1/models/" + "x" * 5000, "/health", "/metrics", "/../etc/passwd",
    "/tokenizer_info", "//v1//completions", "/v1/completions?" + "a=b&" * 900, "*", "http://other/v1/models", "/v1/\xe9",
)  # fmt: skip


def message(path: str, body: bytes, method: str = "POST", headers: tuple[str, ...] = (), length: bool = True) -> bytes:
    """The bytes of a request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json", *headers]
    lines += [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + body


def write(folder: Path, run: str, content: bytes) -> list[str]:
    (folder / FILE).write_bytes(content)
    return ["request", run]


@kind("request")
def damaged(rng: random.Random, folder: Path) -> list[str]:
    """A good request with other values, bytes, headers, another encoding, or a body that is deep or large."""
    run = rng.choice(("language", "language", "classifier"))
    path, good = rng.choice(GOOD[run])
    body, choice = json.dumps(good).encode(), rng.randrange(10)
    if choice < 4:
        return write(folder, run, message(path, mutate_json(rng, body)))
    if choice == 4:
        return write(folder, run, mutate_bytes(rng, message(path, body)))
    if choice == 5:
        method = rng.choice(("GET", "POST", "PUT", "HEAD", "OPTIONS", "TRACE", "get", "P\u00e9", "X" * 50))
        return write(folder, run, message(rng.choice((path, *PATHS)), body, method))
    if choice == 6:
        headers = tuple(rng.choices(HEADERS, k=rng.choice((1, 1, 2))))
        return write(folder, run, message(path, body, headers=headers, length=rng.random() < 0.5))
    if choice == 7:
        text = body.decode().replace("the", "th\u00e9\u202e")
        encode = (lambda: text.encode("utf-16"), lambda: text.encode("latin-1", "replace"), lambda: gzip.compress(body))
        return write(folder, run, message(path, rng.choice(encode)()))
    if choice == 8:
        name = next(iter(good))
        return write(
            folder, run, message(path, dump(good | {name: rng.choice((NESTED, {"a": NESTED}, value(rng)))}).encode())
        )
    size = rng.choice((1 << 19, (1 << 20) - 20, 10 << 20))
    long = rng.choice(("a" * size, [1] * (size // 3), ["a"] * (size // 5)))
    return write(folder, run, message(path, json.dumps(good | {next(iter(good)): long}).encode()))


@st.composite
def bodies(draw: DrawFn) -> tuple[str, str, bytes]:
    """A run, a path, and a body whose fields have values of their declared types, and here and there another."""
    path = draw(st.sampled_from(sorted(KINDS_OF_BODY)))
    run = draw(st.sampled_from([run for run, good in GOOD.items() if path in dict(good)]))
    tree = draw(values(KINDS_OF_BODY[path]))
    if isinstance(tree, dict) and draw(st.integers(0, 3)):
        tree |= next(good for one, good in GOOD[run] if one == path)
    return run, path, json.dumps(tree).encode()


@generated("request, generated", bodies())
def request(example: tuple[str, str, bytes], folder: Path) -> list[str]:
    run, path, body = example
    return write(folder, run, message(path, body))


# The service


@functools.cache
def listening(run: str) -> int:
    """The port of a service of a run, in a thread of this process."""
    opened = open_socket("127.0.0.1", 0)
    server = Server(Service(load(run, device="cpu"), run, LIMITS))
    threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    port: int = opened.getsockname()[1]
    return port


def ask(port: int, content: bytes) -> tuple[int, str]:
    """The status and the body of the answer to some bytes; 0 if the connection is closed without one, as after half a request."""
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):  # it has answered without reading all
            connection.sendall(content)
        try:
            connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            connection.shutdown(socket.SHUT_WR)
        answer = HTTPResponse(connection, method=content.split(b" ", 1)[0].decode("latin-1"))
        try:
            answer.begin()
        except RemoteDisconnected:
            return 0, ""
        return answer.status, answer.read().decode()


def send(run: str) -> int:
    """Sends the request of the current folder, and prints the answer as the command line prints it. Returns its exit code."""
    status, text = ask(listening(run), Path(FILE).read_bytes())
    path, body = GOOD[run][0]
    after, _ = ask(listening(run), message(path, json.dumps(body).encode()))
    if after != 200 or status == 500:
        raise RuntimeError(f"it was answered with {status} {text}, and a good request after it with {after}")
    if 0 < status < 400:
        print(status, text[:2000])
        return 0
    print("error:", json.loads(text)["error"]["message"] if text else f"{status}, and no body")
    return 2
