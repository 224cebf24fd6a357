"""The README and docs/design.md are true: commands and Python run, links and folders exist, the tables are complete."""

from __future__ import annotations

import ast
import re
import shlex
import sys
from pathlib import Path

import pytest

import everyformer
from everyformer.attention.attend import KERNELS
from everyformer.cli.main import main
from everyformer.study.contracts import CONTRACTS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)]
COMMANDS = [line for block in BLOCKS for line in block]
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
PARTS = next(block for block in PYTHON if block.startswith("# my_parts.py\n"))
SCRIPTS = [block for block in PYTHON if block != PARTS]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working directory with the README's my_parts.py, which can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    (tmp_path / "my_parts.py").write_text(PARTS)
    yield tmp_path
    sys.modules.pop("my_parts", None)


def run_commands(block, capsys):
    for command in block:
        program, *arguments = shlex.split(command)
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        elif program == "pip":
            assert f"#     {command}\n" in (ROOT / "constraints.txt").read_text()  # the one way to install
        else:
            assert program == "everyformer"
            assert main(arguments) == 0
            assert "next: everyformer" in capsys.readouterr().err


@pytest.mark.parametrize("block", [block for block in BLOCKS if "--import" not in block[0]], ids=lambda block: block[0])
def test_the_commands_of_a_block_run_one_after_the_other(block, folder, capsys):
    run_commands(block, capsys)


def test_every_python_block_runs_by_itself_and_then_the_commands_for_parts_of_your_own(folder, capsys):
    for script in SCRIPTS:
        exec(compile(script, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "passed" in printed and "FAILED" not in printed and "ROMEO:" in printed
    (block,) = [block for block in BLOCKS if "--import" in block[0]]
    run_commands(block, capsys)


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


@pytest.mark.parametrize("page", ["README.md", "docs/design.md", "docs/training.md", "docs/own_parts.md"])
def test_links_lead_somewhere(page):
    path = ROOT / page
    links = set(re.findall(r"\]\(([^)#:]+)\)", path.read_text()))
    assert links and [link for link in links if not (path.parent / link).exists()] == []


def test_the_design_names_every_kernel_and_every_contract():
    rows = [line.split("|")[1].strip(" `") for line in DESIGN.splitlines() if line.startswith("|")]
    assert set(KERNELS) <= set(rows)
    assert set(CONTRACTS) <= {name for row in rows for name in row.split(", ")}
    assert len(DESIGN.splitlines()) <= 250
