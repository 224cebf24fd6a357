"""Steps in flight: a run whose host is ahead of its device has the weights and the records of one that waits."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch

from everyformer.task.language import Language, LanguageData, LanguageObjective
from everyformer.train import checkpoint, learner, loop
from everyformer.train.distributed import World
from everyformer.train.draw import Batches
from everyformer.train.gradient_watch import Unstable
from everyformer.train.in_flight import InFlight, Sent
from everyformer.train.loop import resume, train
from everyformer.train.optimizer import optimizers
from everyformer.train.recipe import Recipe, override
from everyformer.train.record import read
from tests.train.small import recipe, same, text

TIMES = {"seconds", "rate", "memory", "provenance"}


def records(folder):
    """The records of a run, without what a clock or a meter says."""
    lines = read(folder / "records.jsonl")
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


def broken_steps(monkeypatch, factors):
    """Multiply the loss of some of 30 steps by a factor."""
    original = LanguageObjective.loss_with_cache

    def broken(objective, network, batch, kernel, cache):
        loss, cache = original(objective, network, batch, kernel, cache)
        return loss * factors.get(round(objective.progress * 30), 1.0), cache

    monkeypatch.setattr(LanguageObjective, "loss_with_cache", broken)


@pytest.mark.spec(137)
@pytest.mark.parametrize("settings", [(), ("optim.name=muon", "run.evaluate=7")], ids=["adamw", "muon"])
def test_steps_in_flight_change_no_weight_and_no_record(tmp_path, monkeypatch, settings):
    """With a batch of NaN in step 5, a spike in step 25, and evaluations and checkpoints between."""
    broken_steps(monkeypatch, {4: float("nan"), 24: 1000.0})
    data, settings = text(tmp_path), ("run.steps=30", "optim.lr=1e-5", "run.save=4", "run.keep=30", *settings)
    for folder, ahead in (("waits", 0), ("ahead", 2)):
        monkeypatch.setattr(loop, "steps_ahead", lambda device, ahead=ahead: ahead)
        train(recipe(data, *settings), tmp_path / folder)
    one, two = tmp_path / "waits", tmp_path / "ahead"
    assert records(one) == records(two)
    skips = [(line["step"], line["reason"], line["skipped_steps"]) for line in records(two) if line["kind"] == "skip"]
    assert [(step, count) for step, _, count in skips] == [(5, 1), (25, 2)]
    assert skips[0][1] == "the loss is nan" and "gradient norm" in skips[1][1]
    assert checkpoint.steps(one) == checkpoint.steps(two) and 24 in checkpoint.steps(one)
    for step in checkpoint.steps(one):
        paths = [checkpoint.path_of(folder, step) for folder in (one, two)]
        assert same(*paths)
        states = [(path / "state.json").read_text() for path in paths]
        assert states[0] == states[1]
    train(recipe(data, *settings), tmp_path / "cut", until=26)
    resume(tmp_path / "cut")
    assert same(*(checkpoint.path_of(folder, 30) for folder in (one, tmp_path / "cut")))


@pytest.mark.spec(137)
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_skipped_step_leaves_the_weights_the_moments_and_the_ema(tmp_path, monkeypatch, ahead):
    broken_steps(monkeypatch, {4: float("nan"), 5: float("inf")})
    monkeypatch.setattr(loop, "steps_ahead", lambda device: ahead)
    settings = ("run.steps=30", "run.save=1", "run.keep=30", "run.evaluate=0", "optim.name=muon")
    train(recipe(text(tmp_path), *settings), tmp_path / "run", until=7)
    paths = {step: checkpoint.path_of(tmp_path / "run", step) for step in (4, 5, 6, 7)}
    assert same(paths[4], paths[5]) and same(paths[4], paths[6]) and not same(paths[6], paths[7])


@pytest.mark.spec(137)
def test_a_segment_memory_is_reset_in_the_step_after_a_skipped_one(tmp_path, monkeypatch):
    """So its numbers are waited for in each step."""
    broken_steps(monkeypatch, {15: float("nan")})
    start, losses = Recipe(member="transformer-xl", size="tiny", task=Language(), data=str(text(tmp_path))), {}
    one = override(start, ["run.steps=6", "run.batch=2", "run.evaluate=0", "run.device=cpu", "task.valid=0.02"])
    for folder, ahead in (("waits", 0), ("ahead", 2)):
        monkeypatch.setattr(loop, "steps_ahead", lambda device, ahead=ahead: ahead)
        train(one, tmp_path / folder)
        losses[folder] = [line["loss"] for line in records(tmp_path / folder) if line["kind"] == "step"]
    assert str(losses["waits"]) == str(losses["ahead"])
    assert [math.isnan(loss) for loss in losses["ahead"]] == [False, False, False, True, False, False]


@pytest.mark.spec(137)
def test_a_diverging_run_ends_as_one_that_waits(tmp_path, monkeypatch):
    broken_steps(monkeypatch, dict.fromkeys(range(7, 30), float("nan")))
    for folder, ahead in (("waits", 0), ("ahead", 2)):
        monkeypatch.setattr(loop, "steps_ahead", lambda device, ahead=ahead: ahead)
        with pytest.raises(Unstable, match="stopped after 4 skipped steps in a row: the loss is nan"):
            train(recipe(text(tmp_path), "optim.patience=4", "run.steps=30"), tmp_path / folder)
    assert str(records(tmp_path / "waits")) == str(records(tmp_path / "ahead"))  # NaN is not equal to itself
    assert records(tmp_path / "ahead")[-1]["step"] == 10
    assert checkpoint.steps(tmp_path / "waits") == checkpoint.steps(tmp_path / "ahead")


@pytest.mark.parametrize("ahead", [0, 2])
def test_records_are_complete_and_in_order_after_a_stop_signal(tmp_path, monkeypatch, ahead):
    monkeypatch.setattr(loop, "steps_ahead", lambda device: ahead)

    def stop(record):
        if record["kind"] == "step" and record["step"] == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    said = []
    callbacks = (stop, lambda line: said.append(line["kind"]))
    trained = train(recipe(text(tmp_path), "run.evaluate=0", "run.save=0"), tmp_path / "run", callbacks=callbacks)
    assert trained.step == 5 + ahead
    lines = records(tmp_path / "run")
    steps = [line["step"] for line in lines]
    assert steps == sorted(steps)
    assert [line["step"] for line in lines if line["kind"] == "step"] == list(range(1, trained.step + 1))
    assert [line["kind"] for line in lines][-3:] == ["stop", "save", "end"] and said.count("stop") == 1
    assert checkpoint.steps(tmp_path / "run")[-1] == trained.step


def test_an_error_is_recorded_after_the_steps_before_it(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "steps_ahead", lambda device: 2)
    original = LanguageData.batch

    def batch(data, step, size, seed):
        return original(data, step, size, seed) if step < 5 else 1 / 0

    monkeypatch.setattr(LanguageData, "batch", batch)
    with pytest.raises(ZeroDivisionError):  # of the thread that draws
        train(recipe(text(tmp_path), "run.evaluate=0", "run.save=0"), tmp_path / "run")
    lines = records(tmp_path / "run")
    assert [(line["kind"], line["step"]) for line in lines[1:]] == [*(("step", n) for n in range(1, 6)), ("end", 5)]


def test_numbers_arrive_in_order_and_a_few_steps_late():
    flight, numbers = InFlight(2), torch.zeros(1)
    arrived = []
    for step in range(5):
        flight.send(Sent(step, 0.0, {"lr": step}), numbers.fill_(step))  # which the next step overwrites
        arrived.append([one.step for one in flight.arrived()])
    assert arrived == [[], [], [0], [1], [2]]
    last = list(flight.arrived(all_steps=True))
    assert [(one.step, one.record, one.numbers) for one in last] == [(3, {"lr": 3}, [3.0]), (4, {"lr": 4}, [4.0])]
    assert all(one.seconds >= 0 for one in last)


NAMES = ["byte-language", "transformer-xl", "bert", "electra", "transformer", "t5", "byte-classifier", "vit",
         "graph-classifier", "image-transformer"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_batches_that_are_drawn_ahead_are_the_same_and_use_no_random_numbers_of_the_run(name):
    one = Recipe.of(name, "run.steps=4", "run.batch=4", size="tiny")
    data = one.task.open(None)
    data.fit(data.adapt(one.value(data.member_settings())))
    state = torch.get_rng_state()
    ahead, here = (Batches(data, one.run, World(), number) for number in (2, 0))
    for step in range(4):
        drawn, expected = ahead.take(step), here.take(step)
        assert (drawn.size, drawn.count) == (expected.size, expected.count)
        assert drawn.rows.tensors.keys() == expected.rows.tensors.keys()
        assert all(torch.equal(x, expected.rows[key]) for key, x in drawn.rows.tensors.items())
    assert not ahead.drawn  # nothing is drawn past the last step
    assert torch.equal(torch.get_rng_state(), state)
    ahead.close()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_run_whose_learning_rates_are_tensors_resumes_to_equal_bits(tmp_path, monkeypatch, name):
    """As those of a CUDA graph."""
    monkeypatch.setattr(
        learner, "optimizers", lambda network, optim, _: optimizers(network, optim, torch.device("cpu"))
    )
    data, settings = text(tmp_path), ("run.steps=6", "run.evaluate=0", f"optim.name={name}")
    train(recipe(data, *settings), tmp_path / "whole")
    train(recipe(data, *settings), tmp_path / "cut", until=3)
    resume(tmp_path / "cut")
    assert same(*(checkpoint.path_of(tmp_path / folder, 6) for folder in ("whole", "cut")))
    assert records(tmp_path / "whole")[-3:] == records(tmp_path / "cut")[-3:]
