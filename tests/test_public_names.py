"""Every public name is found by dir() and by tab, and its docstring shows how it is used."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys

import pytest

import everyformer

NAMES = sorted(set(everyformer.__all__) - {"__version__", "KERNELS"})


@pytest.mark.parametrize("name", ["load", "save", "train", "resume", "Recipe", "generate", "contracts"])
def test_what_a_user_needs_is_found_by_tab(name):
    assert name in dir(everyformer) and getattr(everyformer, name) is not None


def test_dir_has_every_name_that_can_be_used():
    assert dir(everyformer) == sorted(everyformer.__all__) and "train" in dir(everyformer.train)


def test_importing_the_package_imports_no_torch():
    script = "import sys, everyformer; dir(everyformer); assert 'torch' not in sys.modules; everyformer.train"
    subprocess.run([sys.executable, "-c", script], check=True)


def examples(name: str) -> list[str]:
    """The expressions in backticks, in a docstring of its own, that use the name."""
    value = getattr(everyformer, name)
    doc = value.__doc__ or ""
    inherited = isinstance(value, type) and any(doc == base.__doc__ for base in value.__mro__[1:])
    return [] if inherited else [text for text in re.findall(r"`([^`]+)`", doc) if uses(text, name)]


def uses(text: str, name: str) -> bool:
    """Is the text Python that calls the name, passes it or inherits from it?"""
    try:
        tree = ast.parse(f"{text}: ..." if text.startswith("class ") else text)
    except SyntaxError:
        return False
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    names += [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return name in names and text != name


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_says_what_every_argument_is(name):
    value = getattr(everyformer, name)
    named = [
        one
        for one in inspect.signature(value).parameters.values()
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
    ]
    doc = inspect.getdoc(value) or ""
    missing = [one.name for one in named if not re.search(rf"`{one.name}`|^{one.name}\s{{2,}}", doc, re.M)]
    assert not missing, f"the docstring of {name} does not say what {', '.join(missing)} is"


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_shows_how_the_name_is_used(name):
    assert examples(name), f"the docstring of {name} has no expression in backticks that uses it"
