"""Tests that need a GPU: a training step that never waits for it, and the CUDA graph of a whole step."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from typing import Any

import pytest
import torch

from everyformer import build
from everyformer.task.batch import Batch
from everyformer.task.language import LanguageData, LanguageObjective
from everyformer.task.table import task_for
from everyformer.train import loop
from everyformer.train.distributed import World
from everyformer.train.draw import Batches
from everyformer.train.gradient_watch import GradientWatch, StepCheck
from everyformer.train.loop import train
from everyformer.train.optimizer import optimizers, set_lr
from everyformer.train.recipe import Optim, Recipe, override

CUDA = torch.device("cuda")
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS", "ignore:TensorFloat32 tensor cores", "ignore:Online softmax is disabled"
)


def recipe(member: str, *settings: str) -> Recipe:
    start = Recipe(member=member, size="tiny", task=task_for(member, "tiny"))
    return override(start, ["run.batch=4", "run.evaluate=0", "run.save=0", *settings])


def trained(one: Recipe) -> tuple[list[dict[str, Any]], list[torch.Tensor]]:
    """The records of a run, and its weights."""
    lines: list[dict[str, Any]] = []
    network = train(one, callbacks=(lines.append,)).network
    return lines, [p.detach() for p in network.parameters()]


def scale_losses(monkeypatch: pytest.MonkeyPatch, factors: dict[int, float]) -> None:
    """Multiply the losses of some steps by a factor that stands in the batch, where a graph reads it."""
    original_batch, original_loss = LanguageData.batch, LanguageObjective.loss_with_cache

    def batch(data, step, size, seed):
        factor_B = torch.full((size,), factors.get(step, 1.0))
        return Batch({**original_batch(data, step, size, seed).tensors, "factor_B": factor_B})

    def loss_with_cache(objective, network, batch, kernel, cache):
        factor = batch["factor_B"].mean()
        rest = Batch({name: x for name, x in batch.tensors.items() if name != "factor_B"})
        loss, cache = original_loss(objective, network, rest, kernel, cache)
        return loss * factor, cache

    monkeypatch.setattr(LanguageData, "batch", batch)
    monkeypatch.setattr(LanguageObjective, "loss_with_cache", loss_with_cache)


def distance(one: list[torch.Tensor], two: list[torch.Tensor]) -> float:
    """How far weights are from others, as a share of their norm."""
    change = torch.nn.utils.get_total_norm([a - b for a, b in zip(one, two, strict=True)])
    return float(change / torch.nn.utils.get_total_norm(one))


@pytest.mark.parametrize("settings", [("optim.ema=0.9",), ("optim.name=muon",)], ids=["adamw", "muon"])
def test_the_graph_of_a_whole_step_skips_and_updates_as_steps_without_it(monkeypatch, settings):
    """A batch of NaN in step 8 and a spike in step 26 are skipped. Learning rates are rounded to float32 in a graph: the losses
    differ by less than 1e-3, the weights by less than a hundredth of what they have changed."""
    scale_losses(monkeypatch, {7: math.nan, 25: 1000.0})
    one = recipe("byte-language", "model.dropout=0.0", "run.steps=30", *settings)
    runs = {mode: trained(override(one, [f"run.compile={mode}"])) for mode in ("no", "yes", "graphs")}
    skips = [[(line["step"], line["skipped_steps"], line["reason"].split(" ")[:3]) for line in lines if line["kind"] == "skip"]
             for lines, _ in runs.values()]  # fmt: skip
    assert [(step, count) for step, count, _ in skips[0]] == [(8, 1), (26, 2)] and skips[0] == skips[1] == skips[2]
    losses = [[line["loss"] for line in lines if line["kind"] == "step"] for lines, _ in runs.values()]
    assert [len(one) for one in losses] == [30] * 3
    assert losses[2] == pytest.approx(losses[1], rel=1e-3, nan_ok=True)
    assert losses[2] == pytest.approx(losses[0], rel=1e-3, nan_ok=True)
    torch.manual_seed(0)
    start = trained(override(one, ["run.steps=1", "optim.lr=1e-12", "optim.muon_lr=1e-12", "optim.ema=0"]))[1]
    assert distance(runs["graphs"][1], runs["yes"][1]) < 0.01 * distance(start, runs["yes"][1])


@pytest.mark.parametrize(
    "member, settings",
    [
        ("byte-language", ["model.dropout=0.1"]),
        ("byte-language", ["run.accumulate=2", "run.batch_schedule=[[5, 6]]", "optim.ema=0.9"]),
        ("gpt2", ["run.precision=bf16"]),
    ],
)
def test_training_with_cuda_graphs_equals_training_without(member, settings):
    one = recipe(member, *settings, "run.steps=12")
    plain, recorded = (
        [line["loss"] for line in trained(override(one, [f"run.compile={mode}"]))[0] if line["kind"] == "step"]
        for mode in ("yes", "graphs")
    )
    assert len(plain) == 12 and recorded == pytest.approx(plain, rel=1e-4)


SYNCHRONIZES = """
import torch
from everyformer.task.batch import Batch
from everyformer.train.cuda_graphs import WARMUP_STEPS, CudaGraphs

