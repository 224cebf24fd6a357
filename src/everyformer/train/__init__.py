"""Training: the loop, what it is told, what it keeps, and how it grows beyond one machine.

from everyformer.train import Recipe, open_run, resume, train

trained = train(Recipe.of("gpt2", "run.steps=500", size="tiny", data="my.txt"), "runs/first")
open_run("runs/first").write("Once", tokens=40)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everyformer.train.finished import open_run as open_run
    from everyformer.train.loop import resume as resume
    from everyformer.train.loop import train as train
    from everyformer.train.recipe import Recipe as Recipe

_HOME = {"Recipe": "recipe", "train": "loop", "resume": "loop", "open_run": "finished"}

__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
