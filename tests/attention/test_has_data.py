"""Tensors without values are told from others, and nothing is read while a graph is compiled."""

from __future__ import annotations

import ast
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import everyformer
from everyformer.attention.has_data import can_read, has_data, is_exporting


def test_meta_and_fake_tensors_have_no_data():
    assert has_data(torch.ones(2)) and can_read(torch.ones(2))
    meta = torch.ones(2, device="meta")
    with FakeTensorMode():
        fake = torch.ones(2)
    assert not has_data(meta) and not can_read(meta)
    assert not has_data(fake) and not can_read(fake)


def test_a_compiled_graph_has_data_but_reads_none():
    def answers(x: Tensor) -> Tensor:
        return x + 10 * has_data(x) + can_read(x)

    compiled = torch.compile(answers, fullgraph=True, backend="eager")
    assert compiled(torch.zeros(1)).item() == 10 and answers(torch.zeros(1)).item() == 11


def test_only_torch_export_exports():
    class Answer(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + is_exporting()

    assert torch.compile(Answer(), fullgraph=True, backend="eager")(torch.zeros(1)).item() == 0
    for strict in (False, True):
        graph = torch.export.export(Answer(), (torch.zeros(1),), strict=strict).module()
        assert graph(torch.zeros(1)).item() == 1
    assert not is_exporting()


def test_torch_is_asked_in_one_place_whether_it_exports():
    """Its own answer is True under torch.compile in PyTorch 2.11."""
    files = [
        path
        for path in Path(everyformer.__file__).parent.rglob("*.py")
        if "compiler.is_exporting()" in path.read_text()
    ]
    assert files == []


def test_while_a_graph_is_traced_tensors_stand_for_those_that_it_gets(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert has_data(torch.ones(2, device="meta")) and not can_read(torch.ones(2))


def test_the_mathematics_does_not_name_fake_tensors():
    """What a plan assumes is set by the planner."""
    source = Path(everyformer.__file__).parent
    for path in (*source.glob("attention/**/*.py"), *source.glob("network/**/*.py")):
        names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(ast.parse(path.read_text()))}
        assert not names & {"FakeTensor", "FakeTensorMode", "is_meta"}, path
