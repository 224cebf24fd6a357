"""The suite of diagnostics has every problem, its settings are legal, and the picture shows scores between chance and 1."""

from __future__ import annotations

import pytest

from everyformer.data.problems import PROBLEMS
from everyformer.study import suite
from everyformer.train.recipe import Recipe


def test_every_problem_is_in_the_suite_with_legal_settings():
    assert {name for name, _ in suite.SUITES["diagnostics"]} == {*PROBLEMS}
    for name, settings in suite.SUITES["diagnostics"]:
        recipe = Recipe.of("gpt2", *settings, size="tiny", data=name)
        data = recipe.task.open(name)
        assert data.problem is PROBLEMS[name] and data.length == data.test_lengths[0] == suite.LENGTHS[name]


def test_scores_are_scaled_between_chance_and_one():
    assert suite.scaled("parity", 0.5) == 0 == suite.scaled("parity", 0.3)
    assert suite.scaled("parity", 0.75) == 0.5 and suite.scaled("mqar", 1.0) == 1
    scores = [("gpt2", "mqar", 16, 1.0), ("gpt2", "mqar", 16, 0.55), ("gpt2", "mqar", 32, 0.1)]
    assert suite.table(scores) == {"gpt2": {("mqar", False): pytest.approx(0.75), ("mqar", True): 0}}


def test_the_picture_has_a_cell_for_each_score_and_a_dash_for_a_missing_one():
    figure = suite.draw([("gpt2", "mqar", 16, 1.0), ("lstm", "parity", 12, 0.75), ("lstm", "parity", 24, 0.5)])
    above, below = (
        [[text.get_text() for text in axes.texts][row * 2 : row * 2 + 2] for row in range(2)]
        for axes in figure.axes[:2]
    )
    assert (above, below) == ([["1.00", "–"], ["–", "0.50"]], [["–", "–"], ["–", "0.00"]])
    assert [label.get_text() for label in figure.axes[1].get_xticklabels()] == ["mqar", "parity"]


def test_a_profile_trains_each_member_and_tests_both_lengths():
    scores = list(suite.profile(["gpt2", "lstm"], ["parity"], steps=2))
    assert [score[:3] for score in scores] == [(member, "parity", n) for member in ("gpt2", "lstm") for n in (12, 24)]
    assert all(0 <= score[3] <= 1 for score in scores)
