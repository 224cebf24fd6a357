"""Every tiny member, built from seed 0, gives the outputs that golden.json records.

After a change to a member, or to how its weights are initialized, write the file again: python -m tests.family.test_golden
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import everyformer
from everyformer.study.example import example, parts

FILE = Path(__file__).with_name("golden.json")
GOLDEN = json.loads(FILE.read_text())


def test_every_member_is_recorded():
    assert set(GOLDEN) == set(everyformer.members())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_member_has_its_recorded_parameters_and_outputs(name):
    found = record(name)
    assert found["parameters"] == GOLDEN[name]["parameters"]
    for computed, recorded in zip(found["outputs"], GOLDEN[name]["outputs"], strict=True):
        assert computed == [pytest.approx(numbers, rel=1e-8, abs=1e-8) for numbers in recorded]


def record(name: str) -> dict[str, Any]:
    """Of the hidden states and each head's logits: the sum, the sum of squares and the first four numbers."""
    torch.manual_seed(0)
    network = everyformer.build(name, "tiny").double().eval()
    outputs: list[list[list[float]]] = []
    for part, source_width in parts(network):
        with torch.no_grad():
            output = example(part.value, source_width=source_width).to("cpu", torch.float64).run(part)
        logits = () if output.logits is None else output.logits
        tensors = (output.hidden, *(logits if isinstance(logits, tuple) else (logits,)))
        outputs.append([torch.stack((x.sum(), x.square().sum(), *x.flatten()[:4])).tolist() for x in tensors])
    return {"parameters": sum(p.numel() for p in network.parameters()), "outputs": outputs}


if __name__ == "__main__":
    rows = [f" {json.dumps(name)}: {json.dumps(record(name))}" for name in GOLDEN]
    FILE.write_text("{\n" + ",\n".join(rows) + "\n}\n")
