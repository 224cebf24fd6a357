"""Charts are drawn inside their frame, in order, and say so if there is nothing to draw."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from everyformer.study.compare.chart import HEIGHT, LEFT, WIDTH, Series, chart


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize(
    "points", [[(1.0, 2.0), (2.0, 1.0), (8.0, 1.5)], [(3.0, 4.0)], [(1e-5, 1e9), (1e-2, 2e9)], [(1.0, 5.0), (4.0, 5.0)]]
)
def test_points_are_inside_and_in_order(points, log):
    root = ElementTree.fromstring(chart([Series("<a>", points, 0, line=False)], "x & y", "loss", log_x=log))
    circles = [node for node in root if node.tag == "circle"]
    xs, ys = ([float(node.attrib[name]) for node in circles] for name in ("cx", "cy"))
    assert xs == sorted(xs) and all(LEFT <= x <= WIDTH for x in xs) and all(0 <= y <= HEIGHT for y in ys)
    assert [y for _, y in sorted(zip((-one for _, one in points), ys, strict=True))] == sorted(ys)
    assert len([node for node in root if node.tag == "text"]) >= 3


def test_points_without_a_number_are_left_out():
    svg = chart([Series("a", [(1.0, math.nan), (2.0, 1.0), (3.0, 2.0)], 0)], "x", "y")
    assert len(re.findall(r"[\d.]+,[\d.]+", svg)) == 2 and "nan" not in svg
    assert (
        chart([], "x", "y")
        == chart([Series("a", [(1.0, math.nan)], 0)], "x", "y")
        == "<p>There is nothing to draw yet.</p>"
    )
