"""The plan is what is then measured: parameters, operations and checkpoints to the last one, memory to a few percent."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from copy import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

from everyformer.study import malloc
from everyformer.study import plan as plans
from everyformer.study.plan import plan
from everyformer.study.tally import Tally
from everyformer.task.table import TASKS, task_for
from everyformer.task.task import TaskData
from everyformer.train import checkpoint
from everyformer.train.distributed import World
from everyformer.train.loop import Loop
from everyformer.train.recipe import Recipe, Run, override
from everyformer.train.record import Records

CPU, STEPS = torch.device("cpu"), 2
OPEN = {kind: kind.open for kind in TASKS.values()}
RUNS = [
    ("gpt2", []),
    ("gpt2", ["model.layers=5", "run.checkpoint_segments=2", "model.dropout=0"]),
    ("gpt2", ["run.accumulate=3", "run.batch_schedule=[[1, 12]]", "model.layers=1"]),
    ("gpt2", ["run.precision=bf16", "run.accumulate=2", "run.checkpoint_segments=2", "model.dropout=0"]),
    ("gpt2", ["optim.name=muon", "optim.ema=0.9", "optim.clip=0"]),
    ("byte-language", ["run.precision=bf16"]),
    ("byte-language", ["run.kernel=blocked"]),
    ("bert", ["run.precision=bf16", "run.checkpoint_segments=1", "run.accumulate=2", "model.layers=1"]),
    ("byte-classifier", ["model.layers=1"]),
    ("transformer", ["run.precision=bf16", "run.checkpoint_segments=2"]),
    ("vit", ["task.kind=images", "model.layers=1"]),
    ("gtrxl", ["model.layers=1", "model.memory=32"]),
    ("adaptive-span", ["model.layers=1", "model.start=0.6", "model.dropout=0"]),
    ("act-rnn", ["model.width=16"]),
]


def recipe(member: str, *settings: str) -> Recipe:
    run = Run(steps=STEPS, batch=4, device="cpu", evaluate=0, save=0)
    return override(Recipe(member=member, size="tiny", task=task_for(member, "tiny"), run=run), settings)


@pytest.fixture(autouse=True)
def what_takes_longer_than_a_plan(monkeypatch):
    """Tokenizers are made once, and the C library is not asked what it keeps: its own tests do that."""
    monkeypatch.setattr(malloc, "resident", lambda events: 0)
    for kind in TASKS.values():
        monkeypatch.setattr(kind, "open", lambda task, data, context, folder=None: copy(known(task, data, context)))


@cache
def known(task: Any, data: str | None, context: int | None) -> TaskData:
    return OPEN[type(task)](task, data, context, None)


def opened(one: Recipe) -> TaskData:
    return one.task.open(one.data, one.model.get("context"), None)


def begin(one: Recipe, folder: Path | None = None) -> Loop:
    data = opened(one)
    return Loop(one, data, data.adapt(one.value(data.member_settings())), folder, World(device=CPU), ())


@pytest.mark.spec(131, 132)
@pytest.mark.parametrize("member, settings", RUNS, ids=str)
def test_memory_and_operations_are_those_of_the_real_steps(member, settings):
    one = recipe(member, *settings)
    found, flops = plan(one), []
    with Tally(CPU) as real:
        loop = begin(one)
        for step in range(STEPS + 1):  # in the third a memory is full, and there is an optimizer's state
            real.flops = 0
            loop._step(step, Records(None))
            flops.append(real.flops)
    assert abs(found.tensors / real.peak - 1) < 0.015  # a shade of it is the other lengths of other batches
    assert found.parameters == sum(p.numel() for p in loop.learner.network.parameters())
    assert found.flops == max(flops)
    assert found.fits and found.changes == ()


@pytest.mark.parametrize("checkpoint_segments", [0, 3])
def test_operations_are_those_of_the_formula(checkpoint_segments):
    """Kaplan et al. 2020: 6 for each weight of a matrix and token, and attention: 2 products forward, 5 backward."""
    layers, width, context, vocabulary, batch = 3, 64, 32, 256, 4
    settings = [f"model.layers={layers}", f"model.width={width}", f"model.context={context}", "model.dropout=0"]
    found = plan(recipe("gpt2", *settings, f"run.checkpoint_segments={checkpoint_segments}"))
    weights, tokens = 12 * layers * width**2, batch * context
    attention = 2 * batch * layers * context**2 * width  # of one product of queries and keys, or weights and values
    # The layers forward once more, but for the last product of a section: nothing needs its answer.
    again = 2 * weights * tokens * 2 // 3 + 2 * attention if checkpoint_segments else 0
    assert found.flops == 6 * (weights + vocabulary * width) * tokens + 7 * attention + again
    assert found.run_flops == found.flops * STEPS and found.targets == tokens


@pytest.mark.parametrize("member, settings", [("gpt2", ["optim.name=muon", "optim.ema=0.9"]), ("transformer", [])])
def test_a_checkpoint_has_the_planned_bytes(member, settings, tmp_path):
    one = recipe(member, *settings, "run.batch=2", "model.layers=1")
    loop = begin(one, tmp_path)
    loop._step(0, Records(None))
    loop._save(1, Records(None))
    files = checkpoint.path_of(tmp_path, 1).glob("*.safetensors")
    assert plan(one).checkpoint == sum(x.numel() * x.element_size() for file in files for x in load_file(file).values())


SCRIPT = """
from everyformer.study import plan as plans
from everyformer.task.table import task_for
from everyformer.train.recipe import Recipe, Run
plans.MEASURED = 2
member, run = "byte-language", Run(batch=256, device="cpu")
one = Recipe(member=member, size="tiny", task=task_for(member, "tiny"), run=run)
found = plans.plan(one, measure=True)
print(found.memory / found.measured)
"""


@pytest.mark.spec(131)
def test_the_resident_memory_of_a_process_is_the_planned():
    """Measured by the system, in a process of its own."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", SCRIPT]
    assert 0.9 < float(subprocess.check_output(command, env=environment | {"OMP_NUM_THREADS": "1"})) < 1.1


