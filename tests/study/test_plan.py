"""A plan equals what a real run then takes: parameters, operations and checkpoints exactly, memory within a few percent."""

from __future__ import annotations

import dataclasses
from copy import copy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import everyformer
from bench.plan_memory import allocated_peak
from everyformer import Layer, Sublayer, SublayerModule, Value
from everyformer.study import plan as plans
from everyformer.study.cost import FREED, CostCounter
from everyformer.study.plan import plan
from everyformer.task.table import TASKS, task_for
from everyformer.task.task import TaskData
from everyformer.train import checkpoint
from everyformer.train.distributed import World
from everyformer.train.folder import write_run
from everyformer.train.loop import Loop
from everyformer.train.recipe import Recipe, Run, override
from everyformer.train.record import Records

CPU, STEPS = torch.device("cpu"), 2
OPEN = {kind: kind.open for kind in TASKS.values()}
RUNS = [
    ("gpt2", []),
    ("gpt2", ["model.layers=5", "run.checkpoint_segments=2", "model.dropout=0"]),
    ("gpt2", ["run.accumulate=3", "run.batch_schedule=[[1, 12]]", "model.layers=1"]),
    ("gpt2", ["task.context=64", "task.context_schedule=[[0, 8], [1, 64]]", "model.layers=1"]),
    ("gpt2", ["run.precision=bf16", "run.accumulate=2", "run.checkpoint_segments=2", "model.dropout=0"]),
    ("gpt2", ["optim.name=muon", "optim.ema=0.9", "optim.clip=0"]),
    ("byte-language", ["run.precision=bf16"]),
    ("byte-language", ["run.kernel=blocked"]),
    ("bert", ["run.precision=bf16", "run.checkpoint_segments=1", "run.accumulate=2", "model.layers=1"]),
    ("byte-classifier", ["model.layers=1"]),
    ("transformer", ["run.precision=bf16", "run.checkpoint_segments=2"]),
    ("vit", ["task.kind=images", "model.layers=1"]),
    ("gtrxl", ["model.layers=1", "model.memory=32"]),
    ("adaptive-span", ["model.layers=1", "model.initial_span=0.6", "model.dropout=0"]),
    ("act-rnn", ["model.width=16"]),
]


def recipe(member: str, *settings: str) -> Recipe:
    run = Run(steps=STEPS, batch=4, device="cpu", evaluate=0, save=0)
    return override(Recipe(member=member, size="tiny", task=task_for(member, "tiny"), run=run), settings)


@pytest.fixture(autouse=True)
def tokenizers_are_made_once(monkeypatch):
    """Making one takes longer than a plan."""
    for kind in TASKS.values():
        monkeypatch.setattr(kind, "open", lambda task, data, folder=None: copy(open_once(task, data)))


@cache
def open_once(task: Any, data: str | None) -> TaskData:
    return OPEN[type(task)](task, data)


def opened(one: Recipe) -> TaskData:
    return one.task.open(one.data)


def begin(one: Recipe, folder: Path | None = None) -> Loop:
    data = opened(one)
    return Loop(one, data, data.adapt(one.value(data.member_settings())), folder, World(device=CPU), ())


@pytest.mark.spec(131, 132)
@pytest.mark.parametrize("member, settings", RUNS, ids=str)
def test_memory_and_operations_equal_those_of_real_steps(member, settings):
    one = recipe(member, *settings)
    planned, flops = plan(one), []
    with CostCounter(CPU) as real:
        loop = begin(one)
        for step in range(STEPS + 1):  # in the third the memory is full, and the optimizer has its state
            real.flops = 0
            loop._step(step, Records(None))
            flops.append(real.flops)
    assert abs(planned.tensors / real.peak - 1) < 0.015  # texts of other batches have other lengths
    assert planned.parameters == sum(p.numel() for p in loop.learner.network.parameters())
    assert planned.flops in flops  # the masked tokens of other batches are fewer or more
    assert planned.flops > 0.95 * max(flops)
    assert planned.fits and planned.changes == ()


