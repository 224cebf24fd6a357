"""`everyformer plan` of every member and size ends with numbers, or with one line that says why there are none."""

from __future__ import annotations

import json

import pytest

from everyformer.cli.main import main
from everyformer.family.table import MEMBERS

SIZES = [(member.name, size) for member in MEMBERS.values() for size in member.sizes]
FEW = ("run.batch=2", "run.steps=2", "run.device=cpu")


def planned(capsys, member, size, *settings):
    """What `plan` prints as JSON. Fails if it ends otherwise than with it."""
    code = main(["plan", member, "--size", size, "--no-measure", "--json", *settings])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return json.loads(captured.out)


@pytest.mark.parametrize("member", [member for member, size in SIZES if size == "tiny"])
def test_a_tiny_size_is_planned(member, capsys):
    found = planned(capsys, member, "tiny", *FEW)
    assert found["fits"] and 0 < found["tensors"] < 2**30 and found["flops"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("member, size", SIZES, ids="-".join)
def test_every_size_is_planned(member, size, capsys):
    """As a user types it: with the batch and the memory of this machine, and what to change if it does not fit."""
    found = planned(capsys, member, size)
    assert found["parameters"] > 0 and (found["fits"] or found["changes"] != [])
