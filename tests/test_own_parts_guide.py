"""The guide docs/own_parts.md is true: its parts are short, and they are trained, saved, loaded and checked as it says."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from everyformer.cli.main import main

TEXT = (Path(__file__).parent.parent / "docs" / "own_parts.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", TEXT, re.S)
PARTS = [block for block in PYTHON if block.startswith("# my_parts.py")]
SCRIPT = "\n".join(block for block in PYTHON if block not in PARTS)
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", TEXT, re.S)).splitlines()


@pytest.mark.parametrize("block", PARTS, ids=lambda block: block.splitlines()[0])
def test_each_part_takes_at_most_25_lines_of_code(block):
    code = [line for line in block.splitlines() if line.strip() and not line.startswith(("#", "import ", "from "))]
    assert len(code) <= 25


def test_all_five_kinds_of_parts_are_shown():
    shown = {re.search(r"class \w+\((\w+), Value", block)[1] for block in PARTS}
    assert shown == {"Pattern", "ScoreMod", "Residual", "Depth", "Sublayer"}


def test_own_parts_are_trained_saved_loaded_and_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    (tmp_path / "my_parts.py").write_text("\n\n".join(PARTS))
    try:
        exec(compile(SCRIPT, "own_parts.md", "exec"), {})
        printed = capsys.readouterr().out
        assert "passed" in printed and "FAILED" not in printed
        for command in COMMANDS:
            program, *arguments = shlex.split(command)
            assert program == "everyformer" and main(arguments) == 0
            assert "next: everyformer" in capsys.readouterr().err
    finally:
        sys.modules.pop("my_parts", None)
