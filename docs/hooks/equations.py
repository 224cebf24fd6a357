"""The page of equations: each equation of the sources, with the lines that compute it and those that test it.

A line that computes an equation ends in a comment such as "# eq. T2, W1", or stands below one. tests/spec/equations.txt has the names
of all equations. The page is made when the site is built, so its line numbers are always right; tests/test_equations.py checks that
no equation lacks a line.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[2]
MARK = "<!-- the equations -->"
COMMENT = re.compile(r"# eq\. ([TMBWK]\d+[a-z]?(?:, [TMBWK]\d+[a-z]?)*)$")
NONE = {"W12": "a step on the way to W13"}  # why an equation has no line


class Line(NamedTuple):
    """A line of the source or of a test that is marked with an equation, and the function or class that it is in."""

    path: str
    number: int
    name: str


def equations() -> dict[str, str]:
    """The name of every equation."""
    lines = (ROOT / "tests" / "spec" / "equations.txt").read_text(encoding="utf-8").splitlines()
    return {number: name for number, _, name in (line.partition(". ") for line in lines)}


@cache
def marked(folder: str) -> dict[str, list[Line]]:
    """The marked lines of all files in a folder, by equation."""
    found: dict[str, list[Line]] = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        marks = {number: match for number, line in enumerate(lines, 1) if (match := COMMENT.search(line))}
        tree = ast.parse(text) if marks else None
        for number, match in marks.items():
            assert tree is not None
            at = number + 1 if lines[number - 1].strip().startswith("#") else number
            for equation in match[1].split(", "):
                found.setdefault(equation, []).append(Line(str(path.relative_to(ROOT)), at, enclosing(tree, at)))
    return found


def enclosing(tree: ast.AST, line: int) -> str:
    """The name of the innermost function or method that has this line, such as Standard.build."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.lineno <= line <= (node.end_lineno or 0):
            return f"{node.name}.{enclosing(node, line)}".rstrip(".")
    return ""


def cell(lines: list[Line]) -> str:
    def link(line: Line) -> str:
        shown = line.path.removeprefix("src/everyformer/")
        return f"[{shown}:{line.number}](../{line.path}#L{line.number}) `{line.name}`"

    return "<br>".join(link(line) for line in lines)


def tables(sources: dict[str, str]) -> str:
    """One table for each source."""
    code, tests, parts = marked("src"), marked("tests"), []
    for letter, title in sources.items():
        parts.append(f"## {letter}: {title}\n\n| | equation | code | definition and test |\n| --- | --- | --- | --- |")
        for number, name in equations().items():
            if number.startswith(letter):
                places = (cell(code.get(number, [])) or NONE[number], cell(tests.get(number, [])) or NONE[number])
                parts[-1] += f'\n| <a id="{number}"></a>**{number}** | {name} | {" | ".join(places)} |'
    return "\n\n".join(parts)


def on_files(files: Files, config: MkDocsConfig) -> None:
    from everyformer.sources import SOURCES

    for file in files.documentation_pages():
        if MARK in file.content_string:
            file.content_string = file.content_string.replace(MARK, tables(SOURCES))
