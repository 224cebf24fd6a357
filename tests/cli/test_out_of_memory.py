"""A run that is out of memory ends with one line: what it requested, and settings that fit."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from everyformer.cli import out_of_memory
from everyformer.cli.main import main
from everyformer.train.loop import Loop
from tests.train.small import recipe

SMALL = ("gpt2", "--size", "tiny", "run.steps=2", "run.batch=64", "run.evaluate=0", "run.examples=2", "run.device=cpu")
CPU = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 3145728 bytes."
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.00 GiB is free."
NUMPY = "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type int64"


@pytest.mark.parametrize(
    "error, message",
    [
        (RuntimeError(CPU), "out of memory (3145728 bytes were requested); advice"),
        (torch.OutOfMemoryError(CUDA), "out of memory (20.00 GiB were requested); advice"),
        (MemoryError(NUMPY), "out of memory (7.45 GiB were requested); advice"),
        (MemoryError(), "out of memory; advice"),
    ],
    ids=["cpu", "cuda", "numpy", "bare"],
)
def test_the_requested_amount_is_read_from_the_error(monkeypatch, error, message):
    def run():
        raise error

    monkeypatch.setattr(out_of_memory, "_advice", lambda recipe: "advice")
    with pytest.raises(ValueError) as raised:
        out_of_memory.explain_out_of_memory(recipe("x"), run)
    assert str(raised.value) == message


def test_a_failed_allocation_becomes_one_line_with_the_remedy(tmp_path, monkeypatch, capsys):
    def step(loop, *args):
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Loop, "_step", step)
    assert main(["train", *SMALL]) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"error: out of memory \(20\.00 GiB were requested\); .*; add run\.\w+=\d+.*\n", message)


def test_another_error_of_torch_is_raised_as_it_is(tmp_path, monkeypatch):
    def step(loop, *args):
        raise RuntimeError("shapes do not match")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Loop, "_step", step)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["train", *SMALL])


def test_a_run_that_really_is_too_large_fails_with_one_line(tmp_path):
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (1500 << 20, -1))

    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question.\n" * 60)
    words = ["train", *SMALL, "--data", "text.txt", "run.batch=1280", "task.context=128", "--out", "run"]
    failed = subprocess.run(
        [sys.executable, "-c", "import sys; from everyformer.cli.main import main; sys.exit(main())", *words],
        cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True,
    )  # fmt: skip
    assert failed.returncode == 2, failed.stderr
    assert re.fullmatch(
        r"error: out of memory \(\d+ bytes were requested\); the run needs [\d.]+ [MG]iB; add run\.\w+=\d+.*\n",
        failed.stderr,
    )


@pytest.mark.parametrize(
    "error",
    [RuntimeError(CPU), MemoryError(), ImportError("libtorch_cpu.so: failed to map segment")],
)
def test_every_command_reports_a_lack_of_memory_in_one_line(monkeypatch, capsys, error):
    def listing():
        raise error

    monkeypatch.setattr("everyformer.cli.family.read_listing", listing)
    assert main(["family"]) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"error: out of memory( \(3145728 bytes were requested\))?; raise the limit .*\n", message)
