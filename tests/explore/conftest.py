"""The page of a tiny run, in process and in a browser."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from everyformer.explore.app import Explorer
from everyformer.explore.library import Library
from everyformer.serve.server import Server, open_socket
from everyformer.train import Recipe, train

NUMPY = {"Uint8Array": np.uint8, "Uint16Array": np.uint16, "Float32Array": np.float32}
SETTINGS = ("run.steps=6", "run.batch=4", "run.evaluate=3", "run.examples=2", "task.valid=0.001", "task.context=32")
SCRIPT = "<script>alert(1)</script>"  # the name of a run's folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder with runs: a language model, one with a segment memory, and a folder with a hostile name."""
    parent = tmp_path_factory.mktemp("explore") / "runs"
    small = ("model.width=16", "model.heads=2", "model.layers=2")
    train(Recipe.of("byte-language", *SETTINGS, *small, size="tiny"), parent / "first")
    train(Recipe.of("transformer-xl", *SETTINGS, *small, "model.memory=16", size="tiny"), parent / "memory")
    (parent / SCRIPT.replace("/", "|")).mkdir()
    for name in ("recipe.json", "model.json", "records.jsonl"):
        content = (parent / "first" / name).read_bytes()
        (parent / SCRIPT.replace("/", "|") / name).write_bytes(content)
    (parent / "notes").mkdir()
    return parent


@pytest.fixture(scope="session")
def explorer(folder) -> Explorer:
    return Explorer(Library([folder], device="cpu"))


@pytest.fixture(scope="session")
def client(explorer) -> Iterator[TestClient]:
    with TestClient(explorer.app, base_url="http://127.0.0.1") as client:
        yield client


@pytest.fixture(scope="session")
def address(explorer) -> Iterator[str]:
    with served(explorer) as address:
        yield address


@contextmanager
def served(explorer: Explorer) -> Iterator[str]:
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