def test_data_that_wait_for_their_first_use_are_held_by_the_process(monkeypatch):
    one = recipe("transformer")
    data = one.task.open(one.data, None)
    monkeypatch.setattr(type(one.task), "open", lambda *given: data)
    monkeypatch.setattr(plans, "_held", lambda device: len(data.encoded))
    assert plan(one).process == 1  # of the splits that of training


def test_masks_larger_than_the_machine_are_imagined():
    at = torch.arange(2**14)
    with Tally(CPU, imagined=True) as tally:
        seen_BQK = at[:, None] <= at.expand(2**12, 1, -1)
    assert seen_BQK.shape == (2**12, 2**14, 2**14) and tally.peak >= seen_BQK.numel()


def test_a_safe_softmax_holds_a_plain_one_and_its_mask_beside_its_answer():
    x = torch.zeros(64, 32)
    with Tally(CPU) as tally:
        torch.ops.aten._safe_softmax(x, -1)
    assert tally.peak == x.nbytes + (x.nbytes + x.numel()) and tally.live == 0


def test_what_the_c_library_keeps_is_part_of_the_plan(nothing_besides, monkeypatch):
    monkeypatch.setattr(malloc, "resident", lambda events: 3 << 30)
    found = plan(recipe("gpt2", "model.layers=1"), limit=3 << 30)
    assert found.fits and found.memory == 3 << 30 and "freed but kept" in str(found)


@pytest.mark.parametrize(
    "member, told",
    [
        ("adaptive-span", "spans of 6, at most 64; what"),
        ("act-rnn", "2 steps on an input, at most 3; what"),
        ("gpt2", ""),
    ],
)
def test_what_is_learned_and_takes_memory_is_told(member, told):
    assert told in str(found := plan(recipe(member))) and bool(found.grows) == bool(told)


def test_planned_steps_move_no_weights():
    """A net that ponders longer after a few of them would not be the planned one."""
    one = recipe("act-rnn", "model.width=16", "optim.decay=0.1")
    loop = begin(one)
    learner = loop.learner
    before = [p.detach().clone() for p in learner.network.parameters()]
    batch = plans._largest(one, loop.task.data)
    plans._step(learner, batch, loop.task.data.count(batch))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.network.parameters(), strict=True))


def test_real_steps_give_time_and_memory():
    found = plan(recipe("gpt2"), measure=True)
    assert found.seconds is not None and 0 < found.seconds < 60
    assert found.measured is not None and found.measured >= found.process
    assert "s a step" in str(found)


@pytest.mark.parametrize("enough, wanted", [(0.0, 2), (60.0, 5)])
def test_steps_that_take_long_are_not_repeated(enough, wanted, monkeypatch):
    found, taken = plan(recipe("gpt2", "model.layers=1")), []

    def step(*given):
        taken.append(given)
        return torch.zeros(())

    monkeypatch.setattr(plans, "ENOUGH", enough)
    monkeypatch.setattr(plans, "_step", step)
    plans._measure(found, found.recipe.task.open(None, None), torch.device("cpu"))
    assert len(taken) == wanted


def test_planning_leaves_the_random_numbers_alone():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    plan(recipe("gpt2"))
    assert torch.equal(torch.rand(3), wanted)


@pytest.fixture
def nothing_besides(monkeypatch):
    """Limits of tensors alone: what the process holds changes from test to test."""
    monkeypatch.setattr(plans, "_held", lambda device: 0)


def names(changes: tuple[str, ...] | None) -> list[str]:
    assert changes is not None
    return [change.partition("=")[0] for change in changes]


