"""Every equation of the five sources has a line in the library that computes it and a test; the page of equations leads to both."""

from __future__ import annotations

import re

from docs.hooks.equations import NONE, ROOT, equations, marked, tables
from everyformer.sources import SOURCES


def test_every_equation_has_a_line_and_a_test_or_a_reason():
    known = set(equations())
    assert known - set(marked("src")) == known - set(marked("tests")) == set(NONE)


def test_every_mark_names_an_equation():
    assert set(marked("src")) | set(marked("tests")) <= set(equations())
    assert {number[0] for number in equations()} == set(SOURCES)


def test_the_numbers_of_a_source_have_no_gap():
    for letter in SOURCES:
        numbers = [int(re.findall(r"\d+", number)[0]) for number in equations() if number[0] == letter]
        assert numbers == sorted(numbers) and set(range(1, numbers[-1] + 1)) <= set(numbers)


def test_the_page_links_each_equation_to_the_marked_line():
    rows = re.findall(r'^\| <a id="(\w+)"></a>.*$', tables(SOURCES), re.M)
    assert rows == list(equations())
    for number, lines in marked("src").items():
        for path, at, _ in lines:
            text = (ROOT / path).read_text().splitlines()
            assert re.search(rf"# eq\. .*\b{number}\b", f"{text[at - 2]}\n{text[at - 1]}")