captured = CudaGraphs(lambda batch, count: batch["x_B"] * float(batch["x_B"].sum()), torch.device("cuda"))
for step in range(WARMUP_STEPS):
    captured(Batch({"x_B": torch.ones(3)}), 1)
print("warm")
captured(Batch({"x_B": torch.ones(3)}), 1)
"""


def test_a_step_that_cannot_be_captured_raises():
    """In a process of its own, because a failed capture leaves its random generator unusable."""
    process = subprocess.run([sys.executable, "-c", SYNCHRONIZES], capture_output=True, text=True)
    assert process.stdout == "warm\n"
    assert re.search(r"ValueError: .*could not capture a step .* use run.compile=yes", process.stderr)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_steps_in_flight_change_no_record(monkeypatch, precision):
    """Also with the gradient scale of fp16, which a batch of NaN halves."""
    scale_losses(monkeypatch, {7: math.nan, 25: 1000.0})
    one, runs = recipe("byte-language", "run.compile=no", f"run.precision={precision}", "run.steps=30"), []
    for ahead in (0, 2):
        monkeypatch.setattr(loop, "steps_ahead", lambda device, ahead=ahead: ahead)
        runs.append([line for line in trained(one)[0] if line["kind"] in ("step", "skip")])
    waits, flies = runs
    assert [(line["kind"], line["step"]) for line in waits] == [(line["kind"], line["step"]) for line in flies]
    assert {8, 26} <= {line["step"] for line in flies if line["kind"] == "skip"}
    losses = [[line["loss"] for line in lines if line["kind"] == "step"] for lines in runs]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3, nan_ok=True)


def test_the_check_of_a_step_is_that_of_a_cpu_to_the_last_bit():
    checks = [StepCheck(device, True) for device in (CUDA, torch.device("cpu"))]
    for check in checks:
        check.load(GradientWatch(patience=9))
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        loss, norm = torch.rand(2, generator=generator).exp() * (100 if step in (30, 60) else 1)
        for check in checks:
            check.check(
                (loss * (math.nan if step == 50 else 1)).to(check.numbers.device), norm.to(check.numbers.device)
            )
        assert str(checks[0].numbers.tolist()) == str(checks[1].numbers.tolist())  # NaN is not equal to itself
    assert checks[0].numbers[-1] == 3


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("capture_on", [None, CUDA], ids=["numbers", "tensors"])
def test_a_skipped_step_changes_no_weight_and_no_state(name, capture_on):
    found = []
    for skips in ((0.0, 0.0), (0.0, 1.0, 0.0)):
        torch.manual_seed(0)
        network = build("byte-language", "tiny", layers=1).to(CUDA)
        trained, random = optimizers(network, Optim(name=name), capture_on), torch.Generator(CUDA).manual_seed(0)
        for skip in skips:
            set_lr(trained, 0.5)
            for p in network.parameters():
                noise = torch.randn(p.shape, generator=random, device=CUDA) if not skip else torch.tensor(math.nan)
                p.grad = noise.to(CUDA).expand_as(p).clone()
            for optimizer in trained:
                optimizer.found_inf = torch.tensor(skip, device=CUDA)
                optimizer.step()
        states = [state for one in trained for state in one.state.values()]
        found.append([*network.parameters(), *(x for state in states for x in state.values())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_batches_that_are_drawn_ahead_are_those_of_the_host():
    one = recipe("byte-language", "run.steps=50")
    data = one.task.open(None)
    data.fit(data.adapt(one.value(data.member_settings())))
    ahead, here = Batches(data, one.run, World(device=CUDA), 2), Batches(data, one.run, World(), 0)
    for step in range(50):
        rows = ahead.take(step).rows
        assert rows["token_BT"].device.type == "cuda"
        assert torch.equal(rows["token_BT"].cpu(), here.take(step).rows["token_BT"])
    ahead.close()
