"""The pages of the documentation are true: every block of code on them runs, and every quotation of the source is as the source is.

The blocks of a page run one after the other, in one empty folder and with one set of Python names, as a reader would type them. A
block that begins with "# my_parts.py" is added to that file. A comment in the line above a block says what else to do:

    <!-- source: src/everyformer/attention/attend.py check_kernel -->    the block is that function, or "eq. T2", the lines with that mark
    <!-- tested by tests/serve/test_page.py -->                          another test runs it
    <!-- in the test: run.steps=5 run.batch=8 -->                        its runs have these settings, so that they are short

`python -m tests.test_pages` writes the quotations again.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from everyformer.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^(?:<!-- (?P<comment>[^\n]*) -->\n)?```(?P<kind>\w+)\n(?P<code>.*?)^```$", re.M | re.S)
NOT_CODE = ("text", "math")
MEASURED = ROOT / "docs" / "results"  # the logs of its commands are kept
FAMILY = ROOT / "docs" / "family"  # tests/family/test_family_page.py has their commands


class Block(NamedTuple):
    kind: str
    code: str
    comment: str


def blocks(page: Path) -> list[Block]:
    matches = FENCE.finditer(page.read_text(encoding="utf-8"))
    return [Block(match["kind"], match["code"], match["comment"] or "") for match in matches]


def code(page: Path) -> list[Block]:
    """The blocks that this file runs."""
    if page.is_relative_to(MEASURED) or page.is_relative_to(FAMILY) or page.name == "family.md":
        return []
    return [
        one for one in blocks(page) if one.kind not in NOT_CODE and not one.comment.startswith(("source", "tested"))
    ]


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory, whose my_parts.py can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    yield tmp_path
    sys.modules.pop("my_parts", None)


def run_command(command: str, settings: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    program, *arguments = shlex.split(command, comments=True)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program == "pip":
        line = f"#     {command.partition(' -e ')[0]} -e .\n"
        assert line in (ROOT / "constraints.txt").read_text()  # the one way to install
    else:
        assert program == "everyformer", command
        assert main(arguments + (settings if arguments[0] == "train" else [])) == 0, command
        assert "next: everyformer" in capsys.readouterr().err


@pytest.mark.parametrize("page", [page for page in PAGES if code(page)], ids=name)
def test_the_blocks_of_a_page_run_one_after_the_other(page, folder, capsys):
    names: dict[str, object] = {"__name__": "__main__"}
    for kind, text, comment in code(page):
        if kind == "sh":
            settings = comment.removeprefix("in the test: ").split() if comment.startswith("in the test") else []
            for command in text.replace("\\\n", " ").splitlines():
                run_command(command, settings, capsys)
        elif text.startswith("# my_parts.py"):
            with (folder / "my_parts.py").open("a") as file:
                file.write(f"{text}\n\n")
        else:
            assert kind == "python", f"a block of {kind}: say by a comment which test reads it"
            exec(compile(text, name(page), "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_block_that_another_test_runs_is_named_there(page):
    for block in blocks(page):
        if block.comment.startswith("tested"):
            test = ROOT / block.comment.removeprefix("tested by ")
            assert test.is_file() and page.name in test.read_text()


def quotation(path: str, what: str) -> str:
    """A function of a file, without its docstring, or the lines with a mark."""
    text = (ROOT / path).read_text(encoding="utf-8")
    lines = text.splitlines()
    if what.startswith("eq. "):
        marks = what.removeprefix("eq. ").split(", ")
        found = [line for line in lines if re.search(rf"# eq\. .*\b(?:{'|'.join(marks)})\b", line)]
        assert len(found) >= 1, f"{path} has no line with {what}"
        return textwrap.dedent("\n".join(found)) + "\n"
    nodes = [ast.parse(text)]
    for part in what.split("."):
        children = [child for node in nodes for child in node.body if getattr(child, "name", None) == part]
        assert len(children) == 1, f"{path} has no {what}"
        nodes = children
    (node,) = nodes
    kept = list(range(node.lineno, node.end_lineno + 1))
    if ast.get_docstring(node):
        kept = [number for number in kept if not node.body[0].lineno <= number <= node.body[0].end_lineno]
    return textwrap.dedent("\n".join(lines[number - 1] for number in kept)).strip() + "\n"


def quoted(page: str) -> str:
    """The page with all quotations as the source is."""

    def block(match: re.Match[str]) -> str:
        comment = match["comment"] or ""
        if not comment.startswith("source: "):
            return match[0]
        path, _, what = comment.removeprefix("source: ").partition(" ")
        return f"<!-- {comment} -->\n```python\n{quotation(path, what)}```"

    return FENCE.sub(block, page)


@pytest.mark.parametrize("page", sorted((ROOT / "docs/learn").glob("[0-9]*.md")), ids=name)
def test_a_chapter_has_an_equation_its_code_a_picture_and_an_exercise_with_its_solution(page):
    text = page.read_text(encoding="utf-8")
    has = ("```math", "<!-- source: src/", "](pictures/", "## Exercise", "<summary>Solution</summary>")
    assert [one for one in has if one not in text] == [] and len(list(page.parent.glob("[0-9]*.md"))) == 12


@pytest.mark.spec(68)
def test_the_features_of_movies_are_learned_from_likes_alone():
    """Learned dot products are right about nearly all likes that were not given, where a guess is right about half of them."""
    names: dict[str, Any] = {}
    for block in code(ROOT / "docs/learn/01_self_attention.md"):
        exec(compile(block.code, "01_self_attention.md", "exec"), names)
    unknown_QK = ~names["known_QK"]
    assert names["right_QK"][unknown_QK].float().mean() > 0.9
    assert 0.4 < names["like_QK"][unknown_QK].float().mean() < 0.6


@pytest.mark.spec(73)
def test_fields_that_are_only_cited_have_links():
    """The papers that source T cites for music, questions about images, dynamics and Hopfield networks."""
    reading = (ROOT / "docs/learn/index.md").read_text(encoding="utf-8").partition("## Further reading")[2]
    cited = re.findall(r": (\w+), [^:]* et al\. (\d{4}), \[[^]]+\]\(https://arxiv\.org/abs/([\d.]+)\)\.\n", reading)
    papers = ["Huang 2019 1809.04281", "Fukui 2016 1606.01847", "Lu 2019 1906.02762", "Ramsauer 2020 2008.02217"]
    assert [" ".join(paper) for paper in cited] == papers


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_quotations_are_as_the_source_is(page):
    text = page.read_text(encoding="utf-8")
    assert text == quoted(text), "run: python -m tests.test_pages"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = set(re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", prose))
    assert [link for link in links if not (page.parent / link).exists()] == []


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(quoted(page.read_text(encoding="utf-8")), encoding="utf-8")
