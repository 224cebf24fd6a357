"""The training loop: equal runs are bitwise equal, however they are interrupted."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import everyformer
from everyformer import build, member
from everyformer.cli.main import main
from everyformer.task.language import Language, LanguageObjective
from everyformer.task.language_inference import LanguageInference
from everyformer.train import checkpoint
from everyformer.train.checksums import replace_file
from everyformer.train.distributed import World
from everyformer.train.folder import read_model, read_recipe
from everyformer.train.gradient_watch import GradientWatch, Unstable
from everyformer.train.init_from import load_weights
from everyformer.train.loop import Loop, resume, train
from everyformer.train.optimizer import optimizers
from everyformer.train.recipe import Optim, Recipe, override
from everyformer.train.record import read
from everyformer.train.trained import load
from tests.train.small import BASE, command, recipe, same, start, text
from tests.train.test_gradient_watch import check


def losses(folder):
    return [line["loss"] for line in read(folder / "records.jsonl") if line["kind"] == "step"]


def weights(trained):
    return {name: weight.clone() for name, weight in trained.network.state_dict().items()}


def equal(one, two):
    return all(torch.equal(one[name], two[name]) for name in one)


def test_runs_with_equal_seeds_are_bitwise_equal(tmp_path):
    data = text(tmp_path)
    one, two, other = (train(recipe(data, f"run.seed={seed}")) for seed in (1, 1, 2))
    assert equal(weights(one), weights(two)) and not equal(weights(one), weights(other))


def test_a_resumed_run_ends_with_the_same_weights_and_records(tmp_path):
    data = text(tmp_path)
    whole = train(recipe(data), tmp_path / "whole")
    train(override(recipe(data), ["run.steps=12"]), tmp_path / "cut")
    for step in (9, 12):
        for file in checkpoint.path_of(tmp_path / "cut", step).iterdir():
            file.unlink()
        checkpoint.path_of(tmp_path / "cut", step).rmdir()
    again = resume(tmp_path / "cut")
    assert equal(weights(whole), weights(again)) and again.step == 12
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")
    assert same(checkpoint.path_of(tmp_path / "whole", 12), checkpoint.path_of(tmp_path / "cut", 12))


def test_a_run_is_resumed_with_other_run_settings_which_are_saved(tmp_path):
    train(recipe(text(tmp_path), "run.steps=3"), tmp_path / "run")
    with pytest.raises(ValueError, match=r"model.width=32 cannot change when a run is resumed"):
        resume(tmp_path / "run", settings=["model.width=32"])
    resume(tmp_path / "run", steps=4, settings=["run.accumulate=2"])
    assert resume(tmp_path / "run").recipe.run == recipe("x", "run.steps=4", "run.accumulate=2").run


def restored(folder, *settings):
    """The learner of a run that is resumed with settings."""
    recipe, value = override(read_recipe(folder), settings), read_model(folder)
    loop = Loop(recipe, recipe.task.open(recipe.data, folder), value, folder, World(), ())
    loop._restore(checkpoint.steps(folder)[-1])
    return loop.learner


def restored_cache(folder, *settings):
    return restored(folder, *settings).carried_cache


def test_the_optimizer_of_a_resumed_run_has_the_new_settings_and_the_old_moments(tmp_path):
    train(recipe(text(tmp_path), "run.steps=3", "optim.lr=0.5"), tmp_path / "run")
    old, new = (restored(tmp_path / "run", *how).optimizers[0] for how in ((), ("optim.lr=0.25", "optim.beta1=0.5")))
    assert [group["full_lr"] for group in (*old.param_groups, *new.param_groups)] == [0.5, 0.5, 0.25, 0.25]
    assert [group["betas"][0] for group in new.param_groups] == [0.5, 0.5]
    moments = [[state["exp_avg"] for state in one.state.values()] for one in (old, new)]
    assert moments[0] and all(torch.equal(a, b) for a, b in zip(*moments, strict=True))


def test_the_cache_is_dropped_when_a_run_is_resumed_with_another_batch_size(tmp_path):
    start = Recipe(member="transformer-xl", size="tiny", task=Language(), data=str(text(tmp_path)))
    small = [one for one in BASE if "context" not in one]
    train(override(start, [*small, "task.context=8", "model.memory=8", "run.steps=3"]), tmp_path / "run")
    assert restored_cache(tmp_path / "run", "run.batch=4") != [None] and restored_cache(
        tmp_path / "run", "run.batch=2"
    ) == [None]
    assert resume(tmp_path / "run", steps=4, settings=["run.batch=2"]).step == 4
    assert resume(tmp_path / "run", steps=5).step == 5


def test_a_failed_evaluation_still_saves_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageObjective, "evaluate", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train(recipe(text(tmp_path), "run.save=0", "run.evaluate=0", "run.steps=2"), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == [2]


def test_a_batch_smaller_than_its_pieces_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a batch of 1 cannot be split into 1 processes x 2 pieces; raise it"):
        train(recipe(text(tmp_path), "run.accumulate=2", "run.batch_schedule=[[2,1]]"), tmp_path / "run")


def test_a_run_that_failed_before_its_first_checkpoint_is_resumed_from_the_start(tmp_path):
    data = text(tmp_path)
    train(recipe(data), tmp_path / "whole")
    with full_disk(20_000), pytest.raises(ValueError, match="File too large"):
        train(recipe(data), tmp_path / "broken")
    lines = list(read(tmp_path / "broken" / "records.jsonl"))
    assert lines[-1]["kind"] == "end" and "File too large" in lines[-1]["error"] and lines[-1]["step"] == 3
    resume(tmp_path / "broken")
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def test_the_ema_follows_its_formula(tmp_path):
    """a_t = d a_{t-1} + (1 - d) w_t, of every weight."""
    settings = ("run.steps=3", "run.save=1", "run.keep=3", "run.evaluate=0", "optim.ema=0.8")
    train(recipe(text(tmp_path), *settings), tmp_path / "run")
    paths = [checkpoint.path_of(tmp_path / "run", step) for step in (1, 2, 3)]
    ema, weight = ([load_file(path / f"{name}.safetensors") for path in paths] for name in ("ema", "model"))
    for step in (1, 2):
        for name, result in ema[step].items():
            torch.testing.assert_close(result, 0.8 * ema[step - 1][name] + 0.2 * weight[step][name])
        assert any(not torch.equal(result, ema[step - 1][name]) for name, result in ema[step].items())


def test_the_ema_of_a_shared_weight_is_loaded_under_all_its_names(tmp_path, monkeypatch):
    """On a GPU, or sharded, each name of a shared weight has a separate tensor in the state dict."""
    original = checkpoint.full_state_dict
    monkeypatch.setattr(
        checkpoint, "full_state_dict", lambda one: {name: x.clone() for name, x in original(one).items()}
    )
    start = Recipe(member="adaptive-span", size="tiny", task=Language(), data=str(text(tmp_path)))
    settings = ["run.steps=3", "run.batch=4", "run.evaluate=0", "run.device=cpu", "optim.ema=0.9"]
    trained = train(override(start, settings), tmp_path / "run")
    path = checkpoint.path_of(tmp_path / "run", 3)
    assert sum("key_RE" in name for name in load_file(path / "model.safetensors")) == 1
    network = build("adaptive-span", "tiny")
    load_weights(network, tmp_path / "run")
    for one in (network, load(tmp_path / "run").network):
        assert torch.equal(one.body.shared[0].key_RE, trained.network.body.shared[0].key_RE)
    assert torch.equal(resume(tmp_path / "run").network.body.shared[0].key_RE, network.body.shared[0].key_RE)


@pytest.mark.spec(130)
def test_accumulated_gradients_equal_the_big_batch(tmp_path):
    data = text(tmp_path)
    plain = ("model.dropout=0.0", "optim.lr=1e-2")
    one, four = (train(recipe(data, *plain, f"run.accumulate={n}")) for n in (1, 4))
    for name, weight in weights(one).items():
        torch.testing.assert_close(weight, weights(four)[name], rtol=1e-4, atol=1e-5)


@pytest.mark.spec(131)
@pytest.mark.parametrize("checkpoint_segments", [1, 2])
def test_activation_checkpointing_gives_equal_gradients_with_dropout(checkpoint_segments):
    network = everyformer.build("gpt2", "tiny", layers=3, dropout=0.3).double().train()
    token_BT = torch.randint(0, 256, (2, 16))
    result = []
    for number in (0, checkpoint_segments):
        network.body.checkpoint_segments = number
        network.zero_grad()
        torch.manual_seed(0)
        network(token_BT).logits.square().sum().backward()
        result.append([p.grad.clone() for p in network.parameters()])
    assert all(torch.equal(one, two) for one, two in zip(*result, strict=True))


@pytest.mark.spec(131)
def test_activation_checkpointing_saves_fewer_tensors():
    network = everyformer.build("gpt2", "tiny", layers=8, dropout=0.0).train()
    saved = []
    for checkpoint_segments in (0, 8):
        network.body.checkpoint_segments, count = checkpoint_segments, 0

        def pack(x):
            nonlocal count
            count += x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            network(torch.randint(0, 256, (2, 32)))
        saved.append(count)
    assert saved[1] < saved[0] / 3


@pytest.mark.spec(134)
def test_clipping_bounds_the_gradient_norm_of_the_optimizer(tmp_path, monkeypatch):
    norms = []
    original = torch.optim.AdamW.step

    def step(optimizer, *args, **options):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return original(optimizer, *args, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    train(recipe(text(tmp_path), "optim.clip=0.25", "run.steps=3"))
    assert len(norms) == 3 and all(norm <= 0.2501 for norm in norms)


@pytest.mark.spec(136)
def test_the_batch_schedule_changes_the_batch_size(tmp_path):
    train(recipe(text(tmp_path), "run.batch_schedule=[[6, 8]]"), tmp_path / "run")
    sizes = [line["batch"] for line in read(tmp_path / "run" / "records.jsonl") if line["kind"] == "step"]
    assert sizes == [4] * 6 + [8] * 6


def test_the_context_schedule_shortens_the_windows_of_the_first_steps(tmp_path):
    """Together with the batch schedule each step has as many targets; evaluation is on the whole context."""
    schedules = (
        "task.context=16",
        "run.batch=16",
        "run.batch_schedule=[[4,8],[6,4]]",
        "task.context_schedule=[[0,4],[4,8],[6,16]]",
    )
    first = train(recipe(text(tmp_path), *schedules), tmp_path / "run")
    steps = [line for line in read(tmp_path / "run" / "records.jsonl") if line["kind"] == "step"]
    assert [line["batch"] for line in steps] == [16] * 4 + [8] * 2 + [4] * 6
    assert {line["targets"] for line in steps} == {64} and first.metrics["window"] == 16
    train(recipe(text(tmp_path), *schedules), tmp_path / "again", until=5)
    again = resume(tmp_path / "again")
    for one, other in zip(first.network.parameters(), again.network.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.spec(133)
def test_muon_gets_the_matrices_of_the_layers_and_adamw_the_rest():
    network = everyformer.build("gpt2", "tiny")
    adamw, muon = optimizers(network, Optim(name="muon"))
    inner = {id(p) for group in muon.param_groups for p in group["params"]}
    outer = {id(p) for group in adamw.param_groups for p in group["params"]}
    assert inner | outer == {id(p) for p in network.parameters()} and not inner & outer
    assert inner == {id(p) for n, p in network.named_parameters() if ".layers." in n and p.dim() == 2}
    vectors = [group for group in adamw.param_groups if all(p.dim() == 1 for p in group["params"])]
    assert [group["weight_decay"] for group in vectors] == [0.0]


def test_muon_learns_and_resumes(tmp_path):
    data = text(tmp_path)
    whole = train(recipe(data, "optim.name=muon"), tmp_path / "whole")
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    again = resume(tmp_path / "whole", step=6)
    assert equal(weights(whole), weights(again))


@pytest.mark.spec(129)
def test_bf16_computes_the_loss_in_float32_and_fp16_on_a_cpu_is_refused(tmp_path):
    data = text(tmp_path)
    trained = train(recipe(data, "run.precision=bf16"), tmp_path / "bf16")
    assert {weight.dtype for weight in weights(trained).values()} == {torch.float32}
    assert losses(tmp_path / "bf16")[-1] < losses(tmp_path / "bf16")[0]
    with pytest.raises(ValueError, match="fp16 on a CPU"):
        train(recipe(data, "run.precision=fp16"))


@pytest.mark.spec(137)
def test_the_watch_skips_spikes_and_non_finite_steps_and_stops_after_its_patience():
    watch = GradientWatch(patience=3)
    assert all(check(watch, 1.0, 1.0) is None for _ in range(30))
    assert "more than 10 times" in check(watch, 1.0, 50.0)
    assert "loss is nan" in check(watch, float("nan"), 1.0)
    assert check(watch, 1.0, 1.0) is None and watch.skipped_in_a_row == 0 and watch.skipped_steps == 2
    check(watch, 1.0, float("inf"))
    check(watch, 1.0, float("inf"))
    with pytest.raises(Unstable, match="3 skipped steps in a row"):
        check(watch, 1.0, float("inf"))


@pytest.mark.spec(137)
def test_gradients_that_have_grown_for_good_are_accepted_after_a_few_steps():
    """As when a run leaves a plateau: 20 times the norm, and a falling loss."""
    watch = GradientWatch(patience=20)
    assert all(check(watch, 0.69, 0.7) is None for _ in range(100))
    result = [check(watch, 0.6, 14.0) for _ in range(30)]
    assert result[0] is not None and sum(one is not None for one in result) < 8 and result[-1] is None


@pytest.mark.spec(137)
def test_a_spike_of_the_loss_is_skipped_and_one_hard_example_is_not():
    watch = GradientWatch(patience=20)
    assert all(check(watch, 1.2, 1.0) is None for _ in range(30))
    assert "far above its average" in check(watch, 5.5, 1.0)
    watch = GradientWatch(patience=20)
    assert all(check(watch, 0.001, 1.0) is None for _ in range(30))
    assert check(watch, 0.4, 2.0) is None


@pytest.mark.spec(137)
def test_a_diverging_run_stops_and_keeps_its_last_checkpoint(tmp_path, monkeypatch):
    original = LanguageObjective.loss_with_cache

    def broken(objective, network, batch, kernel, cache):
        calls.append(1)
        loss, cache = original(objective, network, batch, kernel, cache)
        return loss * (float("nan") if len(calls) > 7 else 1.0), cache

    calls: list[int] = []
    monkeypatch.setattr(LanguageObjective, "loss_with_cache", broken)
    with pytest.raises(Unstable, match="the loss is nan"):
        train(recipe(text(tmp_path), "optim.patience=3", "run.steps=40"), tmp_path / "run")
    assert checkpoint.steps(tmp_path / "run") == [
        3,
        6,
        9,
    ]  # steps 8 and 9 were skipped: their weights are those of step 7
    assert [line["kind"] for line in read(tmp_path / "run" / "records.jsonl")][-1] == "end"


@pytest.mark.spec(137)
def test_without_skip_spikes_only_non_finite_steps_are_skipped():
    watch = GradientWatch(patience=3, skip_spikes=False)
    assert all(check(watch, 1.0, 1.0) is None for _ in range(30))
    assert check(watch, 1.0, 50.0) is None and check(watch, 99.0, 1.0) is None and watch.skipped_steps == 0
    assert "norm is inf" in check(watch, 1.0, float("inf")) and watch.skipped_steps == 1


@pytest.mark.spec(137)
@pytest.mark.parametrize("skip", [True, False])
def test_skipped_steps_are_recorded_with_their_reason_and_counted(tmp_path, monkeypatch, skip):
    """A spike in step 25 is skipped, unless optim.skip_spikes=false; the count survives an interruption."""
    original = LanguageObjective.loss_with_cache

    def spike(objective, network, batch, kernel, cache):
        loss, cache = original(objective, network, batch, kernel, cache)
        return loss * (1000.0 if objective.progress == 24 / 30 else 1.0), cache

    monkeypatch.setattr(LanguageObjective, "loss_with_cache", spike)
    settings = ("run.steps=30", "run.evaluate=0", "run.keep=30", f"optim.skip_spikes={skip}", "optim.lr=1e-6")
    trained = train(recipe(text(tmp_path), *settings), tmp_path / "run")
    records = list(read(tmp_path / "run" / "records.jsonl"))
    skips = [record for record in records if record["kind"] == "skip"]
    assert [(record["step"], record["skipped_steps"]) for record in skips] == [(25, 1)] * skip
    assert all("gradient norm" in record["reason"] for record in skips)
    assert records[-1]["kind"] == "end" and records[-1]["skipped_steps"] == int(skip)
    assert trained.skipped_steps == trained.metrics["skipped_steps"] == int(skip)
    assert load(tmp_path / "run", device="cpu").skipped_steps == int(skip)
    assert resume(tmp_path / "run", step=27).skipped_steps == int(skip)


@pytest.mark.spec(137)
def test_train_prints_skipped_steps(tmp_path, monkeypatch, capsys):
    original = LanguageObjective.loss_with_cache

    def broken(objective, network, batch, kernel, cache):
        loss, cache = original(objective, network, batch, kernel, cache)
        return loss * (float("nan") if objective.progress == 1 / 3 else 1.0), cache

    monkeypatch.setattr(LanguageObjective, "loss_with_cache", broken)
    settings = ["run.steps=3", "run.batch=4", "run.evaluate=0", "run.device=cpu", "task.context=8"]
    command = ["train", "byte-language", "--size", "tiny", *settings, "--data", str(text(tmp_path))]
    assert main([*command, "--out", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "step 2 skipped: the loss is nan" in shown and "skipped steps" not in shown
    assert "1 of 3 steps were skipped; the reasons are in records.jsonl" in shown


def test_a_run_is_used_from_any_folder_and_missing_data_are_refused(tmp_path, monkeypatch):
    text(tmp_path)
    monkeypatch.chdir(tmp_path)
    train(recipe("text.txt", "run.steps=3"), "run")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert load("../run").evaluate()["bits_per_byte"] > 0
    (tmp_path / "text.txt").unlink()
    for use in (partial(load, data=True), resume):
        with pytest.raises(
            ValueError, match=r"the data of ../run are missing: there is no \S+text.txt; give their new place"
        ):
            use("../run")


def test_a_custom_model_is_trained_like_a_member(tmp_path):
    """Given as a value or as a file; the recipe contains it."""
    value = member("gpt2", "tiny", width=16, layers=1, context=16)
    (tmp_path / "mine.json").write_text(everyformer.to_json(value))
    options = {"data": text(tmp_path), "task": "language"}
    settings = ("run.steps=3", "run.batch=4", "run.evaluate=0", "run.device=cpu")
    runs = [train(Recipe.of(one, *settings, **options), tmp_path / f"run-{number}")
            for number, one in enumerate((value, tmp_path / "mine.json"))]  # fmt: skip
    assert equal(weights(runs[0]), weights(runs[1]))
    opened = load(tmp_path / "run-1")
    assert opened.recipe.member == opened.network.value == value
    assert opened.generate("the", tokens=3, seed=0).startswith("the")
    assert resume(tmp_path / "run-0", steps=4).step == 4
    for wrong, reason in (
        (lambda: Recipe.of(value, "model.width=8"), "model has no setting 'width'; change the model itself"),
        (lambda: Recipe.of("no.json"), "there is no model in no.json; write one with everyformer family"),
        (lambda: Recipe.of(str(text(tmp_path)).replace("text.txt", "mine.json"), size="big"), "mine has no size 'big'"),
    ):
        with pytest.raises(ValueError, match=reason):
            wrong()


def test_a_kernel_that_there_is_not_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="no kernel is named 'sdpo'; did you mean sdpa"):
        train(recipe(text(tmp_path), "run.kernel=sdpo"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_member_is_no_recipe():
    with pytest.raises(ValueError, match=r"'gpt2' is not a recipe; write train\(Recipe.of\('gpt2'\), folder\)"):
        train("gpt2")


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
    data = text(tmp_path)
    train(recipe(data, "run.steps=2"), tmp_path / "run")
    with pytest.raises(ValueError, match="already exists and is not empty"):
        train(recipe(data), tmp_path / "run")


def test_a_run_with_changed_data_is_not_resumed(tmp_path):
    data = text(tmp_path)
    train(recipe(data, "run.steps=3"), tmp_path / "run")
    text(tmp_path, "other text\n" * 300)
    with pytest.raises(ValueError, match="have changed since the run began"):
        resume(tmp_path / "run", steps=6)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "ema.safetensors", "state.json"])
@pytest.mark.parametrize("harm", ["cut", "flip", "lose"])
def test_a_damaged_checkpoint_is_refused_by_name_and_the_earlier_one_can_be_used(tmp_path, name, harm):
    data = text(tmp_path)
    whole = train(recipe(data, "run.steps=6"), tmp_path / "run")
    path = checkpoint.path_of(tmp_path / "run", 6) / name
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    if harm == "flip":
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    if harm == "lose":
        path.unlink()
    with pytest.raises(ValueError, match=f"{name}.*--step 3|--step 3"):
        resume(tmp_path / "run")
    assert equal(weights(whole), weights(resume(tmp_path / "run", step=3)))


def test_a_checkpoint_of_another_version_is_refused(tmp_path):
    train(recipe(text(tmp_path), "run.steps=3"), tmp_path / "run")
    path = checkpoint.path_of(tmp_path / "run", 3) / "state.json"
    content = json.dumps(json.loads(path.read_text()) | {"version": 99})
    replace_file(path.parent, path.name, content.encode())
    with pytest.raises(ValueError, match="version 99, but this program reads version 2"):
        resume(tmp_path / "run")


def test_a_half_removed_checkpoint_is_ignored_and_removed_with_the_next_one(tmp_path, monkeypatch):
    train(recipe(text(tmp_path), "run.steps=3"), tmp_path / "run")

    def killed(path, *args, **options):
        next(path.iterdir()).unlink()
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        resume(tmp_path / "run", steps=6, settings=["run.keep=1", "run.evaluate=0"])
    monkeypatch.undo()
    checkpoint.verify(tmp_path / "run", *checkpoint.steps(tmp_path / "run"))
    resume(tmp_path / "run", steps=7)
    assert [one.name for one in (tmp_path / "run" / "checkpoints").iterdir()] == ["00000007"]


@contextmanager
def full_disk(size):
    """Limits the size of files, which raises the error of a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [20_000, 100], ids=["checkpoint", "recipe"])
