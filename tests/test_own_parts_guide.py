"""The guide docs/own_parts.md shows a part of each kind, and each is short. tests/test_pages.py runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parent.parent / "docs" / "own_parts.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
PARTS = [block for block in PYTHON if block.startswith("# my_parts.py")]


@pytest.mark.parametrize("block", PARTS, ids=lambda block: block.splitlines()[0])
def test_each_part_takes_at_most_25_lines_of_code(block):
    code = [line for line in block.splitlines() if line.strip() and not line.startswith(("#", "import ", "from "))]
    assert len(code) <= 25


def test_all_five_kinds_of_parts_are_shown():
    shown = {re.search(r"class \w+\((\w+), Value", block)[1] for block in PARTS}
    assert shown == {"Pattern", "ScoreMod", "Residual", "Depth", "Sublayer"}
