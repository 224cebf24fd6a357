"""The benchmarks of members and of evaluation, and their commands."""

from __future__ import annotations

import json

import pytest
import torch

from everyformer.cli.main import main
from everyformer.family.table import find, members, parameters
from everyformer.infer import evaluate
from everyformer.study.bench_evaluate import bench as bench_evaluate
from everyformer.study.bench_family import bench, choose_members

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "name, task, generates",
    [("gpt2", "language", True), ("transformer", "translate", True), ("vit", "classify", False)],
)
def test_a_member_is_measured_on_its_task(name, task, generates):
    (speed,) = bench([name], CPU, batch=2, steps=2, tokens=4)
    assert speed.failure is None and (speed.member, speed.task) == (name, task)
    assert 0 < speed.steps.least <= speed.steps.median <= speed.steps.most and speed.steps.count == 2
    assert speed.steps.memory is not None and speed.steps.memory > 16 * speed.parameters
    assert speed.evaluated is not None and speed.evaluated > 0
    assert (speed.generated is not None) == generates


def test_the_parameters_are_those_of_the_member_with_its_data():
    (speed,) = bench(["gpt2"], CPU, batch=2, steps=1, tokens=1)
    assert speed.parameters == parameters(find("gpt2").value("tiny"))


def test_a_member_without_the_size_is_reported_and_the_others_are_measured(capsys, tmp_path):
    file, figure = tmp_path / "family.json", tmp_path / "family.png"
    words = "bench family gpt2 sparse-transformer --size tiny-strided --batch 2 --steps 1 --tokens 1 --device cpu"
    assert main([*words.split(), "--json", str(file), "--figure", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "gpt2                   failed: ValueError: gpt2 has no size 'tiny-strided'" in out
    first, second = json.loads(file.read_text())["rows"]
    assert first["failure"] and second["failure"] is None and second["generated"] > 0
    assert figure.stat().st_size > 5_000


def test_all_members_are_chosen_unless_some_are_named():
    assert choose_members([]) == members() and choose_members(["t5"]) == ["t5"]


def test_an_evaluation_computes_each_position_twice():
    """The positions are those of the windows that the evaluation makes."""
    size, window = 1024, 64
    forward, evaluated = bench_evaluate(CPU, size, repeats=1, model_size="tiny")
    windows = sum(len(end_B) for end_B, _ in evaluate._batches(size - 1, window, window // 2, 32, None))
    assert forward.scored is None and evaluated.scored is not None
    assert evaluated.positions / evaluated.scored == pytest.approx(windows * window / (size - 1))


@pytest.mark.parametrize(
    "words, reason",
    [
        ("family gtp2", "no member of the family is named 'gtp2'; did you mean gpt2"),
        ("family --steps 0", "each must be 1 or more"),
        ("evaluate --size 12", "size and repeats are 12 and 5; give 1024 bytes or more"),
        ("evaluate --figure x.txt", "x.txt has the suffix .txt, which is not an image type"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(words, reason, capsys):
    assert main(["bench", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert reason in err and "matrix" not in out
