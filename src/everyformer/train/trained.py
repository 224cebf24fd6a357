"""A trained run: what `train` and `resume` return, and what `open_run` reads from a run's folder.

run = open_run("runs/first")
run.evaluate()["bits_per_byte"]
run.generate("Once", tokens=40)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from everyformer.infer.estimate import Progress
from everyformer.infer.predict import Predictions
from everyformer.network.network import Network, PairNetwork
from everyformer.task.task import FittedTask
from everyformer.train import checkpoint
from everyformer.train.distributed import find_device
from everyformer.train.folder import check_data, read_model, read_recipe
from everyformer.train.learner import autocast, set_gather
from everyformer.train.recipe import Recipe
from everyformer.train.run_data import changed_splits, check_classes, with_data

OPTION_NAMES = {"file": "--out"}  # options of the command line that have another name than their parameter
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")  # see `everyformer.infer.sample`


@dataclass(frozen=True)
class TrainedRun:
    """A trained network (with its EMA weights, if the run has an EMA), its task and its recipe.

    `train`, `resume` and `open_run` return it: `isinstance(open_run("runs/first"), TrainedRun)`.
    """

    network: Network | PairNetwork
    task: FittedTask
    recipe: Recipe
    step: int
    state: Mapping[
        str, Any
    ]  # of the checkpoint: `data` and `splits` are the fingerprints of the data that it was trained on
    skipped_steps: int = 0  # by the gradient watch
    metrics: dict[str, Any] = field(default_factory=dict)  # of the last evaluation, if train or resume ended with one
    best: dict[str, Any] | None = None  # the step of the best checkpoint, and its metric
    stopped: str | None = None  # the signal that ended training before its last step
    early_stop: str | None = None  # why run.patience ended training before its last step

    @property
    def can_generate(self) -> bool:
        return self.task.inference.can_generate

    def evaluate(
        self,
        split: str = "valid",
        limit: int | Literal["all"] | None = None,
        kernel: str = "auto",
        precision: str | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Returns metrics on a split, with `low` and `high`, the 95 % confidence interval of the first of them.

        At most `limit` examples are evaluated, spread over the split. Default: those with about 262,144 targets. Default for
        `precision`: that of the run. If the data differ from those of the run, `changed` has the names of the splits.
        `progress` is called with the number of targets scored so far, and in all.
        """
        device = next(self.network.parameters()).device
        if precision == "fp16" and device.type == "cpu":
            raise ValueError("a precision of fp16 on a CPU is about 80 times slower than fp32; use bf16 or fp32")
        precision = precision or self.recipe.run.precision
        if precision == "fp16" and device.type == "cpu":
            precision = "fp32"
        objective = self.task.objective
        examples = None if limit == "all" else objective.default_limit if limit is None else limit
        with torch.no_grad(), autocast(precision, device):
            metrics = objective.evaluate(self.network, split, examples, kernel, progress)
        changed = self.changed_splits()
        return metrics | {"step": self.step, "precision": precision} | ({"changed": list(changed)} if changed else {})

    def changed_splits(self) -> tuple[str, ...]:
        """Returns the splits of the data that differ from those that the run was trained on; `train` may be among them."""
        return changed_splits(self.state, self.task.data)

    def predict(self, inputs: Any) -> Predictions:
        """Returns the classes, numbers or translations of a list of inputs as arrays: `run.predict(["good", "bad"]).values`.

        Inputs are texts, lists of vectors, or images (files, or arrays of bytes); of a graph, the graph itself (a file, or its content).
        """
        if isinstance(inputs, str) and not self.task.inference.takes_graph:
            raise ValueError(f"the inputs {inputs!r} are one text; give a list of them: [{inputs!r}]")
        device = next(self.network.parameters()).device
        precision = "fp32" if device.type == "cpu" else self.recipe.run.precision
        with torch.no_grad(), autocast(precision, device):
            return self.task.inference.predict(self.network, inputs)

    def generate(self, prompt: str, **options: Any) -> str:
        """Returns the prompt with its continuation, or its translation, or its class."""
        if not isinstance(prompt, str):
            raise ValueError(f"the prompt {prompt!r} is not a text; give a str")
        verb = self.task.inference.generate_text
        return verb(self.network, prompt, **_checked_options(verb, options))

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yields the continuation of the prompt piece by piece."""
        verb = self.task.inference.stream
        return verb(self.network, prompt, **_checked_options(verb, options))

    def generate_images(self, file: str | Path, **options: Any) -> str:
        """Write images, or an episode of an agent, to a file. Returns a description of its content."""
        verb = self.task.inference.generate_images
        return verb(self.network, Path(file), **_checked_options(verb, options))


def _checked_options(verb: Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options. Raises ValueError if one is not a parameter of the method.

    Parameters `**sampling` stand for the sampling options; a method with any other `**` parameter checks its options itself.
    """
    known: list[str] = []
    for name, parameter in signature(verb).parameters.items():
        if parameter.kind is Parameter.VAR_KEYWORD and name != "sampling":
            return options
        known += SAMPLING if parameter.kind is Parameter.VAR_KEYWORD else [name]
    names = [OPTION_NAMES.get(name, f"--{name.replace('_', '-')}") for name in known if name != "network"]
    for name in options:
        if name not in known:
            raise ValueError(
                f"--{name.replace('_', '-')} is not an option of this run; leave it out (the options are {', '.join(names)})"
            )
    return options


def open_run(
    folder: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    device: str = "auto",
    data: bool | str | Path = True,
    **changes: Any,
) -> TrainedRun:
    """Returns the run in a folder at its last checkpoint, at `step`, or at the best one. `changes` are fields of its task.

    `data` are where the data are now, or other data to evaluate on. With `data=False` it can only generate; then its data may be
    missing, unless generation needs examples of them.
    Example: `open_run("runs/first").generate("Once", tokens=40)`.
    """
    folder = Path(folder)
    recipe = with_data(read_recipe(folder), None if isinstance(data, bool) else data)
    if changes:
        unknown = set(changes) - set(recipe.task.__struct_fields__)  # type: ignore[attr-defined]
        if unknown:
            raise ValueError(f"the task of {folder} has no setting {', '.join(sorted(unknown))}; leave it out")
        recipe = msgspec.structs.replace(recipe, task=msgspec.structs.replace(recipe.task, **changes))  # type: ignore[type-var]
    step = checkpoint.find_step(folder, step)
    state = checkpoint.verify(folder, step, result=True)
    if data:
        check_data(recipe, folder)
    open_data = recipe.task.open if data else recipe.task.open_for_inference
    model, opened = read_model(folder), open_data(recipe.data, folder)
    check_classes(opened, folder)
    task = opened.fit(model)
    network = model.build()
    set_gather(network, recipe.run.gather)
    path = checkpoint.path_of(folder, step)
    network.load_state_dict(checkpoint.fitting(network, checkpoint.load_result(path), path), strict=False)
    network = network.to(find_device(device)).eval()
    skipped, best = state["watch"]["skipped_steps"], state["best"]
    return TrainedRun(network, task, recipe, step, state, skipped, best=best)