@pytest.mark.parametrize("checkpoint_segments", [0, 3])
def test_operations_equal_the_formula(checkpoint_segments):
    """Kaplan et al. 2020: 6 for each weight of a matrix and token, and attention: 2 products forward, 5 backward."""
    layers, width, context, vocabulary, batch = 3, 64, 32, 256, 4
    settings = [f"model.layers={layers}", f"model.width={width}", f"task.context={context}", "model.dropout=0"]
    planned = plan(recipe("gpt2", *settings, f"run.checkpoint_segments={checkpoint_segments}"))
    weights, tokens = 12 * layers * width**2, batch * context
    attention = 2 * batch * layers * context**2 * width  # one product: queries by keys, or weights by values
    # The layers run forward once more, except the last product of a segment: nothing needs its output.
    again = 2 * weights * tokens * 2 // 3 + 2 * attention if checkpoint_segments else 0
    assert planned.flops == 6 * (weights + vocabulary * width) * tokens + 7 * attention + again
    assert planned.run_flops == planned.flops * STEPS and planned.targets == tokens


@pytest.mark.parametrize("member, settings", [("gpt2", ["optim.name=muon", "optim.ema=0.9"]), ("transformer", [])])
def test_a_checkpoint_has_the_planned_size(member, settings, tmp_path):
    one = recipe(member, *settings, "run.batch=2", "model.layers=1")
    loop = begin(one, tmp_path)
    write_run(one, loop.task.data, loop.model, tmp_path)
    loop._step(0, Records(None))
    loop._save(1, Records(None))
    files = checkpoint.path_of(tmp_path, 1).glob("*.safetensors")
    assert plan(one).checkpoint == sum(x.numel() * x.element_size() for file in files for x in load_file(file).values())


@pytest.mark.spec(131)
@pytest.mark.parametrize("member, settings", [RUNS[0], RUNS[5], RUNS[9]], ids=str)
def test_tensor_memory_is_within_ten_percent_of_what_the_allocator_hands_out(member, settings):
    """Measured by torch.profiler, which also sees what kernels allocate while they run."""
    one = recipe(member, *settings, "run.batch=32")

    def steps() -> None:
        loop = begin(one)
        for step in range(STEPS):
            loop._step(step, Records(None))

    assert abs(plan(one).tensors / allocated_peak(steps) - 1) < 0.1


def test_the_process_holds_data_that_are_read_at_their_first_use(monkeypatch):
    one = recipe("transformer")
    work = one.task.open(one.data, None)
    monkeypatch.setattr(type(one.task), "open", lambda *arguments: work)
    monkeypatch.setattr(plans, "_process_memory", lambda device: len(work.encoded))
    assert plan(one).process == 1  # one split: training


def test_masks_larger_than_the_machine_are_planned():
    at = torch.arange(2**14)
    with CostCounter(CPU, fake=True) as cost:
        seen_BQK = at[:, None] <= at.expand(2**12, 1, -1)
    assert seen_BQK.shape == (2**12, 2**14, 2**14) and cost.peak >= seen_BQK.numel()


def test_a_safe_softmax_holds_a_plain_one_and_its_mask_beside_its_output():
    x = torch.zeros(64, 32)
    with CostCounter(CPU) as cost:
        torch.ops.aten._safe_softmax(x, -1)
    assert cost.peak == x.nbytes + (x.nbytes + x.numel()) and cost.live == 0


@pytest.mark.parametrize(
    "member, text",
    [
        ("adaptive-span", "spans of 6, at most 64; training may"),
        ("act-rnn", "2 steps on an input, at most 3; training may"),
        ("gpt2", ""),
    ],
)
def test_learned_sizes_are_reported_as_initial(member, text):
    assert text in str(planned := plan(recipe(member))) and bool(planned.grows) == bool(text)


def test_planned_steps_do_not_change_weights():
    """A network that learned to ponder longer would take more than planned."""
    one = recipe("act-rnn", "model.width=16", "optim.decay=0.1")
    loop = begin(one)
    learner = loop.learner
    before = [p.detach().clone() for p in learner.network.parameters()]
    batch = plans._largest(one, loop.task.data)
    plans._step(learner, batch, loop.task.data.count(batch))
    assert all(torch.equal(a, b) for a, b in zip(before, learner.network.parameters(), strict=True))


def test_real_steps_give_time_and_memory():
    planned = plan(recipe("gpt2"), measure=True)
    assert planned.seconds is not None and 0 < planned.seconds < 60
    assert planned.measured is not None and abs(planned.tensors / planned.measured - 1) < 0.1
    assert "s per step" in str(planned)


