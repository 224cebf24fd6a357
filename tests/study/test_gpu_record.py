"""The record of the GPU is computed from its log."""

from __future__ import annotations

from pathlib import Path

from bench.gpu import ATTENTION, TESTS, page
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
    assert "3 tests on a GPU: 1 failed. 1,122 checks of the contracts on CUDA: cache broken." in text
    assert "miss their target: local at 65,536." in text and "Commit abc1234, 20" in text
    for row in (
        "| local | 0.53 ms | 15.65 (6) | 516 | 1.55 ms | 23.41 (25) | 1,516 |",
        "| cache | 1,061 | 2.7e-05 | 1e-09 |",
        "| members train | 2 | 1 |",
        "| all | 1 | 0 |",
    ):
        assert row in text, row
    assert "1 failed, 2 passed, 173 s." in text
