"""The recipe of a run: everything that decides what comes out, as one value. `recipe.json` in the run's folder.

On the command line its fields are set by `path=value`: run.steps=500 optim.lr=3e-4 model.width=256 task.tokenizer=bpe.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from everyformer.family.member import is_part, read_setting
from everyformer.family.table import find
from everyformer.network.model import EncoderDecoder, Model
from everyformer.task.table import task_for
from everyformer.task.work import Task
from everyformer.value import Count, NotNegative, Part, Positive, PositivePart, Share, Size, Value, nearest


class Run(Value, frozen=True):
    """How long, how much at a time, and on what."""

    steps: Size = 1000
    batch: Size = 32  # sequences in a step, over all processes
    batch_schedule: tuple[tuple[Count, Size], ...] = ()  # (from this step on, this batch)
    accumulate: Size = 1  # pieces in which a process computes its part of a batch
    seed: Count = 0
    evaluate: Count = 250  # steps between evaluations; 0: only at the end
    examples: Size | None = 200  # how many examples an evaluation during training takes; None: all
    save: Count = 250  # steps between checkpoints; 0: only at the end
    keep: Size = 2  # how many checkpoints are kept, besides the best
    device: str = "auto"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    compile: Literal["no", "yes", "graphs"] = "no"  # graphs: and on CUDA the step recorded, for small models
    kernel: str = "auto"
    checkpoint_segments: Count = 0  # activation checkpointing: the stack in so many sections; 0: off
    gather: bool = False  # compute of halted positions (halting=freeze) no more than their keys: equal to rounding
    shard: bool = False  # FSDP2 instead of DDP when there are several processes
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()  # who is told of the run besides its records


class Optim(Value, frozen=True):
    """How weights change."""

    name: Literal["adamw", "muon"] = "adamw"  # muon for matrices, adamw for the rest
    lr: Positive = 1e-3
    muon_lr: Positive = 2e-2
    weight_decay: NotNegative = 0.01
    beta1: Share = 0.9
    beta2: Share = 0.99
    schedule: Literal["constant", "cosine", "inverse_sqrt", "linear", "wsd"] = "cosine"
    warmup: Count = 100
    min_lr: Part = 0.1  # the end of cosine, linear and wsd, as a share of lr
    decay: PositivePart = 0.2  # wsd: the share of the steps after warm-up in which the rate falls
    clip: NotNegative = 1.0  # of the gradient's norm; 0: never
    ema: Share = 0.0  # decay of the running average of the weights; 0: none
    patience: Size = 20  # bad steps (not finite, or a spike) in a row before the run stops


class Recipe(Value, frozen=True, kw_only=True):
    """A member with its changes, or a model of one's own, a task on its data, and how to run it."""

    member: str | Model | EncoderDecoder
    task: Task
    size: str | None = None
    model: dict[str, Any] = msgspec.field(default_factory=dict)  # changes of the member: width, layers, ...
    data: str | None = None
    init_from: str | None = None  # a run or saved model whose body the new one begins with
    run: Run = Run()
    optim: Optim = Optim()

    @classmethod
    def of(
        cls,
        member: str | Model | EncoderDecoder,
        *settings: str,
        size: str | None = None,
        data: str | Path | None = None,
        task: str | None = None,
        init_from: str | Path | None = None,
    ) -> Recipe:
        """What the words of the command line say: `Recipe.of("gpt2", "run.steps=500", size="tiny", data="my.txt")`.

        The member may be a `Model` or an `EncoderDecoder`, or a .json file of one; then the recipe has it whole.
        """
        found = find(member)
        recipe = cls(
            member=member if found.name == member else found.value(size),
            size=size,
            task=task_for(member, size, task),
            data=None if data is None else str(data),
            init_from=None if init_from is None else str(init_from),
        )
        return override(recipe, settings)

    def value(self, found: dict[str, Any]) -> Model | EncoderDecoder:
        """The model: the member as the data ask for it (where it has such a setting), then as the recipe says."""
        member = find(self.member)
        asked = {name: number for name, number in found.items() if name in member.settings()}
        return member.value(self.size, **(asked | self.model))


PARTS = ("run", "optim", "model", "task")  # of a recipe, that settings are in


def override(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe with `path=value` settings applied. Values are read by the type of their field."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise ValueError(f"{setting!r} is not a setting: write path=value, for example run.steps=500")
        part, dot, name = path.partition(".")
        if part not in PARTS or not dot:
            raise ValueError(f"no setting is named {path!r}; {_meant(recipe, path)}")
        if part == "model":
            known = find(recipe.member).settings()
            if name not in known:
                remedy = nearest(name, known) if known else "change the model itself"
                raise ValueError(f"{find(recipe.member).name} has no {name!r} to set; {remedy}")
            recipe = msgspec.structs.replace(recipe, model=recipe.model | {name: _read(text, known[name], path)})
            continue
        value = getattr(recipe, part)
        hints = get_type_hints(type(value), include_extras=True)
        if name not in value.__struct_fields__:
            raise ValueError(f"{part} has no field {name!r}; {nearest(name, value.__struct_fields__)}")
        changed = msgspec.structs.replace(value, **{name: _read(text, hints[name], path)})
        recipe = msgspec.structs.replace(recipe, **{part: changed})
    return recipe


def _meant(recipe: Recipe, path: str) -> str:
    """The settings whose own name is the wrong one's, or how all of them begin."""
    name = path.rpartition(".")[2]
    known = {part: getattr(recipe, part).__struct_fields__ for part in PARTS if part != "model"}
    known["model"] = find(recipe.member).settings()
    close = [f"{part}.{name}" for part in PARTS if name in known[part]]
    return f"did you mean {' or '.join(close)}?" if close else "a setting begins with run., optim., model. or task."


def _read(text: str, kind: Any, path: str) -> Any:
    """A word of the command line as a value of a type."""
    if not text:
        raise ValueError(f"{path}= has no value; write one after the =")
    optional = get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
    if optional and text.lower() == "none":
        return None
    if is_part(kind):
        return _read_part(text, kind, path)
    try:
        plain = msgspec.json.decode(text) if text[:1] in '[{"' else text
        if any(get_origin(one) is tuple for one in (kind, *get_args(kind))) and isinstance(plain, str):
            plain = text.split(",")
        return msgspec.convert(plain, kind, strict=False)
    except msgspec.MsgspecError as error:
        reason = nearest(text, get_args(kind)) if get_origin(kind) is Literal else str(error).replace("`", "")
        raise ValueError(f"{path}={text}: {reason.removesuffix(', got str')}") from None


def _read_part(text: str, kind: Any, path: str) -> Any:
    """A part of a model: a pattern as text, or JSON. It stays plain data, so that a recipe equals the one read from its JSON."""
    try:
        plain = msgspec.json.decode(text) if text[:1] in "[{" else text
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}={text}: {error}") from None
    read_setting(path, plain, kind)
    return plain
