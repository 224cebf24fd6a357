"""CUDA graphs as far as they can be tested without a GPU; tests/device tests their results."""

from __future__ import annotations

import pytest
import torch

from everyformer.family.table import find
from everyformer.task.batch import Batch
from everyformer.train.cuda_graphs import MAX_SHAPES, CudaGraphs, unsupported_reason
from everyformer.train.recipe import Run

CASES = {
    "supported": (Run(precision="bf16"), "byte-language", 1, None),
    "fp16": (Run(precision="fp16"), "byte-language", 1, "run.precision=fp16"),
    "segment memory": (Run(), "transformer-xl", 1, "a segment memory"),
    "several processes": (Run(), "byte-language", 2, "2 processes"),
}


@pytest.mark.parametrize("run, member, processes, reason", CASES.values(), ids=CASES)
def test_steps_that_cannot_be_captured_are_refused_with_the_reason(run, member, processes, reason):
    found = unsupported_reason(run, find(member).value("tiny"), processes)
    assert found is None if reason is None else reason in found


def test_batches_of_too_many_shapes_are_refused():
    graphs = CudaGraphs(lambda batch, count: torch.zeros(()), torch.device("cpu"))
    graphs.calls = {(("x_B", (size,)),): 9 for size in range(MAX_SHAPES)}
    with pytest.raises(ValueError, match=r"more than 8, the last .*99.* use run.compile=yes"):
        graphs(Batch({"x_B": torch.zeros(99)}), 1)
