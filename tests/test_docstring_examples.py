"""The example in the docstring of every public name runs, and every public method has a docstring."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch

import everyformer
from everyformer.cli.main import main
from everyformer.value import Value
from tests.test_public_names import NAMES, examples

SETTINGS = ("run.steps=4", "run.batch=4", "run.evaluate=0", "run.final_examples=8", "run.save=4")
SHORTER = {  # what is replaced in the test, as in the blocks of a page
    "compare": {'"optim.warmup=20"': '"run.steps=16", "run.batch=4"', 'budget="10m"': "trials=2, seeds=2, workers=0"},
    "resume": {"steps=20": "steps=6"}, "train": {'"runs/first"': '"runs/again"'},
}  # fmt: skip
SHORTER["tune"] = SHORTER["Tuned"] = {'steps=2000"': 'steps=64", "run.batch=4"', 'txt"': 'txt", trials=2, workers=0'}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a text, a run, a classifier and an exported model."""
    path = tmp_path_factory.mktemp("examples")
    before = os.getcwd()
    os.chdir(path)
    (path / "my.txt").write_text("\n".join(f"{a} times {b} is {a * b}." for a in range(40) for b in range(40)))
    (path / "films.csv").write_text("text,label\n" + "a fine film,good\na dull film,bad\n" * 20)
    recipe = everyformer.Recipe.of("gpt2", *SETTINGS, size="tiny", data="my.txt")
    everyformer.train(recipe, "runs/first")
    everyformer.train(everyformer.Recipe.of("byte-classifier", *SETTINGS, size="tiny", data="films.csv"), "runs/films")
    assert main(["export", "runs/first", "--to", "hf", "--out", "exported"]) == 0
    yield path
    os.chdir(before)


@pytest.fixture
def names(folder) -> dict[str, Any]:
    """What the examples speak of: a network, its inputs and outputs, a body, models, runs."""
    torch.manual_seed(0)
    pair, network = everyformer.member("transformer", "tiny"), everyformer.build("gpt2", "tiny")
    token_BT, vector_BTD = torch.randint(256, (2, 8)), torch.randn(2, 8, 64)
    q, k, v = torch.randn(3, 2, 4, 8, 16).unbind(0)
    scope = {name: getattr(everyformer, name) for name in NAMES}
    return scope | {
        "everyformer": everyformer, "torch": torch, "network": network, "pair": pair.build(), "token_BT": token_BT,
        "source_BS": token_BT, "target_BT": token_BT, "segment_BT": torch.zeros(2, 8, dtype=torch.long),
        "x_BSD": vector_BTD, "q": q, "k": k, "v": v, "output": network(token_BT), "batcher": None,
        "encoder": pair.encoder, "decoder": pair.decoder, "body": network.value.body,
        "text": everyformer.to_json(network.value), "run": everyformer.load("runs/films", device="cpu"),
        "recipe": everyformer.Recipe.of("gpt2", *SETTINGS, size="tiny", data="my.txt"),
    }  # fmt: skip


def run_examples(name: str, names: dict[str, Any]) -> None:
    for text in examples(name):
        for old, new in SHORTER.get(name, {}).items():
            assert old in text
            text = text.replace(old, new)
        if isinstance(getattr(everyformer, name), type(Value)) and name not in ("Recipe", "Value"):
            assert isinstance(eval(text, names), Value)
        else:
            exec(f"{text}: ..." if text.startswith("class ") else text, names)


SEARCHES = ("compare", "Comparison", "tune", "Tuned")


@pytest.mark.parametrize("name", [name for name in NAMES if name not in SEARCHES])
def test_the_example_of_a_docstring_runs(name, names):
    run_examples(name, names)


def test_the_examples_of_searches_run(names):
    for name in SEARCHES:
        run_examples(name, names)


def test_the_example_of_the_package_runs(folder):
    lines = [line[4:] for line in (everyformer.__doc__ or "").splitlines() if line.startswith("    ")]
    short = ", ".join(f'"{one}"' for one in SETTINGS)
    text = "\n".join(lines).replace('"run.steps=500"', short).replace("runs/first", "runs/package")
    exec(text, {})
    assert (folder / "runs" / "package" / "model.json").is_file()


def test_every_public_method_has_a_docstring():
    for name in NAMES:
        kind = getattr(everyformer, name)
        for member, value in vars(kind).items() if isinstance(kind, type) else ():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if inspect.isfunction(function) and function.__module__.startswith("everyformer") and member[0] != "_":
                doc = inspect.getdoc(getattr(kind, member)) or ""
                assert doc and not doc.startswith("Define the computation"), f"{name}.{member}"
