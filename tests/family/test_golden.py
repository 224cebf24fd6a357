"""Every tiny member, built from seed 0, gives the outputs that golden.json records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import everyformer
from everyformer.study.example import example, parts

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_text())


def test_every_member_is_recorded():
    assert set(GOLDEN) == set(everyformer.members())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_member_has_its_recorded_parameters_and_outputs(name):
    """Of the hidden states and each head's logits: the sum, the sum of squares and the first four numbers."""
    torch.manual_seed(0)
    network = everyformer.build(name, "tiny").double().eval()
    assert sum(p.numel() for p in network.parameters()) == GOLDEN[name]["parameters"]
    for (part, source_width), recorded in zip(parts(network), GOLDEN[name]["outputs"], strict=True):
        with torch.no_grad():
            output = example(part.value, source_width=source_width).to("cpu", torch.float64).run(part)
        logits = () if output.logits is None else output.logits
        tensors = (output.hidden, *(logits if isinstance(logits, tuple) else (logits,)))
        for x, numbers in zip(tensors, recorded, strict=True):
            computed = torch.stack((x.sum(), x.square().sum(), *x.flatten()[:4]))
            torch.testing.assert_close(computed, torch.tensor(numbers, dtype=torch.float64), rtol=1e-8, atol=1e-8)
