"""A trained model: what `train`, `resume` and `load` return.

model = everyformer.load("runs/first")
model.generate(["Once", "Never"], tokens=40)
model.evaluate()["bits_per_byte"]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, overload

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from everyformer.data.files import read_json
from everyformer.infer.estimate import Progress
from everyformer.infer.predict import Predictions
from everyformer.infer.score import Score
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Reading
from everyformer.task.attention_maps import AttentionWeights, attention_maps
from everyformer.task.task import FittedTask, Inference
from everyformer.train import checkpoint
from everyformer.train.distributed import find_device
from everyformer.train.folder import PUBLISHED, check_data, read_model, read_recipe
from everyformer.train.gradient_watch import GradientWatch
from everyformer.train.imported import is_published, open_published
from everyformer.train.learner import autocast, precision_on, set_gather
from everyformer.train.recipe import Recipe
from everyformer.train.run_data import changed_splits, check_classes, with_data
from everyformer.train.saved_model import is_saved_model, open_saved

OPTION_NAMES = {"file": "--out"}  # options of the command line that have another name than their parameter
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "seed")  # see `everyformer.infer.sample`
METHODS = {  # of a model, and the method of its task's inference that each needs
    "generate": "generate_text", "stream": "stream", "generate_images": "generate_images", "predict": "predict",
    "classify": "predict", "score": "score", "embed": "embed", "attention": "_probe_input",
}  # fmt: skip


@dataclass(frozen=True)
class TrainedRun:
    """A trained `network` (with its EMA weights, if the run has an EMA), its `task` and its `recipe`.

    `train`, `resume` and `load` return it: `isinstance(everyformer.load("runs/first"), TrainedRun)`. `methods` names what it
    is used for; its `network` is a torch.nn.Module.

    step            of the checkpoint, and `state` what it holds: `data` and `splits` are the fingerprints of its data
    skipped_steps   how many steps the gradient watch skipped
    metrics         of the last evaluation, if train or resume ended with one
    best            the step of the best checkpoint, and its metric
    stopped         the signal that ended training before its last step; `early_stop`: why run.patience ended it
    open_data       opens the data when they are first needed. None: they are open
    published       the config of the imported model that it began with
    """

    network: Network | PairNetwork
    task: FittedTask
    recipe: Recipe
    step: int
    state: Mapping[str, Any]
    skipped_steps: int = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    stopped: str | None = None
    early_stop: str | None = None
    open_data: Callable[[], FittedTask] | None = None
    published: Mapping[str, Any] = field(default_factory=dict)

    @property
    def can_generate(self) -> bool:
        """Whether `generate` applies to this model."""
        return self.task.inference.can_generate

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the methods that apply to this model."""
        inference = self.task.inference

        def applies(name: str, verb: str) -> bool:
            return getattr(type(inference), verb) is not getattr(Inference, verb) and (
                name != "classify" or bool(inference.classes)
            )

        return tuple(name for name, verb in METHODS.items() if applies(name, verb))

    @cached_property
    def task_with_data(self) -> FittedTask:
        """The task with its data, which are opened on first use."""
        return self.task if self.open_data is None else self.open_data()

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
        precision = precision_on(precision or self.recipe.run.precision, device)
        if precision == "fp16" and device.type == "cpu":
            precision = "fp32"
        objective = self.task_with_data.objective
        examples = None if limit == "all" else objective.default_limit if limit is None else limit
        with torch.no_grad(), autocast(precision, device):
            metrics = objective.evaluate(self.network, split, examples, kernel, progress)
        changed = self.changed_splits()
        return metrics | {"step": self.step, "precision": precision} | ({"changed": list(changed)} if changed else {})

    def changed_splits(self) -> tuple[str, ...]:
        """Returns the splits of the data that differ from those that the run was trained on; `train` may be among them."""
        return changed_splits(self.state, self.task_with_data.data) if self.state else ()

    def predict(self, inputs: Any) -> Predictions:
        """Returns the classes, numbers or translations of a list of inputs as arrays: `run.predict(["good", "bad"]).values`.

        Inputs are texts, lists of vectors, or images (files, or arrays of bytes); of a graph, the graph itself (a file, or its content).
        """
        with self._inference():
            return self.task.inference.predict(self.network, self._checked_inputs(inputs))

    def classify(self, inputs: Any) -> Predictions:
        """Returns the classes of a list of inputs with the probabilities of all classes: `.values`, `.probabilities`, `.classes`."""
        self.require("classify", "has no classes")
        return self.predict(inputs)

    def embed(self, inputs: Any, pooling: Reading | None = None, normalize: bool | None = None) -> NDArray[np.float32]:
        """Returns one vector of each input, as an array N, D: the last layer, pooled over the positions that are not padding.

        `pooling` is mean, first (a class token), last or max. With `normalize` each vector has the length 1. Default: as the model was
        imported, else the mean, not normalized. A text that is longer than the model's context is cut.
        """
        self.require("embed", "gives its inputs no vector each")
        with self._inference():
            given: dict[str, Any] = {"pooling": pooling, "normalize": normalize}
            options = {name: value for name, value in given.items() if value is not None}
            return self.task.inference.embed(self.network, self._checked_inputs(inputs), **options)

    def score(self, texts: Sequence[Any]) -> list[Score]:
        """Returns the log-likelihood of each text (or list of token ids), and its bits per byte."""
        self.require("score", "gives texts no probability")
        with self._inference():
            return self.task.inference.score(self.network, self._checked_inputs(texts))

    def attention(
        self, text: str | None = None, *, example: int | None = None, part: str | None = None
    ) -> AttentionWeights:
        """Returns the attention weights of every layer and head on a text, with its tokens.

        Without a text they are those of an example of the validation data. `part` of a model with an encoder is cross, encoder or decoder.
        """
        self.require("attention", "reads no text or example that can be probed")
        if not isinstance(text, str | None):
            raise ValueError(f"the text {text!r} is of type {type(text).__name__}; give a str")
        task = self.task_with_data if text is None else self.task
        with self._inference():
            maps = attention_maps(self.network, task.inference.probe_input(self.network, text, example), part)
        return AttentionWeights([x_HQK.numpy() for x_HQK in maps.weight_LHQK], list(maps.queries), list(maps.keys))

    @overload
    def generate(self, prompt: str, **options: Any) -> str: ...

    @overload
    def generate(self, prompt: Sequence[Any], **options: Any) -> list[str]: ...

    def generate(self, prompt: str | Sequence[Any], **options: Any) -> str | list[str]:
        """Returns the prompt with its continuation, or its translation, or its class; of a list of prompts, a list.

        The options are tokens, temperature, top_k, top_p, min_p, seed and, where texts have an end token, ignore_end. A prompt
        of a list may also be a list of token ids.
        """
        self.require("generate", "does not generate text")
        inference = self.task.inference
        if isinstance(prompt, str):
            return inference.generate_text(self.network, prompt, **_checked_options(inference.generate_text, options))
        if not isinstance(prompt, Sequence) or not all(isinstance(one, str | Sequence) for one in prompt):
            raise ValueError(f"the prompt {prompt!r} is not a text; give a str, or a list of them")
        _checked_options(inference.generate_text, options)
        return inference.generate_texts(self.network, prompt, **options) if len(prompt) else []

    def stream(self, prompt: str, **options: Any) -> Iterator[str]:
        """Yields the continuation of the prompt piece by piece."""
        self.require("stream", "does not generate text token by token")
        verb = self.task.inference.stream
        return verb(self.network, prompt, **_checked_options(verb, options))

    def generate_images(self, file: str | Path, **options: Any) -> str:
        """Write images, or an episode of an agent, to a file. Returns a description of its content."""
        verb = self.task.inference.generate_images
        return verb(self.network, Path(file), **_checked_options(verb, options))

    def require(self, method: str, reason: str) -> None:
        """Raises ValueError with the methods that apply if this one does not."""
        if method not in self.methods:
            raise ValueError(f"this model {reason}, so {method} does not apply; {self._offers()}")

    def _offers(self) -> str:
        return f"it has {', '.join(self.methods)}" if self.methods else "use its network"

    def _inference(self) -> AbstractContextManager[Any]:
        """No gradients, and on a GPU the precision of the run."""
        device = next(self.network.parameters()).device
        stack = ExitStack()
        stack.enter_context(torch.no_grad())
        stack.enter_context(autocast("fp32" if device.type == "cpu" else self.recipe.run.precision, device))
        return stack

    def _checked_inputs(self, inputs: Any) -> Any:
        if isinstance(inputs, str) and not self.task.inference.takes_graph:
            raise ValueError(f"the inputs {inputs!r} are one text; give a list of them: [{inputs!r}]")
        if not isinstance(inputs, Iterable) and not self.task.inference.takes_graph:
            raise ValueError(f"the inputs {inputs!r} are of type {type(inputs).__name__}; give a list of inputs")
        return inputs


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


