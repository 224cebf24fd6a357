"""Generated problems: answers equal literal ones, questions are in one split only, and guessing has the stated accuracy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everyformer.data.problems import LETTERS, PROBLEMS, SPLITS, TEXT, problem_name, split_of
from everyformer.data.synthetic import shakespeare
from tests.spec.problems import ANSWERS

NAMES = list(PROBLEMS)


def drawn(name, count=60):
    """Examples of every split and of some lengths."""
    problem = PROBLEMS[name]
    lengths = (problem.shortest, problem.shortest + 1, problem.length)
    return {
        split: [pieces for length in lengths for pieces in problem.examples(split, 3, range(count // 3), length)]
        for split in SPLITS
    }


@pytest.mark.parametrize("name", NAMES)
def test_answers_equal_the_definition(name):
    for rows in drawn(name).values():
        for pieces in rows:
            assert len(pieces) % 2 == 0 and all(pieces)
            assert ANSWERS[name]("".join(pieces[::2])) == "".join(pieces[1::2])


@pytest.mark.parametrize("name", NAMES)
def test_no_question_is_in_two_splits(name):
    questions = {split: {"".join(pieces[::2]) for pieces in rows} for split, rows in drawn(name).items()}
    for split, some in questions.items():
        assert {split_of(question) for question in some} == {split}
        assert not some & set().union(*(others for other, others in questions.items() if other != split))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_is_a_function_of_seed_and_index(name):
    problem = PROBLEMS[name]
    rows = problem.examples("train", 5, range(4), problem.length)
    assert problem.examples("train", 5, [3, 1], problem.length) == [rows[3], rows[1]]
    assert rows != problem.examples("train", 6, range(4), problem.length)
    assert len({"".join(pieces[::2]) for pieces in rows}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_characters_and_lengths_are_the_stated_ones(name):
    problem = PROBLEMS[name]
    for length in (problem.shortest, problem.length):
        for pieces in problem.examples("valid", 0, range(20), length):
            assert {*"".join(pieces)} <= {*problem.alphabet} and {*"".join(pieces[1::2])} <= {*problem.answers}
            assert len("".join(pieces)) <= problem.size(length)
            assert problem.is_label == (len("".join(pieces[1::2])) == 1) or name == "dyck"
    with pytest.raises(ValueError, match=rf"{name} has no questions of length {problem.shortest - 1}; give a length"):
        problem.check(problem.shortest - 1)


@pytest.mark.parametrize("name", NAMES)
def test_a_uniform_guesser_is_right_as_often_as_chance(name):
    """Within four standard errors; and no constant answer to a label is much better than that."""
    problem, random = PROBLEMS[name], np.random.RandomState(0)
    rows = problem.examples("train", 0, range(150), problem.length)
    answers = "".join("".join(pieces[1::2]) for pieces in rows)
    guesses = [problem.answers[index] for index in random.randint(len(problem.answers), size=len(answers))]
    right = np.mean([guess == answer for guess, answer in zip(guesses, answers, strict=True)])
    assert abs(right - problem.chance) < 4 * np.sqrt(problem.chance / len(answers))
    if problem.is_label:
        most = max(map(answers.count, problem.answers)) / len(answers)
        assert most < problem.chance + 4 * np.sqrt(problem.chance / len(answers))


def test_the_text_around_the_needle_has_the_characters_of_the_embedded_text():
    assert {*shakespeare()} - {*"0123456789"} == {*TEXT}


def test_keys_are_not_used_twice_and_lengths_are_bounded():
    (pieces,) = PROBLEMS["mqar"].examples("test", 0, [0], 104)
    given = pieces[0].split("=")[0]
    assert len(given) == 104 and len({*given[::2]}) == 52
    with pytest.raises(ValueError, match="mqar has no questions of length 106; give a length from 8 to 104"):
        PROBLEMS["mqar"].check(106)
    assert not {*LETTERS} & {*"*.="}


def test_a_file_of_the_same_name_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert problem_name("copy") == "copy" and problem_name("words") is None and problem_name(None) is None
    (tmp_path / "copy").write_text("a text")
    assert problem_name("copy") is None


def test_the_documentation_lists_every_problem():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for problem in PROBLEMS.values():
        lengths = ", ".join(map(str, problem.test_length))
        row = (f"`{problem.name}`", problem.tests, f"{problem.chance:.3g}", str(problem.length), lengths)
        assert f"| {' | '.join(row)} |" in page
