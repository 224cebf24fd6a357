"""What can be said of recorded steps without a GPU; that they are right is shown in tests/device."""

from __future__ import annotations

import pytest
import torch

from everyformer.family.table import find
from everyformer.task.work import Batch
from everyformer.train.capture import MOST, Captured, unsupported_reason
from everyformer.train.recipe import Run

CASES = {
    "as it should be": (Run(precision="bf16"), "byte-language", 1, None),
    "fp16": (Run(precision="fp16"), "byte-language", 1, "run.precision=fp16"),
    "segment memory": (Run(), "transformer-xl", 1, "the memory of the last"),
    "several processes": (Run(), "byte-language", 2, "2 processes"),
}


@pytest.mark.parametrize("run, member, processes, reason", CASES.values(), ids=CASES)
def test_a_step_that_is_not_the_same_each_time_is_not_recorded(run, member, processes, reason):
    found = unsupported_reason(run, find(member).value("tiny"), processes)
    assert found is None if reason is None else reason in found


def test_batches_of_too_many_shapes_are_refused():
    captured = Captured(lambda batch, count: (torch.zeros(()), torch.zeros(())), [], torch.device("cpu"))
    captured.seen = {(("x_B", (size,)),): 9 for size in range(MOST)}
    with pytest.raises(ValueError, match=r"more than 8, the last .*99.* use run.compile=yes"):
        captured(Batch({"x_B": torch.zeros(99)}), 1)
