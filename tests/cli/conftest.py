"""A folder to work in, with a small text."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question.\n" * 60)
    return tmp_path
