"""A compiled training step has the loss and the gradients of the step without compilation, and the same kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import everyformer
from everyformer.attention import attend
from everyformer.attention.kernels import request
from everyformer.train.distributed import World
from everyformer.train.learner import Learner
from everyformer.train.recipe import Recipe

SMALL = ("run.device=cpu", "run.batch=2", "run.evaluate=0", "run.compile=no")
OPTIONAL = {"gtrxl"}  # their tasks need packages that may not be installed


def gradients(name: str, compiled: bool, *settings: str) -> tuple[Any, dict[str, Any]]:
    """The loss and the gradients of the first step."""
    recipe = Recipe.of(name, *SMALL, *settings, size="tiny")
    data = recipe.task.open(None)
    learner = Learner(recipe, data, data.adapt(recipe.value(data.member_settings())), World())
    if compiled:
        torch._dynamo.reset()
        counters.clear()
        learner.module = torch.compile(learner.module, backend="aot_eager")
    batch = data.batch(0, recipe.run.batch, 0)
    torch.manual_seed(3)
    loss, _ = learner.backward(batch, data.count(batch))
    return loss, {key: p.grad for key, p in learner.network.named_parameters() if p.grad is not None}


def same(name: str, *settings: str) -> int:
    """Compares a step with a compiled one. Returns the number of graph breaks."""
    without_dropout = ["model.dropout=0"] if "dropout" in everyformer.family.table.find(name).settings() else []
    one, two = (gradients(name, compiled, *without_dropout, *settings) for compiled in (False, True))
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)
    return sum(counters["graph_break"].values())


def test_network_and_loss_are_one_graph():
    assert same("gpt2", "model.layers=1") == 0


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # PyTorch's own, at a graph break
def test_a_sparse_kernel_runs_outside_the_graph(monkeypatch):
    """It plans in Python and reads what the graph cannot; without the break a compiled step would compute a dense mask."""
    for module in (attend, request):
        monkeypatch.setattr(module, "LONG", 32)
    used = []
    choose = attend.choose

    def watched(*arguments: Any) -> Any:
        used.append(choose(*arguments).__name__.rpartition(".")[2])
        return choose(*arguments)

    monkeypatch.setattr(attend, "choose", watched)
    sizes = ("task.context=64", "model.stride=16", "model.columns=4", "model.layers=2")
    assert same("sparse-transformer", *sizes) > 0
    assert used == ["tiled"] * 4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", [name for name in everyformer.members() if name not in OPTIONAL])
def test_every_member_has_the_same_step_compiled(name):
    same(name)
