"""The rules of the source tree: one direction of imports, short files and functions, and the field's words."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from everyformer.network.network import Network

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "everyformer"
FILES = sorted(SOURCE.rglob("*.py"))
ORDER = ("attention", "network", "family", "data", "infer", "task", "train", "study", "serve", "explore", "cli")
TRITON = SOURCE / "attention" / "kernels" / "programs.py"
PYTHON = [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
PAGES = [page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if page.name != "CHANGELOG.md"]
TEXTS = sorted([*PYTHON, *PAGES])

# Words that the field does not use, or uses for something else. A search for the left side must find nothing.
OLD_WORDS = {
    r"scenes?": "context",
    r"wirings?": "residual",
    r"slopes?": "gradient",
    r"squash": "activation",
    r"sight": "visible keys",
    r"(?<!any )(?<!no )further(?! back| tensors)": "auxiliary",
    r"both_ways": "bidirectional",
    r"both_sides=": "bidirectional=",
    r"objections?": "reason",
    r"live_share": "computed_fraction",
    r"how-manieth": "index",
    r"deviation=": "std=",
    r"Trail": "ReversibleTape",
    r"Past\(": "Cache(",
    r"CannotServe": "UnsupportedKernel",
}


SLOPES = re.compile(
    r"alibi|slope_H|m_h|paper's slopes|slope \* \(i - j\)|slopes = \[2|return slopes|linear_regression", re.I
)  # the words of ALiBi and of statistics


def identify(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", [path for path in FILES if path.relative_to(SOURCE).parts[0] in ORDER], ids=identify)
def test_imports_go_one_way(path):
    here = ORDER.index(path.relative_to(SOURCE).parts[0])
    for node in ast.walk(ast.parse(path.read_text())):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [name.name for name in node.names] if isinstance(node, ast.Import) else []
        for module in modules:
            parts = module.split(".")
            if parts[0] == "everyformer" and len(parts) > 1 and parts[1] in ORDER:
                assert ORDER.index(parts[1]) <= here, f"line {node.lineno} imports {module}"


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_files_and_functions_are_short(path):
    if path != TRITON:
        assert len(path.read_text().splitlines()) <= 400
        for function in functions(path):
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            assert length <= 60, f"{function.name} has {length} lines"


@pytest.mark.parametrize("path", FILES, ids=identify)
def test_constructors_have_at_most_ten_arguments(path):
    for function in functions(path):
        if function.name == "__init__":
            arguments = function.args
            count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
            assert count <= 10, f"line {function.lineno} has {count} arguments"


def test_the_call_of_a_network_has_at_most_eight_arguments():
    assert len(inspect.signature(Network.forward).parameters) - 1 <= 8


@pytest.mark.parametrize("path", [path for path in TEXTS if path != Path(__file__)], ids=identify)
def test_the_words_are_the_fields(path):
    text = path.read_text()
    for old, new in OLD_WORDS.items():
        for match in re.finditer(rf"(?<![A-Za-z]){old}(?![A-Za-z])", text):
            line = text[: match.start()].count("\n")
            context = text.splitlines()[line]
            if "slope" in old and SLOPES.search(context):
                continue
            raise AssertionError(f"line {line + 1}: write {new}, not {match.group()!r}: {context.strip()[:120]}")
