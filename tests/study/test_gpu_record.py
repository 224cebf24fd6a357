"""The record of the GPU is computed from its log."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from bench import gpu
from bench.gpu import ATTENTION, TESTS, page
from everyformer.study.contract_report import Report, Result
from everyformer.train.provenance import header, provenance

LOG = f"""
== {ATTENTION}: python -m everyformer bench attention
kind       positions  batch        ms       speed-up     MiB
dense         16,384      4      8.36          1.00x     258
local         16,384      4      0.53         15.65x     516
dense         65,536      1     36.28          1.00x     258
local         65,536      1      1.55         23.41x   1,516
exit status 0, 3 s
== {TESTS}: python -m pytest -v tests/device
[gw0] [ 33%] PASSED tests/device/test_cuda.py::test_members_train[gpt2]
[gw1] [ 66%] FAILED tests/device/test_cuda.py::test_members_train[a b]
[gw1] [ 99%] PASSED tests/device/test_contracts.py::test_all
contract     checks   worst error    limit
future           61       0.0e+00    0e+00  passed
cache           1061       2.7e-05    1e-09  FAILED
FAILED tests/device/test_cuda.py::test_members_train[a b] - assert 1 == 2
=================== 1 failed, 2 passed in 173.31s (0:02:53) ====================
exit status 1, 174 s
"""


def test_the_record_has_what_the_log_has(tmp_path: Path) -> None:
    path = tmp_path / "gpu.txt"
    path.write_text(header(provenance(seed=0, commit="abc1234")) + LOG)
    text = page(path)
    assert text.splitlines()[2] == (
        "On a GPU 1 of 3 tests failed; these contracts were broken: cache; these speeds of attention missed their targets: local at "
        "65,536. There were 3 tests and 1,122 checks of the contracts on CUDA."
    )
    assert "Commit abc1234, 20" in text
    for row in (
        "| local | 0.53 ms | 15.65 (6) | 516 | 1.55 ms | 23.41 (25) | 1,516 |",
        "| cache | 1,061 | 2.7e-05 | 1e-09 |",
        "| members train | 2 | 1 |",
        "| all | 1 | 0 |",
    ):
        assert row in text, row
    assert "1 failed, 2 passed, 173 s." in text


ALONE = """
tests/device/test_cuda.py::test_members_train[gpt2] PASSED [ 50%]
tests/device/test_contracts.py::test_all PASSED [100%]
contract     checks   worst error    limit
future           61       0.0e+00    0e+00  passed
========= 2 passed in 3.31s =========
exit status 0, 4 s
"""


@pytest.mark.parametrize(
    ("attention", "tests", "sentence"),
    [
        (0, ALONE, "Nothing failed on a GPU: 2 tests and 61 checks of the contracts on CUDA passed, "),
        (1, ALONE, "On a GPU attention was not timed to the end (exit status 1). There were 2 tests"),
        (0, "exit status 4, 1 s\n", "On a GPU the tests did not run to the end (exit status 4). There were 0 tests"),
        (
            0,
            "[gw0] [ 1%] PASSED tests/device/test_cuda.py::test_a\n",
            "On a GPU the tests did not run to the end (its log breaks off).",
        ),
    ],
    ids=["none", "attention", "tests", "killed"],
)
def test_the_first_sentence_of_the_record_names_what_failed(tmp_path: Path, attention, tests, sentence) -> None:
    speed = f"dense  16,384  4  8.36  1.00x  258\nexit status {attention}, 3 s\n"
    log = f"\n== {ATTENTION}: python\n{speed}== {TESTS}: python\n{tests}"
    (tmp_path / "gpu.txt").write_text(header(provenance(seed=0, commit="abc1234")) + log)
    assert page(tmp_path / "gpu.txt").splitlines()[2].startswith(sentence)


def test_a_report_says_how_many_failures_it_leaves_out() -> None:
    for count in (10, 13):
        text = str(Report([Result("future", f"model {i}", 1.0, 0.0) for i in range(count)]))
        assert text.count("FAILED: ") == 10 and text.endswith("and 3 more") == (count == 13)


@pytest.mark.parametrize("xdist", [True, False])
def test_each_part_runs_though_the_other_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, xdist: bool) -> None:
    """A bare machine has pytest, and neither its extensions nor git."""
    original, ran = subprocess.Popen, list[list[str]]()

    def program(words: list[str], **options: Any) -> Any:
        ran.append(words)
        return original(
            [sys.executable, "-c", f"print('part {len(ran)}'); raise SystemExit({len(ran) + 1})"], **options
        )

    monkeypatch.setattr(gpu.subprocess, "Popen", program)
    monkeypatch.setattr(gpu, "find_spec", lambda name: xdist or None)
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "start_log", lambda **given: print(header(provenance(seed=0, commit="abc1234"))))
    monkeypatch.setattr(sys, "argv", ["gpu", "--out", str(tmp_path), "--workers", "3"])
    with pytest.raises(SystemExit) as ended:
        gpu.main()
    assert ended.value.code == 1 and ["-n" in words for words in ran] == [False, xdist]
    log, text = (tmp_path / "logs" / "gpu.txt").read_text(), (tmp_path / "gpu.md").read_text()
    assert "part 1\nexit status 2, " in log and "part 2\nexit status 3, " in log
    assert (
        "attention was not timed to the end (exit status 2); the tests did not run to the end (exit status 3)" in text
    )


def test_the_tests_of_a_gpu_are_collected_without_one() -> None:
    for file in sorted(Path("tests/device").glob("test_*.py")):
        assert [name for name in vars(import_module(f"tests.device.{file.stem}")) if name.startswith("test_")]
