"""Parts of your own on the command line: --import FILE for every command that builds a model.

Each part in PARTS is written to a file, put into a model, planned, checked, trained, saved and loaded.
"""

from __future__ import annotations

import sys

import msgspec
import pytest

from everyformer import member
from everyformer.cli.main import main
from everyformer.train.checksums import checksum, write_checksums
from everyformer.train.recipe import Recipe
from everyformer.value import from_json, to_json

OWN_PARTS = '''
import torch
from torch import nn

from everyformer import (
    Depth, FeedForward, Pattern, Residual, ScoreMod, ScoreModModule, Stack, Sublayer, SublayerModule, Value
)
from everyformer.network.residual import ResidualModule, StreamModule


class Dilated(Pattern, Value, frozen=True):
    """Every `step`-th key."""

    step: int

    def allows(self, b, h, q, k):
        return (q - k) % self.step == 0


class Penalized(ScoreMod, Value, frozen=True):
    """Subtracts a learned multiple of the distance."""

    start: float = 0.5

    def build(self, heads, key_width, value_width):
        return PenalizedModule(self.start)


class PenalizedModule(ScoreModModule):
    def __init__(self, start):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(start))

    def bias(self, q_BHQE, k_BHKE, scale, context):
        distance = context.positions
        return lambda b, h, i, j: -self.rate.to(q_BHQE.dtype) * (distance.query_at(b, i) - distance.key_at(b, j)).abs()


class Halved(Residual, Value, frozen=True):
    """Adds half of each sublayer's output."""

    norm = None

    def build(self, width):
        return HalvedModule()

    def build_stream(self, width):
        return StreamModule()


class HalvedModule(ResidualModule):
    def forward(self, stream, f, visible_BT):
        y, entry = f(stream)
        return stream + y / 2, entry


class Doubled(Depth, Value, frozen=True):
    """A stack of the given layers, twice."""

    layers: tuple
    residual: Residual

    def build(self, width):
        return Stack(2 * len(self.layers), self.layers, self.residual).build(width)


class Scaled(Sublayer, Value, frozen=True):
    """Multiplies every feature by a learned number."""

    def build(self, width):
        return ScaledModule(width)


class ScaledModule(SublayerModule):
    pointwise = True

    def __init__(self, width):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x, context, entry):
        return x * self.scale.to(x.dtype), None
'''
DILATED = {"type": "and", "parts": [{"type": "causal"}, {"type": "dilated", "step": 2}]}
# The path of a field in a tiny gpt2, and its new value in JSON.
PARTS = {
    "pattern": (("body", "layers", 0, "sublayers", 0, "pattern"), DILATED),
    "score mod": (("body", "layers", 0, "sublayers", 0, "score_mods"), [{"type": "penalized", "start": 0.25}]),
    "residual": (("body", "residual"), {"type": "halved"}),
    "sublayer": (("body", "layers", 0, "sublayers", 1), {"type": "scaled"}),
}
SMALL = ("--data", "text.txt", "run.steps=2", "run.batch=2", "run.evaluate=0", "run.examples=2", "run.device=cpu")


@pytest.fixture
def folder(place):
    yield place
    sys.modules.pop("my_parts", None)


@pytest.fixture(params=PARTS)
def model(request, folder, capsys):
    """A model with one part of our own, in model.json; the part is in my_parts.py."""
    (folder / "my_parts.py").write_text(OWN_PARTS)
    assert main(["family", "gpt2", "--size", "tiny", "--json"]) == 0
    tree = msgspec.json.decode(capsys.readouterr().out)
    path, value = PARTS[request.param]
    field = tree
    for name in path[:-1]:
        field = field[name]
    field[path[-1]] = value
    (folder / "model.json").write_bytes(msgspec.json.encode(tree))
    return "model.json"


def test_a_part_is_planned_checked_trained_saved_loaded_and_resumed(model, folder, capsys):
    own = ("--import", "my_parts.py")
    assert main(["family", model, *own]) == 0
    assert main(["plan", model, *own, *SMALL, "--no-measure"]) == 0
    assert "--import my_parts.py" in capsys.readouterr().err.partition("next: ")[2]
    assert main(["contracts", model, *own]) == 0
    assert main(["train", model, *own, *SMALL, "--out", "run"]) == 0
    assert (folder / "run" / "imports" / "my_parts.py").read_text() == OWN_PARTS
    assert "--import my_parts.py" in capsys.readouterr().err.partition("next: ")[2]
    capsys.readouterr()
    sys.modules.pop("my_parts")
    for words in (
        ["evaluate", "run", "--limit", "1"],
        ["generate", "run", "--tokens", "3"],
        ["show", "attention", "run"],
        ["resume", "run", "--steps", "3"],
    ):
        assert main(words) == 2
        assert "add --import run/imports/my_parts.py" in capsys.readouterr().err
        assert main([*words, "--import", "run/imports/my_parts.py"]) == 0, capsys.readouterr().err
    assert (folder / "run" / "checkpoints" / "00000003").is_dir()


def test_a_pattern_is_drawn(folder, capsys):
    (folder / "my_parts.py").write_text(OWN_PARTS.replace("Dilated", "EveryOther"))
    assert main(["show", "pattern", "causal & every_other(2)", "--length", "4", "--import", "my_parts.py"]) == 0
    assert "every_other(2)" in capsys.readouterr().out


def test_a_module_can_be_imported_by_name(folder, capsys):
    (folder / "named_parts.py").write_text(OWN_PARTS.replace("Dilated", "Sparser"))
    assert main(["show", "pattern", "sparser(2)", "--import", "named_parts"]) == 0
    sys.modules.pop("named_parts")


def test_an_unknown_part_in_json_names_the_remedy():
    from everyformer.network.residual import Residual

    with pytest.raises(ValueError, match=r"no residual is named 'mine'; .* with --import FILE on the command line"):
        from_json('{"type": "mine"}', Residual)


@pytest.mark.parametrize("name", ["recipe.json", "model.json", "mine.json"])
def test_a_file_with_an_unknown_part_is_not_called_broken(name, folder, capsys):
    value = member("gpt2", "tiny")
    (folder / "recipe.json").write_text(to_json(Recipe.of(value)))
    (folder / "model.json").write_text(to_json(value))
    (folder / "mine.json").write_text(to_json(value))
    (folder / "model.safetensors").touch()
    (folder / name).write_text((folder / name).read_text().replace("pre_norm", "my_norm"))
    write_checksums(folder, {one: (checksum(folder / one),) for one in ("recipe.json", "model.json")})
    words = {
        "recipe.json": ["evaluate", "."],
        "model.json": ["train", "gpt2", "--init-from", "."],
        "mine.json": ["plan", name],
    }
    assert main(words[name]) == 2
    error = capsys.readouterr().err
    assert f"{name}: no residual is named 'my_norm'" in error and "--import FILE" in error
    assert "restore" not in error and "cannot be read" not in error and "example" not in error


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.py", None, "there is no such file"),
        ("json.py", "", "a module named json exists already; rename the file"),
        ("broken_parts.py", "1 / 0", "fails with ZeroDivisionError: division by zero; correct the file"),
        ("no_such_module", None, "fails with ModuleNotFoundError"),
    ],
)
def test_an_import_that_fails_is_named(name, text, message, folder, capsys):
    if text is not None:
        (folder / name).write_text(text)
    assert main(["show", "pattern", "causal", "--import", name]) == 2
    assert message in capsys.readouterr().err
