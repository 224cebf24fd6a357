"""The pages of the family are what the members say, and every member says what a reader needs: idea, the paper's counts, departures."""

from __future__ import annotations

import inspect
import re

import pytest

from everyformer.family.table import MEMBERS, parameters
from everyformer.train.recipe import Recipe
from tests.family.make_family_page import IMAGES, differs, drawn_patterns, pages

every_member = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS)


def test_the_pages_are_up_to_date():
    for path, text in pages().items():
        assert path.read_text(encoding="utf-8") == text, "run: python -m tests.family.make_family_page"
    assert {path.stem for path in IMAGES.glob("*.md")} == set(MEMBERS)


def test_every_member_that_attends_has_an_image_and_no_other_image_exists():
    names = {f"{member.name}.png" for member in MEMBERS.values() if drawn_patterns(member)}
    assert {path.name for path in IMAGES.glob("*.png")} == names
    assert all(path.stat().st_size < 20_000 for path in IMAGES.glob("*.png"))


@every_member
def test_the_idea_is_two_sentences(member):
    assert len(re.findall(r"[^.]+\.(?:\s|$)", member.idea)) == 2


@every_member
def test_every_size_has_the_papers_count_or_none(member):
    assert set(member.paper_parameters) == {size for size in member.sizes if not size.startswith("tiny")}
    assert set(member.departures) <= set(member.sizes) and member.size in member.sizes


@every_member
def test_every_count_that_differs_from_the_papers_has_a_reason(member):
    for size, stated in member.paper_parameters.items():
        if differs(parameters(member.value(size)), stated):
            assert member.departures.get(size), f"{member.name} {size} has another count than the paper, and no reason"


def test_a_count_is_compared_with_the_digits_that_the_paper_gives():
    assert not differs(38_600_000, 39) and differs(38_400_000, 39) and not differs(1, None)
    assert not differs(66_380_000, 66.4) and differs(66_300_000, 66.4)


@every_member
def test_the_function_of_a_member_has_ten_to_twenty_lines(member):
    assert 10 <= len(inspect.getsource(member.make).splitlines()) <= 20


@every_member
def test_the_command_of_a_member_makes_a_recipe(member):
    recipe = Recipe.of(member.name, size="tiny")
    assert set(recipe.model) == {
        setting.partition("=")[0].removeprefix("model.")
        for setting in member.recipes.get("tiny", ())
        if setting.startswith("model.")
    }
    assert recipe.value({}) == member.value("tiny", **recipe.model)
