"""The README and docs/design.md are true: the folders exist and the tables are complete. tests/test_pages.py runs their code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import everyformer
from everyformer.attention.attend import KERNELS
from everyformer.study.contracts import CONTRACTS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)]
COMMANDS = [line for block in BLOCKS for line in block]
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)


def test_commands_for_setting_up_are_shown():
    assert {"make demo", "make test", "pip install -c constraints.txt -e ."} <= set(COMMANDS)


def test_first_screen_has_a_picture_eight_lines_of_python_two_commands_and_a_table():
    screen = TEXT[: TEXT.index("## Install")]
    assert "![" in screen and "make demo\nmake test" in screen and "| measured |" in screen
    assert len([line for line in PYTHON[0].splitlines() if line]) <= 8


def test_what_the_library_offers_is_what_type_checkers_see():
    tree = ast.parse(Path(everyformer.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {name.name for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == set(everyformer.__all__) - {"__version__"}
    assert all(getattr(everyformer, name) is not None for name in seen)


def test_the_choices_of_the_five_questions_are_names_of_the_library():
    rows = re.findall(r"^\| (?:who|how|what) [^|]*\|.*\| (.*) \|$", TEXT, re.M)
    assert len(rows) == 5
    assert all(hasattr(everyformer, name) for row in rows for name in re.findall(r"`(\w+)`", row))


def test_the_tree_is_the_source():
    (tree,) = re.findall(r"```text\nsrc/everyformer/\n(.*?)```", TEXT, re.S)
    folders = re.findall(r"^  (\w+)/ ", tree, re.M)
    source = ROOT / "src" / "everyformer"
    assert len(folders) >= 6 and all((source / name / "__init__.py").is_file() for name in folders)
    assert all((source / name).is_file() for name in re.findall(r"^  (\w+\.py) ", tree, re.M))


def test_the_design_names_every_kernel_and_every_contract():
    rows = [line.split("|")[1].strip(" `") for line in DESIGN.splitlines() if line.startswith("|")]
    assert set(KERNELS) <= set(rows)
    assert set(CONTRACTS) <= {name for row in rows for name in row.split(", ")}
    assert len(DESIGN.splitlines()) <= 250
