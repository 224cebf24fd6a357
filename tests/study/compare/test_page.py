"""The Python of docs/compare.md runs, with shorter runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "compare.md"


def test_the_python_of_compare_md_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    short = '"run.batch=4", "task.context=16", size="tiny", workers=0'
    code = code.replace('size="tiny", budget="8m"', f'"run.steps=16", {short}, trials=1, seeds=2')
    code = code.replace('size="tiny", trials=3', f'"run.steps=64", {short}, trials=2')
    exec(compile(code, PAGE.name, "exec"), {})
    assert "Interval(mean=" in capsys.readouterr().out
