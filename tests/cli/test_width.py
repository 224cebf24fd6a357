"""Tables fold in a narrow terminal: no line is longer than the terminal, and no word of a table is cut off."""

from __future__ import annotations

import pytest

from everyformer.cli.main import main

COMMANDS = {
    "family": ["family"],
    "one": ["family", "adaptive-span:tiny"],
    "diff": ["family", "--diff", "bert:tiny", "transformer-xl:tiny"],
    "contracts": ["contracts", "gpt2", "--only", "future,cache"],
    "bench": [
        "bench",
        "attention",
        "dense",
        "local",
        "--lengths",
        "32,64",
        "--heads",
        "1",
        "--width",
        "8",
        "--repeats",
        "1",
    ],
    "plan": ["plan", "gpt2", "--size", "tiny", "--no-measure", "run.batch=2", "task.valid=0.002", "run.device=cpu"],
}


@pytest.mark.parametrize("columns", [40, 60, 80])
@pytest.mark.parametrize("name", COMMANDS)
def test_tables_fit_the_terminal(name, columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(COMMANDS[name]) == 0
    lines = [line for line in capsys.readouterr().out.partition("\nnext:")[0].splitlines() if not line.startswith("# ")]
    assert lines and max(map(len, map(str.rstrip, lines))) <= columns
    assert not any("…" in line for line in lines)


@pytest.mark.parametrize("name", ["family", "one", "diff", "contracts", "plan"])
def test_a_pipe_gets_one_line_per_row(name, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(COMMANDS[name]) == 0
    lines = capsys.readouterr().out.partition("\nnext:")[0].splitlines()
    assert {"family": 18, "one": 30, "diff": 15, "contracts": 2, "plan": 4}[name] <= len(lines)
    assert not any(line.startswith("    ") and line.strip() for line in lines[1:])
