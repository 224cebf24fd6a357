"""Entries are made equal by their width, or by their steps."""

from __future__ import annotations

import pytest

from everyformer import member
from everyformer.network.size import parameters, parameters_without_embeddings
from everyformer.study.compare.match import quantity, solve, width_settings
from everyformer.train import Recipe
from everyformer.train.recipe import override

SETTINGS = ("run.batch=4", "task.context=16", "run.device=cpu")


@pytest.mark.parametrize("target", [1.0, 30.0, 99.0, 100.0, 1e6, 5e7])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_solution_is_the_closest_integer(target, power):
    tried: list[int] = []

    def measure(number: int) -> float:
        tried.append(number)
        return float(number**power)

    found = solve(measure, 8, target)
    if power > 1 or target < 1e6:
        ratio = max(found**power / target, target / found**power)
        assert all(ratio <= max(n**power / target, target / n**power) for n in (found + 1, max(1, found - 1)))
        assert len(tried) <= 24


@pytest.mark.parametrize(
    "name", ["transformer-xl", "lstm", "llama", "reformer", "universal-transformer", "transformer"]
)
def test_members_get_equal_parameters(name):
    baseline = Recipe.of("gpt2", *SETTINGS, "model.width=128", size="tiny")
    target = quantity("parameters", baseline, baseline.task.open(None))
    task = "language" if name != "transformer" else None
    recipe = Recipe.of(name, *SETTINGS, size="tiny", task=task)
    data = recipe.task.open(None)
    found = override(recipe, width_settings("parameters", recipe, data, target))
    assert found.model["width"] % (2 if name == "lstm" else 4) == 0
    assert quantity("parameters", found, data) == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("match", ["flops", "memory"])
def test_operations_and_memory_are_matched_too(match):
    baseline = Recipe.of("gpt2", *SETTINGS, size="tiny")
    target = quantity(match, baseline, baseline.task.open(None))
    recipe = Recipe.of("lstm", *SETTINGS, size="tiny")
    found = override(recipe, width_settings(match, recipe, recipe.task.open(None), target))
    assert found.model["width"] != 64
    assert quantity(match, found, found.task.open(None)) == pytest.approx(target, rel=0.05)


def test_a_width_that_is_given_is_kept():
    recipe = Recipe.of("lstm", "model.width=20", size="tiny")
    assert width_settings("parameters", recipe, recipe.task.open(None), 1e6) == ()


def test_parameters_without_embeddings_are_those_of_the_layers():
    gpt2 = member("gpt2", "tiny")
    assert parameters_without_embeddings(gpt2) == parameters(gpt2) - 256 * 64 - 64 * 64
    assert parameters_without_embeddings(member("gpt2", "tiny", vocabulary=999)) == parameters_without_embeddings(gpt2)
    lstm = member("lstm", "tiny")
    assert parameters_without_embeddings(lstm) == parameters(lstm) - 2 * 256 * 64 - 256
