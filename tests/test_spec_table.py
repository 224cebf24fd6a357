"""docs/spec.md names, for each item of the specification, where it is in the code, the test that holds it, and what is not done.

The words of the items are those of tests/spec/items.txt, and the page cannot change them. The tests say which items they hold by
`@pytest.mark.spec(...)`; these tests check that the page agrees with the marks, and that the modules it names exist. After a change
of marks or test names, write the page again:

    python -m tests.test_spec_table
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "spec.md"
SOURCE = ROOT / "src" / "everyformer"
LINK = re.compile(r"\[(\w+)\]\(\.\./(.+?)\)")
ROW = re.compile(r"^\| (?P<item>\d+) \| (?P<name>.+?) \| `(?P<module>.*?)` \|(?P<tests>.*)\|$", re.MULTILINE)
ITEMS = ROOT / "tests" / "spec" / "items.txt"
UNTESTED = (138,)  # an anecdote; a test must hold every other item
MEASURED = {  # the numbers of these items are in docs/results
    24: "claims",
    26: "claims",
    36: "claims",
    48: "recurrent",
    49: "experiments",
    56: "experiments",
    57: "experiments",
    110: "claims",
    128: "control",
}
NOT_DONE = {
    11: "former's form alt",
    66: "pretraining on 3.3 billion words; the number of parameters is tested, and pretraining on IMDb is measured",
    67: "the 0.93 bits per byte need the published weights of 1.5 billion parameters; the evaluation is tested on GPT-2 with "
    "random weights, against transformers",
    138: "not repeated",
}
OUTSIDE = ("tests/peers/", "tests/contracts/", "tests/device/")  # comparisons with other libraries come last


def marks() -> dict[int, list[str]]:
    """Each item with the tests that are marked with it, as path::name. Tests of few items come first."""
    items: dict[str, list[int]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.spec":
                        test = f"{path.relative_to(ROOT)}::{node.name}"
                        items.setdefault(test, []).extend(ast.literal_eval(number) for number in mark.args)
    tests: dict[int, list[str]] = {}
    for test in sorted(items, key=lambda test: (test.startswith(OUTSIDE), len(items[test]))):
        for item in items[test]:
            tests.setdefault(item, []).append(test)
    return tests


def ordered(match: re.Match[str], title: str, tests: list[str]) -> list[str]:
    """The tests of a row, with the main one first: the one that the page names, if it still holds the item, else one in the test
    file of the module that states an equation, or whose name has words of the item's."""
    name, path = next(iter(LINK.findall(match["tests"])), ("", ""))
    folder, _, file = match["module"].rpartition("/")
    mirror, words = f"tests/{folder}/test_{file}::", set(re.findall(r"[a-z]{3,}", title.lower()))

    def rank(test: str) -> tuple[bool, bool, int]:
        shared = words.intersection(test.partition("::")[2].split("_"))
        equation = bool(re.search("equation|definition|paper", test))
        return test != f"{path}::{name}", not test.startswith(mirror), -len(shared) - 2 * equation

    return sorted(tests, key=rank)


def titles() -> dict[int, str]:
    """The words of each item, as a cell of a Markdown table."""
    lines = (line.partition(". ") for line in ITEMS.read_text(encoding="utf-8").splitlines())
    return {int(number): escaped(words) for number, _, words in lines}


def escaped(words: str) -> str:
    """Stars of products, unlike those of bold words, and the characters of HTML and of tables are written as characters."""
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return re.sub(r"(?<!\*)\*(?!\*)", r"\\*", words)


def cell(tests: list[str]) -> str:
    """The tests of one item: the main one as a link, the others in a collapsed list."""
    if not tests:
        return ""
    first, *others = (f"[{test.partition('::')[2]}](../{test.partition('::')[0]})" for test in tests)
    if not others:
        return first
    return f"{first} <details><summary>{len(others)} more</summary>{'<br>'.join(others)}</details>"


def notes(item: int) -> str:
    """Where an item is measured, and what of it is not done."""
    found, page = [], MEASURED.get(item)
    if page and (PAGE.parent / "results" / f"{page}.md").exists():
        found.append(f"measured in [{page}](results/{page}.md)")
    elif page:
        found.append("**not done:** the measurement; `python -m bench.claims` makes it")
    if item in NOT_DONE:
        found.append(f"**not done:** {NOT_DONE[item]}")
    return "; ".join(found)


def written(page: str) -> str:
    """The page with the tests of every row replaced by those of the marks."""
    tests, names = marks(), titles()

    def row(match: re.Match[str]) -> str:
        item = int(match["item"])
        cells = (cell(ordered(match, names[item], tests.get(item, []))), notes(item))
        return f"| {item} | {names[item]} | `{match['module']}` | {'<br>'.join(filter(None, cells))} |"

    return ROW.sub(row, page)


def test_the_page_agrees_with_the_marks():
    page = PAGE.read_text(encoding="utf-8")
    assert [int(match["item"]) for match in ROW.finditer(page)] == list(titles()) == list(range(1, 139))
    assert page == written(page), "run: python -m tests.test_spec_table"


def test_a_test_holds_every_item():
    tests = marks()
    assert not [item for item in titles() if item not in tests and item not in UNTESTED]
    assert set(UNTESTED) <= NOT_DONE.keys()


def test_every_module_of_the_page_exists():
    page = PAGE.read_text(encoding="utf-8")
    assert not [
        match["module"]
        for match in ROW.finditer(page)
        if match["module"] != "-" and not (SOURCE / match["module"]).is_file()
    ]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
