"""Mistakes on the command line, and broken runs: each ends with one line that names the remedy."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from everyformer.cli.main import main
from tests.cli.small_run import SMALL, train

pytestmark = pytest.mark.usefixtures("place")


@pytest.mark.parametrize(
    "words, message",
    [
        (["train", "gpt3"], "did you mean gpt2"),
        (["train", "gpt2", "--size", "tny"], "did you mean tiny"),
        (["train", "gpt2", "--task", "languge"], "did you mean language"),
        (["train", "gpt2", "--size", "tiny", "run.stps=3"], "did you mean steps"),
        (
            ["train", "gpt2", "--size", "tiny", "rum.steps=3"],
            "there is no setting 'rum.steps'; did you mean run.steps?",
        ),
        (["train", "gpt2", "--size", "tiny", "lr=3"], "there is no setting 'lr'; did you mean optim.lr?"),
        (["train", "gpt2", "--size", "tiny", "rum.stps=3"], "settings begin with run., optim., model. or task."),
        (["train", "gpt2", "--size", "tiny", "run.steps="], "run.steps= has no value; write one after the ="),
        (["train", "gpt2", "--size", "tiny", "model.widht=3"], "did you mean width"),
        (["train", "gpt2", "--size", "tiny", "run.steps=many"], "run.steps=many: give an integer"),
        (["train", "gpt2", "--size", "tiny", "steps"], "write path=value"),
        (["train", "gpt2", "--size", "tiny", "--data", "nowhere"], "there is no file or folder nowhere"),
        (["train", "gpt2", "--size", "tiny", "--data", "text.txt", "task.context=9999"], "longer than"),
        (["train", "gpt2", "--size", "tiny", "run.precision=fp16", "run.device=cpu"], "fp16 on a CPU"),
        (["train", "gpt2", "--size", "tiny", "run.device=moon"], "the device moon"),
        (["train", "GPT2"], "did you mean gpt2"),
        (["train", "gpt2", "--size", "tiny", "model.width=64.5"], "model.width=64.5: give an integer"),
        (
            ["train", "gpt2", "--size", "tiny", "task.valid=0"],
            "0 tokens for valid; give more text, or another task.valid",
        ),
        (["plan", "gpt2", "--size", "tiny", "--memory", "-3"], "--memory -3"),
        (["plan", "gpt2", "--size", "tiny", "--memory", "inf"], "--memory inf"),
        (["plan", "gpt2", "--size", "tiny", "--memory", "nan"], "--memory nan"),
        (["evaluate", "nothing"], "is not a run: there is no such folder"),
        (["resume", "nothing"], "is not a run"),
        (["generate", "nothing"], "is not a run"),
    ],
)
def test_a_wrong_argument_is_named(words, message, capsys):
    assert main(words) == 2
    assert message.lower() in capsys.readouterr().err.lower()


def test_a_fraction_is_not_rounded_to_an_integer(capsys):
    for words in (["resume", "run", "--steps", "2.6"], ["show", "pattern", "causal", "--length", "3.7"]):
        with pytest.raises(SystemExit):
            main(words)
        assert f"{words[-1]} is not an integer" in capsys.readouterr().err


def test_a_file_without_permission_is_named(place, monkeypatch, capsys):
    assert train("--out", "run") == 0

    def locked(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", locked)
    assert train("--out", "other") == 2
    assert "cannot use other (Permission denied); choose another path" in capsys.readouterr().err
    monkeypatch.setattr(Path, "read_text", locked)
    assert main(["evaluate", "run"]) == 2
    assert "recipe.json (Permission denied)" in capsys.readouterr().err


def test_a_run_without_its_tokenizer_is_refused(place, capsys):
    assert train("--out", "run", "task.tokenizer=characters") == 0
    (place / "run" / "characters.json").unlink()
    for verb in ("generate", "evaluate", "resume"):
        assert main([verb, "run"]) == 2
        assert "run/characters.json is missing; restore it: cp run/checkpoints/" in capsys.readouterr().err


def test_the_recipe_records_the_tokenizer_of_the_initial_weights(place, capsys):
    assert train("--out", "old", "task.tokenizer=characters") == 0
    assert train("--out", "new", "--init-from", "old") == 0
    assert json.loads((place / "new" / "recipe.json").read_text())["task"]["tokenizer"] == "characters"
    (place / "new" / "characters.json").unlink()
    assert main(["generate", "new"]) == 2
    assert "new/characters.json is missing" in capsys.readouterr().err


@pytest.mark.parametrize("pattern", ["hashed(2, 8, 16)", "chunked(2, 8, 16, False, True)"])
def test_the_metrics_of_a_model_that_sees_the_future_say_so(place, capsys, pattern):
    given = ["train", "reformer", "--size", "tiny", "--data", "text.txt", "--out", "run", *SMALL, "run.steps=1"]
    assert main([*given, f"model.pattern={pattern}"]) == 0 and main(["evaluate", "run"]) == 0
    told = " ".join(capsys.readouterr().out.split())  # in one line, however wide the terminal is
    assert told.count("leaks the future") == (told.count("bits per byte") if "chunked" in pattern else 0)


def test_only_resuming_needs_the_optimizer(place, capsys):
    assert train("--out", "run") == 0
    for file in (place / "run").rglob("optimizer.safetensors"):
        file.unlink()
    assert main(["evaluate", "run", "--step", "best"]) == 0 and main(["generate", "run", "--tokens", "3"]) == 0
    assert train("--out", "next", "--init-from", "run") == 0
    assert main(["resume", "run", "--steps", "7"]) == 2
    assert "optimizer.safetensors is missing; use an earlier checkpoint with --step 3" in capsys.readouterr().err


def test_images_that_do_not_fit_the_model_leave_no_folder(place, capsys):
    for number in range(8):
        (place / "pictures" / "ab"[number % 2]).mkdir(parents=True, exist_ok=True)
        Image.new("L", (10, 10), 9 * number).save(place / "pictures" / "ab"[number % 2] / f"{number}.png")
    given = ["train", "vit", "--size", "tiny", "--data", "pictures", "--out", "run", *SMALL, "run.batch=2"]
    assert main(given) == 2
    assert "set model.patch to a divisor of 10" in capsys.readouterr().err
    assert main([*given, "model.image=14"]) == 2
    assert (
        "have 10 x 10 pixels, which patches of 7 x 7 do not divide into the 5 tokens" in capsys.readouterr().err
        and not (place / "run").exists()
    )
    assert main([*given, "model.image=20", "model.patch=5"]) == 2
    assert "patches of 5 x 5 do not divide into the 17 tokens" in capsys.readouterr().err
    assert main([*given, "model.patch=5"]) == 0
    (place / "run" / "classes.json").write_text('{"kind": "im')
    assert main(["evaluate", "run"]) == 2
    assert "run/classes.json was changed after it was written; restore it: cp " in capsys.readouterr().err


def test_an_absent_device_is_not_proposed(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["train", "gpt2", "--size", "tiny", "run.device=moon"]) == 2
    assert capsys.readouterr().err.endswith("; try auto or cpu\n")


def test_an_existing_folder_is_not_overwritten(place, capsys):
    (place / "full").mkdir()
    (place / "full" / "mine.txt").write_text("keep me")
    assert train("--out", "full") == 2
    assert "already exists" in capsys.readouterr().err and (place / "full" / "mine.txt").read_text() == "keep me"


def test_a_mistyped_checkpoint_or_limit_is_answered_with_the_word(capsys):
    for words, told in (
        (["evaluate", "run", "--step", "bst"], "bst is neither a step nor best; did you mean best?"),
        (["generate", "run", "--step", "bst"], "did you mean best?"),
        (["resume", "run", "--step", "bst"], "did you mean best?"),
        (["evaluate", "run", "--limit", "al"], "al is neither a number nor all; did you mean all?"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert told in " ".join(capsys.readouterr().err.replace("│", " ").split())


@pytest.mark.parametrize(
    "setting, told",
    [
        ("run.steps=five", "give an integer"),
        ("run.steps=0", "give an integer >= 1"),
        ("optim.lr=x", "give a number"),
        ("optim.ema=2", "give a number < 1.0"),
        ("run.shard=maybe", "give true or false"),
        ("run.examples=x", "give an integer or none"),
        ("run.batch_schedule=3", "give a list in JSON, such as [[100, 8]]"),
    ],
)
def test_a_wrong_value_is_answered_with_what_to_give(setting, told, capsys):
    assert main(["train", "gpt2", "--size", "tiny", setting]) == 2
    assert capsys.readouterr().err == f"error: {setting}: {told}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["train", "gpt2", "--size="],
        ["train", "gpt2", "--data", ""],
        ["plan", "gpt2", "--task", ""],
        ["train", "gpt2", "--out", ""],
        ["evaluate", "run", "--data="],
        ["evaluate", "run", "--step="],
        ["evaluate", "run", "--limit", ""],
        ["predict", "run", "--column="],
        ["show", "pattern", "causal", "--out="],
        ["contracts", "gpt2", "--only="],
    ],
    ids=" ".join,
)
def test_an_empty_option_is_not_taken_for_none(words, capsys):
    """As after `--data "$DATA"` where DATA is not set: it would train on other data without a word."""
    with pytest.raises(SystemExit):
        main(words)
    name = next(word for word in words if word.startswith("--")).rstrip("=")
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"Invalid value for {name}: it is empty; give a value, or leave the option out" in said


def test_a_mistyped_setting_of_a_resumed_run_is_answered_with_its_name(place, capsys):
    assert train("--out", "run") == 0
    for setting, told in (
        ("optm.lr=3", "there is no setting 'optm.lr'; did you mean optim.lr?"),
        ("run.stps=9", "did you mean steps"),
        ("lr=3", "did you mean optim.lr?"),
        ("model.width=9", "model.width=9 cannot change when a run is resumed"),
        ("optim.ema=0.9", "optim.ema=0.9 cannot change when a run is resumed"),
    ):
        capsys.readouterr()
        assert main(["resume", "run", setting]) == 2
        assert told in capsys.readouterr().err


def test_a_run_that_another_process_writes_is_not_said_to_start(place, capsys):
    assert train("--out", "run") == 0
    shutil.rmtree(place / "run" / "checkpoints")
    capsys.readouterr()
    with (place / "run" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(["resume", "run"]) == 2
        told = capsys.readouterr()
        assert "run is in use" in told.err and "starts from step 0" not in told.out
    assert main(["resume", "run"]) == 0
    assert "run has no checkpoint, so it starts from step 0" in capsys.readouterr().out
