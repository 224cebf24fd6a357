"""The memory of a service: what is free goes back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from pathlib import Path
from typing import Any, cast

import pytest

import everyformer as ef
from everyformer.serve import engine as engine_module
from everyformer.serve.engine import Engine, Limits
from everyformer.serve.memory import CAPACITIES, limit_compiled_shapes, memory_trimmer


def resident() -> float:
    """The resident memory of this process in MiB."""
    return int(Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]) / 1024


@pytest.mark.skipif(sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_free_memory_between_blocks_that_stay_goes_back():
    library = ctypes.CDLL(None)
    library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    size, blocks = 32 << 10, []
    for number in range(4000):  # every fourth stays
        blocks.append(library.malloc(size))
        ctypes.memset(blocks[-1], number % 256, size)
    for number, block in enumerate(blocks):
        if number % 4:
            library.free(block)
    before = resident()
    memory_trimmer()()
    after = resident()
    for block in blocks[::4]:
        library.free(block)
    assert before - after > 0.5 * 3000 * size / 2**20


class Model:
    """What an engine needs of a language model."""

    methods = ("score",)

    def __init__(self) -> None:
        self.network = ef.build("gpt2", "tiny").eval()


def test_memory_goes_back_after_so_many_steps(monkeypatch):
    monkeypatch.setattr(engine_module, "EVERY", 4)
    calls: list[int] = []

    async def run() -> None:
        engine = Engine(cast(Any, Model()), Limits())
        engine.trim_memory = lambda: calls.append(engine.steps)
        engine.start()
        async for _ in engine.submit([1, 2, 3], tokens=10):
            pass
        engine.stop()

    asyncio.run(run())
    assert calls == [4, 8]


def test_a_limit_of_the_user_is_kept(monkeypatch):
    monkeypatch.setattr(os, "environ", {CAPACITIES[0]: "7"})
    limit_compiled_shapes()
    assert [os.environ[name] for name in CAPACITIES] == ["7", "64"]