@pytest.mark.spec(130, 131, 132)
def test_what_does_not_fit_is_told_the_mildest_settings_that_do(nothing_besides, monkeypatch):
    """As there is less and less memory: the batch in pieces, recomputed activations, bf16, a smaller model, nothing."""
    one, real = recipe("gpt2", "model.layers=4"), plans._walk

    def peak(changed: Recipe) -> int:
        """A simple model of memory: weights, and activations of a piece and of the layers that are kept."""
        run, layers, width = changed.run, changed.model["layers"], changed.model.get("width", 64)
        kept = width * (1 if run.checkpoint_segments else layers) // (2 if run.precision == "bf16" else 1)
        return layers * width + -(-run.batch // run.accumulate) * kept

    def walk(changed: Recipe, *rest: Any, pieces: int | None = None) -> Any:
        return real(changed, *rest) if pieces is None else (SimpleNamespace(peak=peak(changed), device=CPU, events=[]),)

    monkeypatch.setattr(plans, "_walk", walk)
    monkeypatch.setattr(plans, "_least", lambda *_: 0)
    planned, stages = plan(one), list[list[str]]()
    for limit in range(peak(one) - 1, 0, -16):
        changes = plans._first_that_fits(dataclasses.replace(planned, limit=limit), opened(one), CPU)
        if changes is None:
            break
        changed = override(one, changes)
        assert peak(changed) <= limit
        if changed.run.accumulate > 1:  # fewer pieces would not do
            assert peak(override(changed, [f"run.accumulate={changed.run.accumulate // 2}"])) > limit
        names = [change.partition("=")[0] for change in changes if not change.startswith("run.accumulate")]
        stages += [names] if names not in stages else []
    assert limit < 64 and "nothing tried fits" in str(dataclasses.replace(planned, changes=None))
    assert stages == [
        [],
        ["run.checkpoint_segments"],
        ["run.checkpoint_segments", "run.precision"],
        ["run.checkpoint_segments", "run.precision", "model.layers"],
        ["run.checkpoint_segments", "run.precision", "model.layers", "model.width"],
    ]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_what_weights_need_at_the_least_is_less_than_what_a_step_needs(name):
    one = recipe("gpt2", f"optim.name={name}", "run.batch=1", "model.context=8")
    assert 0.5 < plans._least(one, opened(one)) / plan(one).tensors < 1


def test_what_is_told_fits_when_it_is_planned(nothing_besides):
    one = recipe("gpt2", "model.layers=1")
    whole = plan(one).tensors
    assert plan(one, limit=whole).changes == ()
    found = plan(one, limit=whole - 1)
    assert not found.fits and found.changes == ("run.accumulate=2",) and str(found).endswith("run.accumulate=2")
    assert plan(override(one, found.changes)).tensors < whole


@pytest.mark.parametrize(
    "settings, limit, remedy",
    [
        ([], 0, "1 or more"),
        (["run.batch=99999999"], None, "lower run.batch"),
        (["run.accumulate=9"], None, "9 pieces; raise it, or lower run.accumulate"),
        (["run.precision=fp16"], None, "use bf16 or fp32"),
        (["model.context=9999999"], None, "lower model.context"),
    ],
    ids=str,
)
def test_bad_values_are_refused_with_the_remedy(settings, limit, remedy):
    with pytest.raises(ValueError, match=remedy):
        plan(recipe("gpt2", *settings), limit=limit)


# The tally itself, on sums that can be done by hand.


def work(device: torch.device) -> None:
    x_BT = torch.ones(10, 100, device=device)  # 4,000 bytes
    layer = nn.Linear(100, 50, bias=False, device=device)  # 20,000
    y_BT = layer(x_BT)  # 2,000
    view = y_BT[:5].T  # the same storage
    del x_BT  # kept for the backward pass
    z_BT = F.relu(y_BT)  # 2,000, kept
    del y_BT, view  # let go: its relu keeps its own answer
    z_BT.sum().backward()


@pytest.mark.parametrize("imagined", [False, True])
def test_a_tally_counts_bytes_and_operations(imagined):
    with Tally(CPU, imagined) as tally:
        work(CPU)
    # At the peak: input, weight, its gradient, z, the gradient of y; and two single numbers, the sum and its gradient.
    assert tally.peak == 4_000 + 20_000 + 20_000 + 2_000 + 2_000 + 2 * 4
    assert tally.flops == 2 * 2 * 10 * 100 * 50  # the product, and the weight's gradient; the input has none
    assert not tally.known  # nothing is left


def test_what_a_step_leaves_is_there_in_the_next():
    tally = Tally(CPU)
    tally.events = [
        (0, 100),
        (1, 50),
        (1, malloc.FREED),
        (2, 7),
    ]  # weights; then a step: an activation, an optimizer's state
    assert tally.peak == 150
    tally.repeat(1, times=2)
    assert tally.peak == 157 and tally.events[4:] == 2 * [(1, 50), (1, malloc.FREED)]


@pytest.mark.parametrize("widens", [False, True])
def test_a_product_of_bf16_is_made_in_float32_where_the_cpu_has_none(widens):
    x_RD = torch.ones(10, 20, dtype=torch.bfloat16)
    with Tally(CPU) as tally:
        tally.widens = widens
        x_RD @ x_RD.T
    assert tally.peak == 2 * 10 * 10 + 2 * 10 * 20 + (4 * 10 * 10 + 128 if widens else 0)