def test_the_process_is_reported_apart_from_the_tensors(monkeypatch):
    monkeypatch.setattr(plans, "_process_memory", lambda device: 3 << 30)
    planned = plan(recipe("gpt2", "model.layers=1"), limit=4 << 30)
    assert (
        planned.fits and planned.memory == planned.tensors + (3 << 30) and "and 3 GiB for the process" in str(planned)
    )


@pytest.mark.parametrize("max_seconds, wanted", [(0.0, 3), (60.0, 6)])
def test_long_steps_are_not_repeated(max_seconds, wanted, monkeypatch):
    planned, taken = plan(recipe("gpt2", "model.layers=1")), []

    def step(*arguments):
        taken.append(arguments)
        return torch.zeros(())

    monkeypatch.setattr(plans, "MAX_SECONDS", max_seconds)
    monkeypatch.setattr(plans, "_step", step)
    plans._measure(planned, planned.recipe.task.open(None, None), torch.device("cpu"))
    assert len(taken) == wanted


def test_planning_does_not_change_the_random_state():
    torch.manual_seed(0)
    wanted = torch.rand(3)
    torch.manual_seed(0)
    plan(recipe("gpt2"))
    assert torch.equal(torch.rand(3), wanted)


@pytest.fixture
def no_process_memory(monkeypatch):
    """Limits are for tensors only: what the process holds changes from test to test."""
    monkeypatch.setattr(plans, "_process_memory", lambda device: 0)


def names(changes: tuple[str, ...] | None) -> list[str]:
    assert changes is not None
    return [change.partition("=")[0] for change in changes]


