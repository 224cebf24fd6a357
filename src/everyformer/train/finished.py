"""A run as something to use: its network, its tokenizer and its data, from the folder that `train` wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from everyformer.network.network import Network, PairNetwork
from everyformer.task.work import Work
from everyformer.train import checkpoint
from everyformer.train.distributed import find_device
from everyformer.train.folder import check_data, read_model, read_recipe
from everyformer.train.learner import precise, set_gather
from everyformer.train.recipe import Recipe


@dataclass(frozen=True)
class Finished:
    """A trained network and the work it was trained on."""

    network: Network | PairNetwork
    work: Work
    recipe: Recipe
    step: int
    data: str  # the fingerprint of what it was trained on

    @property
    def writes(self) -> bool:
        """Can it generate?"""
        return self.work.writes

    def evaluate(
        self, split: str = "valid", limit: int | None = None, kernel: str = "auto", precision: str | None = None
    ) -> dict[str, Any]:
        """Metrics on a split, in the precision of the run if no other is named."""
        if self.work.fingerprint != self.data:
            raise ValueError(
                f"the data ({self.recipe.data}) have changed since the run began, so that it may have learned from what is held "
                "out now; bring the old ones back (or an older everyformer began it, which told fewer data apart: then train anew)"
            )
        device = next(self.network.parameters()).device
        if precision == "fp16" and device.type == "cpu":
            raise ValueError("a precision of fp16 on a CPU is some 80 times slower than fp32; use bf16 or fp32")
        precision = precision or self.recipe.run.precision
        if precision == "fp16" and device.type == "cpu":
            precision = "fp32"
        with torch.no_grad(), precise(precision, device):
            found = self.work.evaluate(self.network, split, limit, kernel)
        return found | {"step": self.step, "precision": precision}

    def write(self, prompt: str, **choices: Any) -> str:
        """The prompt and what follows, or its translation, or its class."""
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt {prompt!r} is no text; give a str")
        return self.work.write(self.network, prompt, **_known(self.work.write, choices))

    def paint(self, file: str | Path, **choices: Any) -> str:
        """Pictures, into a file."""
        return self.work.paint(self.network, Path(file), **_known(self.work.paint, choices))

    def stream(self, prompt: str, **choices: Any) -> Iterator[str]:
        """What follows the prompt, piece by piece."""
        return self.work.stream(self.network, prompt, **_known(self.work.stream, choices))


OPTIONS = {"file": "--out"}  # of the command line, that are not called as the parameter is
DRAWING = ("temperature", "top_k", "top_p", "min_p", "seed")  # see `everyformer.infer.sample`


def _known(verb: Callable[..., Any], choices: dict[str, Any]) -> dict[str, Any]:
    """The choices, if all of them mean something to what is to be done."""
    if verb.__func__ in (Work.write, Work.stream, Work.paint):  # type: ignore[attr-defined]  # it refuses whatever it is asked
        return choices
    known: list[str] = []
    for name, parameter in signature(verb).parameters.items():
        known += DRAWING if parameter.kind is Parameter.VAR_KEYWORD else [name]
    options = [OPTIONS.get(name, f"--{name.replace('_', '-')}") for name in known if name != "network"]
    for name in choices:
        if name not in known:
            raise ValueError(
                f"--{name.replace('_', '-')} says nothing to this run; leave it out (it takes {', '.join(options)})"
            )
    return choices


def open_run(
    folder: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    device: str = "auto",
    data: bool = True,
    **changes: Any,
) -> Finished:
    """The run in a folder at its last checkpoint, at `step`, or at the best one. `changes` are fields of its task.

    Without `data` it can only write, and what it learned from need not be there any more unless it is shown some of it.
    """
    folder = Path(folder)
    recipe = read_recipe(folder)
    if changes:
        unknown = set(changes) - set(recipe.task.__struct_fields__)  # type: ignore[attr-defined]
        if unknown:
            raise ValueError(f"the task of {folder} has no {', '.join(sorted(unknown))} to set; leave it out")
        recipe = msgspec.structs.replace(recipe, task=msgspec.structs.replace(recipe.task, **changes))  # type: ignore[type-var]
    step = checkpoint.find(folder, step)
    state = checkpoint.check(folder, step, result=True)
    if data:
        check_data(recipe, folder)
    opened = recipe.task.open if data else recipe.task.reopen
    work = opened(recipe.data, recipe.model.get("context"), folder)
    value = read_model(folder)
    work.fit(value)
    network = value.build()
    set_gather(network, recipe.run.gather)
    place = checkpoint.place(folder, step)
    missing, left_over = network.load_state_dict(checkpoint.once(network, checkpoint.result(place)), strict=False)
    wrong = sorted(left_over) + sorted(set(missing) - set(checkpoint.second_names(network)))
    if wrong:
        raise ValueError(f"{place} does not fit {folder / 'model.json'}: {wrong}")
    return Finished(network.to(find_device(device)).eval(), work, recipe, step, state["data"])
