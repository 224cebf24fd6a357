"""The README is true: its commands and its Python run, its table is the family's, its links and folders exist."""

from __future__ import annotations

import ast
import html
import re
import shlex
from pathlib import Path

import pytest

import everyformer
from everyformer.cli.main import main

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
BLOCKS = [block.splitlines() for block in re.findall(r"```sh\n(.*?)```", TEXT, re.S)]
COMMANDS = [line for block in BLOCKS for line in block]
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block[0])
def test_the_commands_of_a_block_run_one_after_the_other(block, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    for command in block:
        program, *arguments = shlex.split(command)
        if program == "make":
            assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.M)
        elif program == "pip":
            assert f"#     {command}\n" in (ROOT / "constraints.txt").read_text()  # the one way to install
        else:
            assert program == "everyformer"
            assert main(arguments) == 0
            assert "next: everyformer" in capsys.readouterr().out


def test_both_set_up_commands_are_shown():
    assert {"make demo", "make test", "pip install -c constraints.txt -e ."} <= set(COMMANDS)


def test_python_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    exec(compile("\n".join(PYTHON), "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert "passed" in shown and "ROMEO:" in shown


def test_what_the_library_offers_is_what_type_checkers_see():
    tree = ast.parse(Path(everyformer.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {name.name for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names}
    assert seen == set(everyformer.__all__) - {"__version__"}
    assert all(getattr(everyformer, name) is not None for name in seen)


def test_the_table_is_the_family(monkeypatch, capsys):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["family"]) == 0
    printed = [re.split(r" {2,}", line.strip()) for line in capsys.readouterr().out.splitlines()]
    shown = [
        [html.unescape(cell.strip()) for cell in line.strip("|").split("|")]
        for line in TEXT.splitlines()
        if line.startswith("|")
    ]
    start = shown.index(printed[0])
    assert shown[start + 2 : start + len(printed) - 2] == printed[2:-2]


def test_the_tree_is_the_source():
    (tree,) = re.findall(r"```text\nsrc/everyformer/\n(.*?)```", TEXT, re.S)
    folders = re.findall(r"^  (\w+)/ ", tree, re.M)
    source = ROOT / "src" / "everyformer"
    assert len(folders) >= 6 and all((source / name / "__init__.py").is_file() for name in folders)
    assert all((source / name).is_file() for name in re.findall(r"^  (\w+\.py) ", tree, re.M))


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", TEXT))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
