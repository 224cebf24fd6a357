"""Every public name is found by dir() and by tab, and its docstring shows how it is used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import everyformer
from everyformer.value import Value

NAMES = sorted(set(everyformer.__all__) - {"__version__", "KERNELS"})


@pytest.mark.parametrize("name", ["load", "save", "train", "resume", "open_run", "Recipe", "generate", "contracts"])
def test_what_a_user_needs_is_found_by_tab(name):
    assert name in dir(everyformer) and getattr(everyformer, name) is not None


def test_dir_has_every_name_that_can_be_used():
    assert dir(everyformer) == sorted(everyformer.__all__) and "train" in dir(everyformer.train)


def test_importing_the_package_imports_no_torch():
    script = "import sys, everyformer; dir(everyformer); assert 'torch' not in sys.modules; everyformer.train"
    subprocess.run([sys.executable, "-c", script], check=True)


def examples(name: str) -> list[str]:
    """The expressions in a docstring of its own that use the name."""
    value = getattr(everyformer, name)
    doc = value.__doc__ or ""
    inherited = isinstance(value, type) and any(doc == base.__doc__ for base in value.__mro__[1:])
    code = re.findall(r"`([^`]+)`", "" if inherited else inspect.cleandoc(doc))
    lines = [line.strip() for line in doc.splitlines() if line.startswith("    ")]
    return [text for text in (*code, *lines) if uses(text, name)]


def uses(text: str, name: str) -> bool:
    """Is the text Python that calls the name, or passes it, or inherits from it?"""
    if text == name:
        return False
    try:
        tree = ast.parse(
            text.removeprefix(">>> ").partition("  #")[0].rstrip(":") + (": ..." if text.startswith("class") else "")
        )
    except SyntaxError:
        return False
    return any(
        (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
        for node in ast.walk(tree)
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_shows_how_the_name_is_used(name):
    assert examples(name), f"the docstring of {name} has no expression in backticks that uses it"


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in NAMES
        if isinstance(getattr(everyformer, name), type) and issubclass(getattr(everyformer, name), Value)
    ],
)
def test_the_example_of_a_value_is_valid(name):
    scope: dict[str, Any] = {one: getattr(everyformer, one) for one in NAMES}
    for text in examples(name):
        if not text.startswith("class"):
            eval(text, scope)
