"""Training: recipes, the training loop, checkpoints, records, and distributed training.

from everyformer.train import Recipe, load, resume, train

run = train(Recipe.of("gpt2", "run.steps=500", size="tiny", data="my.txt"), "runs/first", progress=True)
load("runs/first").generate("Once", tokens=40)

The package can be called as the function: `everyformer.train(recipe, "runs/first")` trains a `recipe` and returns the run.
Without a `folder` nothing is written; `progress` shows a bar and samples; `callbacks` are called with each record.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from everyformer.train.loop import resume as resume
    from everyformer.train.loop import train as train
    from everyformer.train.recipe import Recipe as Recipe
    from everyformer.train.trained import TrainedRun as TrainedRun
    from everyformer.train.trained import load as load

_MODULES = {"Recipe": "recipe", "TrainedRun": "trained", "train": "loop", "resume": "loop", "load": "trained"}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """The package, which is called like its function `train`."""

    def __call__(
        self, recipe: Recipe, folder: str | None = None, *, progress: bool = False, callbacks: tuple[Any, ...] = ()
    ) -> TrainedRun:
        run: TrainedRun = self.train(recipe, folder, progress=progress, callbacks=callbacks)
        return run


sys.modules[__name__].__class__ = _Package
