"""A service of a tiny language model with random weights, over HTTP and in process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from starlette.testclient import TestClient

import everyformer
from everyformer.serve.app import Service
from everyformer.serve.engine import Limits
from everyformer.serve.server import Server, open_socket
from everyformer.train.trained import TrainedRun

LIMITS = Limits(rows=4, queue=64, max_tokens=400, max_prompt=300, body=1 << 16, timeout=20.0)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> TrainedRun:
    torch.manual_seed(0)
    network = everyformer.build("byte-language", "tiny", width=16, heads=2, layers=1, context=512)
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    everyformer.save(network, folder)
    return everyformer.load(folder, device="cpu")


@contextmanager
def client_of(service: Service) -> Iterator[TestClient]:
    with TestClient(service.app) as client:
        yield client


@pytest.fixture(scope="session")
def client(model) -> Iterator[TestClient]:
    with client_of(Service(model, "tiny", LIMITS)) as client:
        yield client


@pytest.fixture(scope="session")
def address(model) -> Iterator[str]:
    """Where a service of the model listens."""
    opened = open_socket("127.0.0.1", 0)
    server = Server(Service(model, "tiny", LIMITS))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    server.should_exit = True
    thread.join(30)
    opened.close()
    assert not thread.is_alive()
