"""The published recipes: every one is read, and a member without one is refused with the reason."""

from __future__ import annotations

import math

import pytest

from everyformer.family.published import PUBLISHED, UNAVAILABLE
from everyformer.family.table import MEMBERS
from everyformer.train.recipe import Recipe

SIZES = [(name, size) for name, one in PUBLISHED.items() for size in one.sizes]


def test_every_member_has_a_published_recipe_or_a_reason():
    assert PUBLISHED.keys() | UNAVAILABLE.keys() == MEMBERS.keys()
    assert not PUBLISHED.keys() & UNAVAILABLE.keys()


@pytest.mark.parametrize(("member", "size"), SIZES)
def test_every_published_setting_is_in_the_recipe(member, size):
    recipe = Recipe.of(member, size=size, published=True)
    given = PUBLISHED[member].of(size)
    paths = [setting.partition("=")[0] for setting in given]
    assert len(set(paths)) == len(paths)
    assert recipe == Recipe.of(member, *given, size=size)
    assert recipe != Recipe.of(member, size=size)


@pytest.mark.parametrize("size", ["base", "big"])
def test_the_rate_of_the_transformer_is_that_of_its_equation_3(size):
    recipe = Recipe.of("transformer", size=size, published=True)
    width = MEMBERS["transformer"].sizes[size]["width"]
    assert math.isclose(recipe.optim.lr, width**-0.5 * recipe.optim.warmup**-0.5, rel_tol=1e-6)


def test_llama_2_is_trained_on_two_trillion_tokens():
    recipe = Recipe.of("llama", size="2-7b", published=True)
    assert math.isclose(recipe.run.batch * 4096 * recipe.run.steps, 2e12, rel_tol=1e-6)


def test_your_own_settings_replace_published_ones():
    recipe = Recipe.of("bert", "optim.lr=2e-4", published=True)
    assert (recipe.optim.lr, recipe.optim.warmup) == (2e-4, 10000)


@pytest.mark.parametrize(
    ("member", "options", "reason"),
    [
        ("adaptive-span", {}, "adaptive-span has no published recipe: its authors trained with Adagrad"),
        ("gpt2", {"size": "tiny"}, "no published recipe for the size tiny: .* small, medium, large, xl"),
        ("bert", {"task": "classify"}, "the published recipe of bert is for its own task"),
        (MEMBERS["gpt2"].value("tiny"), {}, "it is a model of your own"),
    ],
)
def test_where_there_is_no_published_recipe_the_reason_is_named(member, options, reason):
    with pytest.raises(ValueError, match=reason):
        Recipe.of(member, published=True, **options)
