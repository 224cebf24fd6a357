"""Low precision: the network computes in bfloat16, the loss and the weights stay in float32."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from everyformer.network.linear_cross_entropy import LogitMap
from everyformer.task.batch import Batch
from everyformer.train.distributed import World
from everyformer.train.learner import Learner
from everyformer.train.recipe import Recipe
from tests.train.small import recipe, text

SMALL = ("run.batch=4", "run.precision=bf16", "run.device=cpu")
CASES = [
    ("byte-language", "task.context=16"),
    ("bert", "task.context=32", "task.vocabulary=90"),
    ("byte-classifier",),
    ("vit",),
    ("graph-classifier",),
    ("transformer", "task.vocabulary=300"),
    ("image-transformer", "task.size=7"),
    ("image-transformer", "task.size=7", "model.logistics=2"),
]


def learner_of(recipe: Recipe) -> tuple[Learner, Batch]:
    data = recipe.task.open(recipe.data)
    learner = Learner(recipe, data, data.adapt(recipe.value(data.member_settings())), World(device=torch.device("cpu")))
    return learner, data.batch(0, recipe.run.batch, recipe.run.seed)


def dense(output):
    """The logits of each head as a tensor; a language head gives a map, of which the loss takes chunks."""
    heads = output.logits if isinstance(output.logits, tuple) else (output.logits,)
    with torch.autocast("cpu", torch.bfloat16):
        return tuple(x.logits() if isinstance(x, LogitMap) else x for x in heads)


def in_float32(output):
    logits = tuple(x.float() for x in dense(output))
    return replace(output, logits=logits if isinstance(output.logits, tuple) else logits[0])


@pytest.mark.spec(129)
@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_the_loss_of_every_task_is_computed_in_float32(case, tmp_path):
    """It equals the loss of the same bfloat16 logits, converted to float32, to the rounding of float32."""
    data = text(tmp_path) if case[0] in ("byte-language", "bert") else None  # the others have small data of their own
    learner, batch = learner_of(Recipe.of(case[0], *SMALL, *case[1:], size="tiny", data=data))
    learner.network.eval()
    found = []
    kept = learner.network.register_forward_hook(lambda *call: found.append(call[2]))
    with torch.autocast("cpu", torch.bfloat16):
        low = learner.task.objective.loss(learner.network, batch, "auto")
    kept.remove()
    (output,) = found
    assert {x.dtype for x in dense(output)} == {torch.bfloat16}
    learner.network.register_forward_hook(lambda *_: in_float32(output))
    exact = learner.task.objective.loss(learner.network, batch, "auto")
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(exact.item(), rel=1e-6) and low.item() != low.bfloat16().item()


@pytest.mark.spec(129)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_in_bfloat16_has_its_loss_and_gradients_in_float32(tmp_path, accumulate):
    settings = ("run.precision=bf16", f"run.accumulate={accumulate}", "model.dropout=0.0")
    learner, batch = learner_of(recipe(text(tmp_path), *settings))
    logits = []
    learner.network.register_forward_hook(lambda *call: logits.append(dense(call[2])[0].detach()))
    count = learner.task.data.count(batch)
    loss, norm = learner.backward(batch, count)
    assert {x.dtype for x in logits} == {torch.bfloat16}
    exact = F.cross_entropy(torch.cat(logits).double().flatten(0, 1), batch["token_BT"][:, 1:].flatten())
    assert loss.dtype == norm.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-6)
    assert {p.grad.dtype for p in learner.network.parameters() if p.grad is not None} == {torch.float32}
