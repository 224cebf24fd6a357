"""The page, in process and in a browser."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from starlette.testclient import TestClient

from everyformer.explore.app import Explorer
from everyformer.serve.server import Server, open_socket

NUMPY = {"Uint8Array": np.uint8, "Uint16Array": np.uint16, "Float32Array": np.float32}


@pytest.fixture(scope="session")
def explorer() -> Explorer:
    return Explorer()


@pytest.fixture(scope="session")
def client(explorer) -> Iterator[TestClient]:
    with TestClient(explorer.app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="session")
def address(explorer) -> Iterator[str]:
    """Where the page is served."""
    opened = open_socket("127.0.0.1", 0)
    server = Server(explorer)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    opened.close()


def unpack(message: bytes) -> tuple[dict, list[np.ndarray]]:
    """Reads an answer with arrays, as explore/src/lib/ask.js does."""
    import json

    size = int.from_bytes(message[:4], "little")
    data, at, arrays = json.loads(message[4 : 4 + size]), 4 + size, []
    for one in data["arrays"]:
        at += -at % 8
        count = int(np.prod(one["shape"]))
        array = np.frombuffer(message, NUMPY[one["type"]], count, at)
        arrays.append(array.reshape(one["shape"]))
        at += array.nbytes
    assert at == len(message)
    return data, arrays
