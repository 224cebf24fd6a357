"""Every setting has a meaning and an example that works; completion offers verbs, members, sizes and settings."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from everyformer.cli.complete import SCRIPTS, candidates
from everyformer.cli.main import app, main
from everyformer.cli.settings_listing import compute_listing, read_listing, settings_of
from everyformer.family.table import MEMBERS, find
from everyformer.task.language import Language
from everyformer.task.table import task_for
from everyformer.train.recipe import Recipe

LISTING = read_listing()


def test_the_stored_listing_is_that_of_the_values():
    again = "python -m everyformer.cli.settings_listing writes it again"
    assert json.loads(json.dumps(compute_listing())) == LISTING, again


def test_every_setting_has_a_meaning():
    rows = [*LISTING["run"], *LISTING["optim"], *(row for task in LISTING["tasks"].values() for row in task)]
    rows += [row for member in LISTING["members"].values() for row in member["model"]]
    assert [row["name"] for row in rows if len(row["meaning"]) < 8] == []


@pytest.mark.parametrize("task", LISTING["tasks"])
def test_the_examples_of_a_task_are_valid_settings(task):
    for row in (*LISTING["tasks"][task], *LISTING["optim"], *LISTING["run"]):
        Recipe.of("gpt2", row["example"], size="tiny", task=task)


@pytest.mark.parametrize("member", MEMBERS)
def test_the_examples_of_a_member_are_valid_settings(member):
    for row in LISTING["members"][member]["model"]:
        Recipe.of(member, row["example"], size="tiny")


def test_settings_and_train_list_the_defaults_of_a_size(capsys):
    assert main(["settings", "gpt2", "--size", "tiny", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["model.width"]["default"], rows["run.steps"]["default"]) == (64, 1000)
    assert rows.keys() == {row["name"] for row in settings_of("gpt2", None, None)}
    assert main(["train", "gpt2", "--settings"]) == 0
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("model.width", "768", "peak learning rate", "run.precision=bf16"))
    assert main(["settings", "gtp2"]) == 2
    assert "did you mean gpt2" in capsys.readouterr().err


@pytest.mark.parametrize("member", MEMBERS)
def test_the_listed_learning_rate_and_warm_up_are_those_of_a_run(member):
    for size in MEMBERS[member].sizes:
        rows = {row["name"]: row["default"] for row in settings_of(member, size, None)}
        recipe = Recipe.of(member, size=size)
        assert rows["optim.lr"] == recipe.optim.lr, size
        assert rows["optim.warmup"] == recipe.optim.warmup, size


@pytest.mark.parametrize("member", [name for name in MEMBERS if "tiny" in MEMBERS[name].sizes])
def test_the_examples_of_a_size_are_valid_and_not_its_defaults(member):
    for row in settings_of(member, "tiny", None):
        if row["name"].startswith("model."):
            Recipe.of(member, row["example"], size="tiny")
            assert row["example"] != f"{row['name']}={json.dumps(row['default'])}"
    (width,) = (row for row in settings_of("gpt2", "tiny", None) if row["name"] == "model.width")
    assert width["example"] == "model.width=128"


def test_the_listed_learning_rate_is_that_of_the_task():
    rates = {
        task: {row["name"]: row["default"] for row in settings_of("lstm", "tiny", task)}["optim.lr"]
        for task in ("language", "classify")
    }
    assert rates == {task: Recipe.of("lstm", size="tiny", task=task).optim.lr for task in rates}
    assert rates["language"] == 4 * rates["classify"]


def test_the_recipe_of_a_size_is_listed_and_the_users_settings_come_after_it():
    rows = {row["name"]: row["default"] for row in settings_of("speedrun", "tiny", None)}
    recipe = Recipe.of("speedrun", size="tiny")
    assert (rows["optim.name"], rows["run.steps"], rows["task.context"]) == ("muon", 200, 128)
    assert (recipe.optim.name, recipe.run.steps, recipe.task.context) == ("muon", 200, 128)
    changed = Recipe.of("speedrun", "run.steps=7", "optim.name=adamw", size="tiny")
    assert (changed.run.steps, changed.optim.name, changed.task.context) == (7, "adamw", 128)
    other = {row["name"]: row["default"] for row in settings_of("speedrun", "tiny", "denoise")}
    assert other["run.steps"] == Recipe.of("speedrun", size="tiny", task="denoise").run.steps == 1000


@pytest.mark.parametrize("member", MEMBERS)
def test_the_recipes_of_a_member_are_those_of_its_sizes(member):
    assert MEMBERS[member].recipes.keys() <= MEMBERS[member].sizes.keys()
    for size in MEMBERS[member].recipes:
        Recipe.of(member, size=size)


def test_a_tiny_language_model_is_trained_without_dropout_on_texts_alone():
    for member, kind in MEMBERS.items():
        if "tiny" in kind.sizes and "dropout" in kind.settings() and isinstance(task_for(member, "tiny"), Language):
            recipe = Recipe.of(member, size="tiny", data="mine.txt")
            assert recipe.value({}) == find(member).value("tiny", dropout=0.0), member
    assert Recipe.of("gpt2", "model.dropout=0.2", size="tiny").model == {"dropout": 0.2}
    assert "dropout" not in Recipe.of("gpt2", size="tiny", data="copy").model


@pytest.mark.parametrize("columns", ["40", "60", "80", "200"])
def test_settings_fit_the_terminal(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["settings", "universal-transformer"]) == 0
    lines = capsys.readouterr().out.partition("\nnext:")[0].splitlines()
    assert max(map(len, lines)) <= int(columns) and not any("…" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tr",), ["train"]),
        (("train", "gp"), ["gpt2"]),
        (("train", "gpt2", "--size", "la"), ["large"]),
        (("train", "gpt2", "--task", "mas"), ["masked"]),
        (("train", "gpt2", "--si"), ["--size"]),
        (("train", "gpt2", "run.see"), ["run.seed="]),
        (("train", "gpt2", "model.lay"), ["model.layers="]),
        (("train", "gpt2", "task.context"), ["task.context=", "task.context_schedule="]),
        (("train", "gpt2", "run.precision=b"), ["run.precision=bf16"]),
        (("plan", "gtrxl", "--task", "popgym:X", "task.epi"), ["task.episodes="]),
        (("resume", "runs/x", "optim."), []),
        (("resume", "runs/x", "run.kee"), ["run.keep="]),
        (("show", "pat"), ["pattern"]),
        (("family", "--diff", "ber"), ["bert"]),
        (("train", "gpt2", "--data", "te"), []),  # a file
        (("nonsense", ""), []),
    ],
)
def test_candidates(words, expected):
    assert candidates(app, words) == expected


def test_bash_completes_after_an_equals_sign():
    python = f"{sys.executable} -m everyformer"
    script = f"""everyformer() {{ {python} "$@"; }}
{SCRIPTS["bash"]}
compopt() {{ :; }}
COMP_LINE="everyformer train gpt2 optim.schedule=c" COMP_POINT=39
_everyformer; printf '%s ' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["constant", "cosine"], done.stderr


def test_completion_does_not_wait_for_torch():
    words = ["complete", "train", "gpt2", "run."]
    code = f"import sys; from everyformer.cli.main import main; main({words}); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "run.steps=" in done.stdout.split(), done.stderr