def load(
    folder: str | Path,
    *,
    step: int | Literal["best"] | None = None,
    device: str = "auto",
    data: bool | str | Path = False,
    **changes: Any,
) -> TrainedRun:
    """Returns the trained model in `folder`: a run's at its last checkpoint, at `step` or at the best one, or a saved one.

    Its data are opened when they are first needed, as by `evaluate`. `data` is where they are now, or other data; with `data=True`
    they are opened at once. `changes` are fields of the run's task. `device` is cpu, cuda or auto.
    Example: `load("runs/first").generate("Once", tokens=40)`.
    """
    folder = Path(folder).expanduser()
    if is_saved_model(folder):
        if step is not None or changes:
            raise ValueError(
                f"{folder} is a saved model, which has no steps and no task; leave out step= and the settings"
            )
        network, task, recipe, opener = open_saved(folder, None if isinstance(data, bool) else str(data))
        return TrainedRun(network.to(find_device(device)), task, recipe, 0, {}, open_data=opener)
    if is_published(folder):
        network, task, recipe, opener, config = open_published(folder, None if isinstance(data, bool) else str(data))
        return TrainedRun(network.to(find_device(device)), task, recipe, 0, {}, open_data=opener, published=config)
    recipe = with_data(read_recipe(folder), None if isinstance(data, bool) else data)
    if changes:
        unknown = set(changes) - set(recipe.task.__struct_fields__)  # type: ignore[attr-defined]
        if unknown:
            raise ValueError(f"the task of {folder} has no setting {', '.join(sorted(unknown))}; leave it out")
        recipe = msgspec.structs.replace(recipe, task=msgspec.structs.replace(recipe.task, **changes))  # type: ignore[type-var]
    step = checkpoint.find_step(folder, step)
    state = checkpoint.verify(folder, step, result=True)
    model = read_model(folder)

    def open_data() -> FittedTask:
        check_data(recipe, folder)
        opened = recipe.task.open(recipe.data, folder)
        check_classes(opened, folder)
        return opened.fit(model)

    if data:
        task = open_data()
    else:
        opened = recipe.task.open_for_inference(recipe.data, folder)
        check_classes(opened, folder)
        task = opened.fit(model)
    network = _read_network(model, recipe, checkpoint.path_of(folder, step)).to(find_device(device)).eval()
    skipped = msgspec.convert(state["watch"], GradientWatch).skipped_steps
    more: dict[str, Any] = {"best": state["best"], "published": read_json(folder / PUBLISHED) or {}}
    return TrainedRun(network, task, recipe, step, state, skipped, open_data=None if data else open_data, **more)


def _read_network(model: Model | EncoderDecoder, recipe: Recipe, path: Path) -> Network | PairNetwork:
    """Returns the network of a checkpoint."""
    network = model.build()
    set_gather(network, recipe.run.gather)
    network.load_state_dict(checkpoint.fitting(network, checkpoint.load_result(path), path), strict=False)
    return network
