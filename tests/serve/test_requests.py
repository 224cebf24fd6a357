"""No request ends in an error of the server, whatever it contains."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.hostile_requests import ask, message
from everyformer.serve import server as server_module
from everyformer.serve.request import (
    ClassifyRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)

PATHS = {
    "/v1/completions": CompletionRequest, "/v1/embeddings": EmbeddingRequest, "/v1/classify": ClassifyRequest,
    "/tokenize": TokenizeRequest, "/detokenize": DetokenizeRequest,
}  # fmt: skip
NUMBERS = st.one_of(st.integers(-3, 6), st.sampled_from([2**31, 2**63, -(2**70), 0.0, -0.0, 0.5, 1e308, 1e-308]))
ATOMS = st.one_of(
    st.none(), st.booleans(), NUMBERS, st.text(max_size=6), st.sampled_from(["tiny", "float", "base64", "first"])
)
ANY: st.SearchStrategy[Any] = st.recursive(
    ATOMS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=2)),
    max_leaves=6,
)
PROMPTS = st.one_of(
    st.text(max_size=8), st.lists(st.text(max_size=4), max_size=3), st.lists(st.integers(0, 300), max_size=4), ANY
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A path and a body with some of its fields, most of them of a right kind."""
    path = draw(st.sampled_from(sorted(PATHS)))
    names = PATHS[path].__struct_fields__
    body = {name: draw(ANY) for name in draw(st.lists(st.sampled_from(names), max_size=3, unique=True))}
    body |= {draw(st.text(max_size=5)): draw(ANY)} if draw(st.integers(0, 9)) == 0 else {}
    return path, {names[0]: draw(PROMPTS), "max_tokens": 2} | body if path == "/v1/completions" else {
        names[0]: draw(PROMPTS)
    } | body


@given(requests())
@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_a_request_is_answered_or_refused_with_a_sentence(client, one):
    check(client, *one)


def check(client, path: str, body: dict[str, Any]) -> None:
    answer = client.post(path, content=json.dumps(body))
    assert answer.status_code < 500, (path, body, answer.text)
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]


@given(st.binary(max_size=40), st.sampled_from(sorted(PATHS)))
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_are_no_request_are_refused(client, raw, path):
    assert client.post(path, content=raw).status_code in (400, 404)


OTHERS = (
    ("GET", "/"), ("GET", "/v1/completions"), ("PUT", "/v1/models"), ("POST", "/v1/%00%ff"), ("DELETE", "/v1/models/x")
)  # fmt: skip


def test_other_paths_and_methods_are_refused(client):
    for method, path in OTHERS:
        answer = client.request(method, path)
        assert answer.status_code in (404, 405) and answer.json()["error"]["message"]


WRONG = {
    b"\x16\x03\x01\x02\x00 no request\r\n\r\n": "not a request of HTTP/1.1; send one",
    message("/tokenize", b"{}", headers=("Content-Length: 1e3",), length=False): "not a request of HTTP/1.1; send one",
    message(
        "/tokenize", '{"prompt": "é"}'.encode("latin-1")
    ): "is not valid JSON (it is not text in UTF-8); send one JSON object",
    message("/v1/models/%00%1b[2J", b"{}", "PUT"): r"'/v1/models/\x00\x1b[2J' does not take PUT",
}


@pytest.mark.parametrize("content", WRONG, ids=WRONG.values())
def test_bytes_on_the_wire_are_refused_with_a_sentence_in_json(address, content):
    status, text = ask(int(address.rpartition(":")[2]), content)
    assert 400 <= status < 500 and WRONG[content] in json.loads(text)["error"]["message"]


GOOD = message("/tokenize", b'{"prompt": "a"}')


@pytest.mark.parametrize(("kept", "start"), [(False, 0), (False, 40), (True, 40)])
def test_headers_that_do_not_arrive_do_not_hold_a_connection(address, monkeypatch, kept, start):
    """Neither on a new connection nor on one that had an answer. `start` is how many bytes of the request arrive."""
    monkeypatch.setattr(server_module, "ARRIVAL", 0.3)
    with socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), timeout=20) as connection:
        if kept:
            connection.sendall(GOOD)
            first = HTTPResponse(connection)
            first.begin()
            assert first.status == 200 and first.read()
        connection.sendall(GOOD[:start])
        answer = b"".join(iter(lambda: connection.recv(4096), b""))  # to the end of the connection
    assert (b"408" in answer and b"the headers did not arrive within 0.3 seconds" in answer) if start else not answer
