"""A comparison of two tiny entries that takes seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from everyformer.study.compare import Comparison, compare
from tests.train.small import TEXT

WORDS = (
    "gpt2", "lstm", "run.steps=16", "run.batch=4", "run.examples=4", "run.final_examples=6", "run.device=cpu", "model.layers=1",
    "task.context=8", "gpt2:model.width=16", "gpt2:model.heads=2",
)  # fmt: skip


def small(folder: Path, out: str = "table", **options: Any) -> Comparison:
    """The comparison in this process, on a text in the folder."""
    data = folder / "text.txt"
    if not data.exists():
        data.write_text(TEXT)
    settings: dict[str, Any] = {
        "size": "tiny",
        "trials": 2,
        "seeds": 2,
        "workers": 0,
        "data": data,
        "out": folder / out,
    }
    return compare(*WORDS, **(settings | options))
