"""docs/spec.md says which test holds each item; the tests say it by `@pytest.mark.spec(...)`. The two agree.

`python -m tests.test_spec_table` writes the table anew from the marks.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = ROOT / "docs" / "spec.md"
ROW = re.compile(r"^\| (\d+) \| (.+?) \| ?(.*?) ?\|$", re.MULTILINE)

# The items that must be held by a test.
HELD = [
    *range(1, 68),
    *range(69, 73),
    *range(74, 138),
]


def marks() -> dict[int, list[str]]:
    """Item -> the tests that are marked with it."""
    found: dict[int, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.spec":
                        for number in mark.args:
                            item = ast.literal_eval(number)
                            found.setdefault(item, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def written() -> dict[int, list[str]]:
    return {int(number): re.findall(r"`(.+?)`", tests) for number, _, tests in ROW.findall(TABLE.read_text())}


def test_the_table_says_what_the_marks_say():
    assert written() == marks(), "run: python -m tests.test_spec_table"


def test_every_item_is_held():
    found = marks()
    assert not [item for item in HELD if item not in found]


def write() -> None:
    text, found = TABLE.read_text(), marks()
    names = {int(number): name for number, name, _ in ROW.findall(text)}
    missing = [item for item in found if item not in names]
    assert not missing, f"docs/spec.md has no row for {missing}"
    head = text[: ROW.search(text).start()]
    rows = [
        f"| {item} | {names[item]} | {', '.join(f'`{test}`' for test in found.get(item, []))} |"
        for item in sorted(names)
    ]
    TABLE.write_text(head + "\n".join(rows) + "\n")


if __name__ == "__main__":
    write()
