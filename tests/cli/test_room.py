"""A run that finds no room ends with what it asked for and with settings that the plan says fit."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from everyformer.cli import room
from everyformer.cli.main import main
from everyformer.train.loop import Loop
from tests.train.small import recipe

SMALL = ("gpt2", "--size", "tiny", "run.steps=2", "run.batch=64", "run.evaluate=0", "run.examples=2", "run.device=cpu")
CPU = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 3145728 bytes."
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 3.00 GiB is free."
NUMPY = "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type int64"


@pytest.mark.parametrize(
    "error, said",
    [
        (RuntimeError(CPU), "out of memory: 3 MiB more were asked for; advice"),
        (torch.OutOfMemoryError(CUDA), "out of memory: 20.00 GiB more were asked for; advice"),
        (MemoryError(NUMPY), "out of memory: 7.45 GiB more were asked for; advice"),
        (MemoryError(), "out of memory; advice"),
    ],
    ids=["cpu", "cuda", "numpy", "bare"],
)
def test_what_was_asked_for_is_read_from_the_error(monkeypatch, error, said):
    def run():
        raise error

    monkeypatch.setattr(room, "_advice", lambda recipe: "advice")
    with pytest.raises(ValueError) as found:
        room.with_room(recipe("x"), run)
    assert str(found.value) == said


def test_a_failed_allocation_becomes_one_line_with_the_remedy(tmp_path, monkeypatch, capsys):
    def step(loop, *args):
        raise torch.OutOfMemoryError(CUDA)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Loop, "_step", step)
    assert main(["train", *SMALL]) == 2
    message = capsys.readouterr().err
    assert re.fullmatch(r"error: out of memory: 20\.00 GiB more were asked for; .*: add run\.\w+=\d+.*\n", message)


def test_another_error_of_torch_is_not_taken_for_it(tmp_path, monkeypatch):
    def step(loop, *args):
        raise RuntimeError("shapes do not match")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Loop, "_step", step)
    with pytest.raises(RuntimeError, match="shapes do not match"):
        main(["train", *SMALL])


def test_a_setting_that_is_really_too_big_fails_cleanly(tmp_path):
    import resource

    def limit():
        resource.setrlimit(resource.RLIMIT_DATA, (1500 << 20, -1))

    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question.\n" * 60)
    words = ["train", *SMALL, "--data", "text.txt", "run.batch=640", "model.context=128", "--out", "run"]
    failed = subprocess.run(
        [sys.executable, "-c", "import sys; from everyformer.cli.main import main; sys.exit(main())", *words],
        cwd=tmp_path, preexec_fn=limit, capture_output=True, text=True,
    )  # fmt: skip
    assert failed.returncode == 2, failed.stderr
    assert re.fullmatch(
        r"error: out of memory: \d+ MiB more were asked for; .* looked for [\d.]+ [MG]iB: add run\.\w+=\d+.*\n",
        failed.stderr,
    )