@pytest.mark.spec(130, 131, 132)
def test_the_mildest_settings_that_fit_are_proposed(no_process_memory, monkeypatch):
    """With less and less memory: the batch in pieces, recomputed activations, bf16, a smaller model, nothing."""
    one, real = recipe("gpt2", "model.layers=4"), plans.count_steps

    def peak(changed: Recipe) -> int:
        """A simple model of memory: weights, and the saved activations of one piece."""
        run, layers, width = changed.run, changed.model["layers"], changed.model.get("width", 64)
        kept = width * (1 if run.checkpoint_segments else layers) // (2 if run.precision == "bf16" else 1)
        return layers * width + -(-run.batch // run.accumulate) * kept

    def steps(changed: Recipe, *rest: Any, pieces: int | None = None, fake: bool = True) -> Any:
        return real(changed, *rest) if pieces is None else (SimpleNamespace(peak=peak(changed)),)

    monkeypatch.setattr(plans, "count_steps", steps)
    monkeypatch.setattr(plans, "_weight_bytes", lambda *_: 0)
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
    assert limit < 64 and "no setting that was tried fits" in str(dataclasses.replace(planned, changes=None))
    assert stages == [
        [],
        ["run.checkpoint_segments"],
        ["run.checkpoint_segments", "run.precision"],
        ["run.checkpoint_segments", "run.precision", "model.layers"],
        ["run.checkpoint_segments", "run.precision", "model.layers", "model.width"],
    ]


def test_no_more_pieces_are_proposed_than_accumulation_takes(no_process_memory, monkeypatch):
    one, proposed = recipe("gpt2", "model.layers=1"), list[int]()
    planned, data = plan(one), opened(one)

    def steps(changed: Recipe, *rest: Any, **options: Any) -> Any:
        proposed.append(changed.run.accumulate)
        return (SimpleNamespace(peak=1 << 50),)

    monkeypatch.setattr(plans, "count_steps", steps)
    large = dataclasses.replace(planned, recipe=override(one, ["run.batch=100000"]))
    assert plans._first_that_fits(large, data, CPU) is None and max(proposed) == 65536


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_weights_alone_need_less_than_a_step(name):
    one = recipe("gpt2", f"optim.name={name}", "run.batch=1", "task.context=8")
    assert 0.5 < plans._weight_bytes(one, opened(one)) / plan(one).tensors < 1


def test_proposed_settings_fit_when_they_are_planned(no_process_memory):
    one = recipe("gpt2", "model.layers=1")
    whole = plan(one).tensors
    assert plan(one, limit=whole).changes == ()
    planned = plan(one, limit=whole - 1)
    assert not planned.fits and planned.changes == ("run.accumulate=2",) and str(planned).endswith("run.accumulate=2")
    assert plan(override(one, planned.changes)).tensors < whole


@pytest.mark.parametrize(
    "settings, limit, remedy",
    [
        ([], 0, "1 or more"),
        (["run.batch=99999999"], None, "lower run.batch"),
        (["run.accumulate=9"], None, "9 pieces; raise it, or lower run.accumulate"),
        (["run.precision=fp16"], None, "use bf16 or fp32"),
        (["task.context=9999999"], None, "lower task.context"),
    ],
    ids=str,
)
def test_bad_values_raise_with_a_remedy(settings, limit, remedy):
    with pytest.raises(ValueError, match=remedy):
        plan(recipe("gpt2", *settings), limit=limit)


# The counter itself, on sums that can be done by hand.


def work(device: torch.device) -> None:
    x_BT = torch.ones(10, 100, device=device)  # 4,000 bytes
    layer = nn.Linear(100, 50, bias=False, device=device)  # 20,000
    y_BT = layer(x_BT)  # 2,000
    view = y_BT[:5].T  # the same storage
    del x_BT  # kept for the backward pass
    z_BT = F.relu(y_BT)  # 2,000, kept
    del y_BT, view  # freed: relu saves its own output
    z_BT.sum().backward()


@pytest.mark.parametrize("fake", [False, True])
def test_the_counter_counts_bytes_and_operations(fake):
    with CostCounter(CPU, fake) as cost:
        work(CPU)
    # At the peak: input, weight, its gradient, z, the gradient of y; and two single numbers, the sum and its gradient.
    assert cost.peak == 4_000 + 20_000 + 20_000 + 2_000 + 2_000 + 2 * 4
    assert cost.flops == 2 * 2 * 10 * 100 * 50  # the product, and the weight's gradient; the input has none
    assert not cost.storages  # all are freed


def test_what_a_step_leaves_is_alive_in_the_next():
    cost = CostCounter(CPU)
    cost.events = [
        (0, 100),
        (1, 50),
        (1, FREED),
        (2, 7),
    ]  # weights; then a step: an activation, an optimizer's state
    assert cost.peak == 150
    cost.repeat_since(1)
    assert cost.peak == 157 and cost.events[4:] == [(1, 50), (1, FREED)]


@pytest.mark.parametrize("widens_bf16", [False, True])
def test_a_bf16_product_is_computed_in_float32_where_the_cpu_has_no_bf16(widens_bf16):
    x_RD = torch.ones(10, 20, dtype=torch.bfloat16)
    with CostCounter(CPU) as cost:
        cost.widens_bf16 = widens_bf16
        x_RD @ x_RD.T
    assert cost.peak == 2 * 10 * 10 + 2 * 10 * 20 + (4 * 10 * 10 + 128 if widens_bf16 else 0)


class ReadsValuesModule(SublayerModule):
    """What fake tensors cannot run: the values of the input decide."""

    def __init__(self, width, fails):
        super().__init__()
        self.scale, self.fails = nn.Parameter(torch.ones(width)), fails

    def forward(self, x_BTD, context, entry=None):
        scaled = x_BTD * self.scale if float(x_BTD.detach().abs().sum()) >= 0 else x_BTD
        return (scaled[..., :3] if self.fails else scaled), None


class ReadsValues(Sublayer, Value, frozen=True):
    fails: bool = False

    def build(self, width):
        return ReadsValuesModule(width, self.fails)


def own_recipe(fails):
    value: Any = everyformer.member("gpt2", "tiny")
    layer = Layer((*value.body.layers[0].sublayers, ReadsValues(fails)))
    model = replace(value, body=replace(value.body, layers=(layer,)))
    return Recipe.of(model, "run.batch=2", "run.device=cpu", "task.valid=0.002")


def test_a_model_that_cannot_be_traced_is_counted_on_real_steps():
    planned, plain = plan(own_recipe(False)), plan(recipe("gpt2", "run.batch=2"))
    assert "cannot run on fake tensors (DataDependentOutputException" in planned.untraced
    assert planned.flops == plain.flops and planned.parameters == plain.parameters + 2 * 3 * 64
    assert "untraced" in str(planned) and planned.tensors >= plain.tensors
    assert plan(own_recipe(False), limit=1 << 24).changes is None


def test_a_model_whose_step_fails_is_reported_in_one_sentence():
    with pytest.raises(ValueError, match=r"a training step of this model fails \(RuntimeError: .*\); correct the part"):
        plan(own_recipe(True))
