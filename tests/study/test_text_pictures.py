"""Pictures as text: what stands in a line is the value that was given."""

from __future__ import annotations

import pytest
import torch

from everyformer.study.family_patterns import N, panels
from everyformer.study.family_patterns import draw as draw_family
from everyformer.study.text_pictures import MARKS, SHADES, curves, digit, matrix, points, shade


def test_a_character_is_the_value_rounded_up_to_a_quarter():
    assert [shade(value) for value in (0.0, 0.1, 0.25, 0.26, 0.75, 1.0)] == list(" ░░▒▓█")


def test_a_matrix_has_its_labels_and_values():
    value_RT = torch.tensor([[0.0, 0.5, 1.0], [0.25, 0.0, 0.75]])
    assert matrix(value_RT, ["a", "bc"], ["x", "long", "\n"], 40) == [
        "   xl·",
        "    o",
        "    n",
        "    g",
        " a│ ▒█│",
        "bc│░ ▓│",
    ]


@pytest.mark.parametrize("width", [12, 20, 60])
def test_no_line_is_wider_than_the_terminal(width):
    value_RT = torch.rand(2, 50)
    lines = matrix(value_RT, ["a", "b"], list("x" * 50), width)
    scale = -(-50 // (width - 3))
    assert all(len(line) <= width for line in lines if "stands" not in line)
    assert (f"a character stands for {scale} columns" in lines) == (scale > 1)
    means = [value_RT[0, start : start + scale].mean() for start in range(0, 50, scale)]
    assert lines[1] == "a│" + "".join(map(shade, map(float, means))) + "│"


def test_numbers_are_not_averaged():
    lines = matrix(torch.arange(20)[None] % 7, ["r"], [""] * 20, 12, digit)
    assert lines[0] == "r│" + "".join(str(at % 7) for at in range(0, 20, 3)) + "│"


def test_a_curve_goes_from_its_first_to_its_last_point():
    lines = curves([("one", [(1, 4.0), (5, 2.0), (9, 0.0)]), ("two", [(1, 0.0)])], "bits", 24, height=5)
    rows = [line.partition("│")[2] for line in lines[1:6]]
    assert lines[0] == "bits" and lines[1].startswith("4 │") and lines[5].startswith("0 │")
    assert rows[0] == MARKS[0] and rows[4][0] == MARKS[1] and rows[4].rstrip()[-1] == MARKS[0]
    assert rows[2] == " " * 10 + MARKS[0]
    assert lines[-2:] == [f"{MARKS[0]} one", f"{MARKS[1]} two"] and all(len(line) <= 24 for line in lines)
    assert curves([("one", [])], "bits", 24) == ["there is nothing to draw yet"]


def test_points_stand_where_they_are():
    lines = points(torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.5, 0.5]]), ["a", "b", "word"], 32)
    assert lines[1] == "│" + " " * 29 + "b│" and lines[-2] == "│a" + " " * 29 + "│"
    assert sum(line.count("·") for line in lines) == 1


def test_the_family_is_drawn_as_its_patterns_allow():
    found = panels()
    assert len(found) == 12 and all(panel.value_QK.shape == (N, N) for panel in found)
    figure = draw_family(found)
    assert [plot.get_title() for plot in figure.axes] == [panel.name for panel in found]
    cell = figure.axes[0].images[0].get_array()
    assert cell[0, 0].tolist() != cell[0, 1].tolist() == cell[3, 9].tolist()  # the past and the future
    assert set(SHADES) > set("".join(matrix(found[1].value_QK, [""] * N, [""] * N, 80))) - {"│"}