def test_a_full_disk_leaves_the_earlier_checkpoint_intact(tmp_path, size):
    train(recipe(text(tmp_path), "run.steps=3"), tmp_path / "run")
    with (
        full_disk(size),
        pytest.raises(ValueError, match=r"cannot write to .*run \(.*File too large.*checkpoint is intact"),
    ):
        resume(tmp_path / "run", steps=6)
    assert checkpoint.steps(tmp_path / "run") == [3]
    assert not [one for one in (tmp_path / "run" / "checkpoints").iterdir() if not one.name.isdigit()]
    resume(tmp_path / "run", steps=6)
    assert checkpoint.steps(tmp_path / "run") == [3, 6]
    assert len(losses(tmp_path / "run")) == 6


def test_a_disk_that_is_too_full_for_the_tokenizer_is_named_and_nothing_is_left(tmp_path):
    run = recipe(text(tmp_path), "task.tokenizer=bpe", "task.vocabulary=300")
    train(run, tmp_path / "whole")  # the tokens of the text are then in the cache
    size = (tmp_path / "whole" / "tokenizer.json").stat().st_size
    with full_disk(size - 1), pytest.raises(ValueError, match=r"cannot write to .*run \(.*File too large"):
        train(run, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_disk_that_fails_after_the_last_write_is_named(tmp_path, monkeypatch):
    def fail(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint, "flush", lambda path: path.name == "checkpoints" and fail(path))
    with pytest.raises(ValueError, match=r"cannot write to .*run \(.*No space left.*checkpoint is intact"):
        train(recipe(text(tmp_path), "run.steps=3"), tmp_path / "run")


@pytest.fixture
def scripted(monkeypatch):
    """Replaces the metrics by a table; the last step has two: on all examples, and on some."""
    original, step = Loop._evaluate, 0

    def evaluate(objective, network, split, limit, kernel, progress):
        which = "some" if limit == 4 else "all"
        return {
            "bits_per_byte": float(table[step, which]),
            "targets": {"some": 4, "all": 9}[which],
            "targets_in_split": 9,
        }

    def at(loop, number, *args, **options):
        nonlocal step
        step = number
        return original(loop, number, *args, **options)

    def script(new, higher=False):
        table.update(new)
        monkeypatch.setattr(LanguageObjective, "higher_is_better", higher)

    table: dict[tuple[int, str], float] = {}
    monkeypatch.setattr(LanguageObjective, "evaluate", evaluate)
    monkeypatch.setattr(LanguageInference, "sample", lambda *args: None)
    monkeypatch.setattr(Loop, "_evaluate", at)
    return script


@pytest.mark.parametrize("higher", [False, True], ids=["lower", "higher"])
@pytest.mark.parametrize("end, best", [(1.2, 6), (0.9, 12), (float("nan"), 6)], ids=["middle", "end", "nan"])
def test_the_best_checkpoint_is_kept_and_found(tmp_path, scripted, higher, end, best):
    sign = -1 if higher else 1
    scores = {(3, "some"): 2.0, (6, "some"): 1.0, (9, "some"): 1.5, (12, "all"): 0.5, (12, "some"): end}
    scripted({key: sign * score for key, score in scores.items()}, higher)
    folder = tmp_path / "run"
    trained = train(recipe(text(tmp_path), "run.evaluate=3", "run.keep=1"), folder)
    assert checkpoint.steps(folder) == sorted({best, 12})
    assert trained.best == {"step": best, "bits_per_byte": sign * scores[best, "some"]}
    assert load(folder, step="best", device="cpu").step == best and load(folder, device="cpu").step == 12


def test_every_evaluation_may_be_the_best_and_a_resumed_run_restores_it(tmp_path, scripted):
    scores = {(2, "some"): 3.0, (4, "some"): 1.0, (6, "some"): 1.5, (8, "some"): 1.2, (10, "some"): 1.1}
    scripted(scores | {(12, "all"): 0.5, (12, "some"): 2.0})
    data, settings = text(tmp_path), ("run.evaluate=2", "run.save=5", "run.keep=1")
    whole = train(recipe(data, *settings), tmp_path / "whole")
    assert checkpoint.steps(tmp_path / "whole") == [4, 12]
    train(recipe(data, *settings, "run.keep=9"), tmp_path / "cut")
    assert checkpoint.steps(tmp_path / "cut") == [2, 4, 5, 10, 12]
    for step in (10, 12):
        shutil.rmtree(checkpoint.path_of(tmp_path / "cut", step))
    again = resume(tmp_path / "cut")
    assert whole.best == again.best == {"step": 4, "bits_per_byte": 1.0}
    assert same(checkpoint.path_of(tmp_path / "whole", 12), checkpoint.path_of(tmp_path / "cut", 12))


def test_a_run_ends_early_after_evaluations_without_a_better_metric(tmp_path, scripted):
    scores = {(2, "some"): 3.0, (4, "some"): 1.0, (6, "some"): 1.5, (8, "some"): 1.2, (8, "all"): 1.3}
    scripted(scores | {(10, "some"): 0.9, (12, "some"): 1.0, (12, "all"): 1.0})
    settings = ("run.evaluate=2", "run.save=0", "run.keep=1", "run.patience=2")
    trained = train(recipe(text(tmp_path), *settings), tmp_path / "run")
    assert trained.step == 8 and trained.stopped is None and trained.metrics["bits_per_byte"] == 1.3
    assert trained.early_stop == "no better bits per byte in 2 evaluations (run.patience=2)"
    assert checkpoint.steps(tmp_path / "run") == [4, 8] and trained.best == {"step": 4, "bits_per_byte": 1.0}
    again = resume(tmp_path / "run", settings=["run.patience=0"])
    assert again.step == 12 and again.early_stop is None and again.best == {"step": 10, "bits_per_byte": 0.9}


def test_evaluations_are_on_the_same_examples_and_the_final_one_is_apart(tmp_path):
    trained = train(recipe(text(tmp_path)), tmp_path / "run")
    lines = list(read(tmp_path / "run" / "records.jsonl"))
    evaluated, (final,) = ([line for line in lines if line["kind"] == kind] for kind in ("evaluate", "final"))
    assert [line["step"] for line in evaluated] == [6, 12] and {line["targets"] for line in evaluated} == {32}
    assert final["targets"] == final["targets_in_split"] > 300 and final["step"] == 12
    assert all(line["low"] < line["bits_per_byte"] < line["high"] for line in (*evaluated, final))
    assert trained.metrics["bits_per_byte"] == final["bits_per_byte"] != evaluated[-1]["bits_per_byte"]


def test_the_final_evaluation_is_capped_and_reports_its_progress(tmp_path, monkeypatch):
    monkeypatch.setattr("everyformer.task.task.MAX_TARGETS", 100)
    monkeypatch.setattr("everyformer.train.evaluation.EVERY", -1)
    told: list[dict[str, Any]] = []
    trained = train(recipe(text(tmp_path), "run.evaluate=0", "run.steps=1"), tmp_path / "run", callbacks=(told.append,))
    assert trained.metrics["targets"] == 104 < trained.metrics["targets_in_split"]  # 13 windows of 8
    progress = [(line["done"], line["of"]) for line in told if line["kind"] == "evaluating"]
    assert progress[-1] == (104, 104) and [line["kind"] for line in told][-3:] == ["final", "save", "end"]
    assert "evaluating" not in (tmp_path / "run" / "records.jsonl").read_text()
    run = load(tmp_path / "run", device="cpu")
    assert run.evaluate()["targets"] == 104 and run.evaluate(limit=2)["targets"] == 16
    assert run.evaluate(limit="all")["targets"] == run.evaluate()["targets_in_split"]


def test_a_run_without_evaluations_at_checkpoints_has_no_best(tmp_path):
    train(recipe(text(tmp_path), "run.evaluate=0"), tmp_path / "run")
    assert load(tmp_path / "run", step="best", device="cpu").step == 12  # the last step is always evaluated
    shutil.rmtree(checkpoint.path_of(tmp_path / "run", 12))
    with pytest.raises(ValueError, match=r"no best checkpoint: none was evaluated yet; resume the run"):
        load(tmp_path / "run", step="best", device="cpu")
    with pytest.raises(ValueError, match=r"no checkpoint of step 77; its checkpoints are at the steps 6, 9 \(run.keep"):
        load(tmp_path / "run", step=77, device="cpu")


def test_a_run_resumed_from_an_earlier_step_replaces_the_later_checkpoints(tmp_path):
    train(recipe(text(tmp_path), "run.keep=4", "run.evaluate=0"), tmp_path / "run")
    resume(tmp_path / "run", step=3, steps=7, settings=["run.keep=2"])
    assert checkpoint.steps(tmp_path / "run") == [6, 7]


def test_a_stop_signal_saves_and_ends_cleanly(tmp_path):
    data = text(tmp_path)
    process = start(command(tmp_path / "run", data, "train", "run.steps=100000", "run.evaluate=0"))
    while not (tmp_path / "run" / "checkpoints").is_dir():
        time.sleep(0.05)
        assert process.poll() is None, process.communicate()[0]
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    last = list(read(tmp_path / "run" / "records.jsonl"))[-1]
    assert last["stopped"] == "asked to stop by SIGTERM" and last["step"] == checkpoint.steps(tmp_path / "run")[-1]


def test_a_stop_signal_aborts_an_evaluation_and_the_last_step_is_saved(tmp_path, monkeypatch):
    def endless(*arguments):
        signal.raise_signal(signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr(LanguageObjective, "evaluate", endless)
    trained = train(recipe(text(tmp_path), "run.evaluate=0"), tmp_path / "run")
    assert trained.stopped is None and trained.metrics == {}  # only the evaluation is missing
    assert checkpoint.steps(tmp_path / "run")[-1] == 12
    monkeypatch.undo()
    again = resume(tmp_path / "run")  # evaluates what was not
    assert again.metrics["bits_per_byte"] > 0 and again.best["step"] == 12
    assert checkpoint.verify(tmp_path / "run", 12)["best"] == again.best


def test_one_ctrl_c_saves_the_current_step_and_a_second_stops_at_once(tmp_path):
    def press(times):
        def callback(record):
            if record["kind"] == "step" and record["step"] == 2:
                for _ in range(times):
                    signal.getsignal(signal.SIGINT)(signal.SIGINT, None)

        return (callback,)

    data = text(tmp_path)
    trained = train(recipe(data), tmp_path / "once", callbacks=press(1))
    assert trained.stopped == "asked to stop by SIGINT" and checkpoint.steps(tmp_path / "once") == [2]
    with pytest.raises(KeyboardInterrupt):
        train(recipe(data), tmp_path / "twice", callbacks=press(2))
    assert checkpoint.steps(tmp_path / "twice") == []
