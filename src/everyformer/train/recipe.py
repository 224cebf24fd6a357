"""The recipe of a run: one value with everything that determines its result, saved as `recipe.json` in the run's folder.

On the command line its fields are set by `path=value`: run.steps=500 optim.lr=3e-4 model.width=256 task.tokenizer=bpe.
"""

from __future__ import annotations

import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from everyformer.data.problems import problem_name
from everyformer.family.member import Member, is_part, read_setting
from everyformer.family.published import published as published_recipe
from everyformer.family.table import MEMBERS, find
from everyformer.network.model import EncoderDecoder, Model
from everyformer.task.table import task_for
from everyformer.task.task import Task
from everyformer.value import (
    Count,
    Few,
    FewOrZero,
    NotNegative,
    Part,
    Positive,
    PositivePart,
    Share,
    Size,
    Value,
    decode_json,
    nearest,
)


class Run(Value, frozen=True):
    """How long to train, with which batches, on which device."""

    steps: Size = 1000  # training steps
    batch: Size = 32  # sequences in a step, over all processes
    batch_schedule: tuple[tuple[Count, Size], ...] = ()  # pairs (step, batch): from this step on, this batch size
    accumulate: Few = 1  # gradient accumulation: pieces in which a process computes its rows of a batch
    seed: Count = 0  # of all random numbers: weights, batches, dropout, samples
    evaluate: Count = 250  # steps between evaluations; 0: only at the end
    examples: Size | None = 200  # examples of an evaluation during training; None: all
    final_examples: Size | None = None  # examples of the final evaluation; None: those with about 262,144 targets
    sample: bool = True  # show with each evaluation what the model generates
    patience: Count = 0  # evaluations in a row without a better metric before the run ends early; 0: it does not
    save: Count = 250  # steps between checkpoints; 0: only at the end. The best evaluation has one too
    keep: Size = 2  # number of checkpoints to keep, besides the best
    device: str = "auto"  # cpu, cuda, or auto: cuda if there is any
    precision: Literal["fp32", "bf16", "fp16", "auto"] = (
        "fp32"  # precision of autocast; weights are always in fp32. auto: bf16 on a GPU, fp32 on a CPU
    )
    compile: Literal["auto", "no", "yes", "graphs"] = (
        "auto"  # torch.compile; graphs: with CUDA graphs, for small models; auto: what a run of this length earns back
    )
    kernel: str = "auto"  # attention kernel, by name; auto: the fastest that supports the request
    loss: Literal["chunked", "whole"] = (
        "chunked"  # cross-entropy in chunks of targets; whole: stores all logits at once
    )
    checkpoint_segments: FewOrZero = 0  # activation checkpointing: segments of the stack; 0: off
    gather: bool = (
        False  # adaptive computation time with halting=freeze: skip positions that have halted; equal up to rounding
    )
    shard: bool = False  # FSDP2 instead of DDP with several processes
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()  # where to log besides records.jsonl


class Optim(Value, frozen=True):
    """The optimizer and its schedule."""

    name: Literal["adamw", "muon"] = "adamw"  # optimizer; muon: Muon for the matrices of the layers, AdamW for the rest
    lr: Positive = 1e-3  # peak learning rate; by default it follows from the model and the task
    muon_lr: Positive = 2e-2  # peak learning rate of Muon
    muon_momentum: Share = 0.95  # decay of the momentum of Muon
    weight_decay: NotNegative = 0.01  # weight decay of matrices; vectors have none
    beta1: Share = 0.9  # decay of the first moment of AdamW
    beta2: Share = 0.99  # decay of the second moment of AdamW
    schedule: Literal["constant", "cosine", "inverse_sqrt", "linear", "wsd"] = (
        "cosine"  # of the learning rate after warm-up
    )
    warmup: Count = (
        100  # steps in which the learning rate rises linearly; by default a tenth of run.steps, at most 1000
    )
    min_lr: Part = 0.1  # last learning rate of cosine, linear and wsd, as a share of lr (not an absolute rate)
    decay: PositivePart = 0.2  # wsd: share of the steps after warm-up in which the rate decays
    clip: NotNegative = 1.0  # largest norm of the gradient; 0: no clipping
    ema: Share = 0.0  # decay of the exponential moving average of the weights; 0: none
    skip_spikes: bool = (
        True  # skip steps with a spike of the loss or the gradient norm; non-finite steps are always skipped
    )
    patience: Size = 20  # skipped steps in a row before the run stops


class Recipe(Value, frozen=True, kw_only=True):
    """A member with its settings (or a custom model), a task with its data, and how to train. `Recipe.of` makes one from few words.

    member      the name of a member, of the size `size` and with the settings `model`; or a model
    task        what is learned, from the data at `data`, a path or the name of a data set. Default: the embedded data
    init_from   a run or saved model whose weights, except output heads, initialize the new model
    run         steps, batch, device and so on, and `optim` the optimizer
    Example: `Recipe.of("gpt2", "run.steps=500", size="tiny", data="my.txt")`.
    """

    member: str | Model | EncoderDecoder
    task: Task
    size: str | None = None
    model: dict[str, Any] = msgspec.field(default_factory=dict)
    data: str | None = None
    init_from: str | None = None
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
        published: bool = False,
    ) -> Recipe:
        """Returns the recipe of a command line: `Recipe.of("gpt2", "run.steps=500", size="tiny", data="my.txt")`.

        The member may also be a `Model` or an `EncoderDecoder`, or a .json file of one; then the recipe contains that model. The folder
        of a run stands for its model and its task. A size of a member may have settings of its own for its task, which come before
        the given ones; with `published` it has those of the member's paper. The learning rate and the warm-up, if no setting gives
        them, follow from the model, the task and the number of steps.
        """
        entry, named = find(member), None if data is None else str(data)
        own = _task_of_run(member) if task is None and problem_name(named) is None else None
        given_task = own or task_for(member, size, task, named)
        settings = (
            *_settings_before(entry, member, size or entry.size, given_task, published),
            *settings,
        )
        recipe = cls(
            member=member if entry.name == member else entry.value(size),
            size=size,
            task=given_task,
            data=named,
            init_from=None if init_from is None else str(init_from),
        )
        recipe = override(recipe, settings)
        given = {setting.partition("=")[0] for setting in settings}
        defaults = {"lr": recipe.default_lr(), "warmup": min(recipe.run.steps // 10, MAX_WARMUP)}
        changes = {name: default for name, default in defaults.items() if f"optim.{name}" not in given}
        return msgspec.structs.replace(recipe, optim=msgspec.structs.replace(recipe.optim, **changes))

    def default_lr(self) -> float:
        """Returns the learning rate of the task for the model; a quarter of it if the weights are not new."""
        # Without the settings that must fit the data, which are not known yet, such as the size of patches.
        known = {name: self.model[name] for name in ("width", "heads", "layers", "steps") if name in self.model}
        value = find(self.member).value(self.size, **known)
        lr = self.task.default_lr(value.decoder if isinstance(value, EncoderDecoder) else value)
        return lr * (1 if self.init_from is None else TUNING)

    def value(self, data_settings: dict[str, Any]) -> Model | EncoderDecoder:
        """Returns the model: the member with those settings of the data that it has, and then with the recipe's settings."""
        member = find(self.member)
        settings = {name: setting for name, setting in data_settings.items() if name in member.settings()}
        return member.value(self.size, **(settings | self.model))


def _settings_before(
    entry: Member, member: str | Model | EncoderDecoder, size: str, task: Task, published: bool
) -> tuple[str, ...]:
    """The settings that a size of a member has before those of the user."""
    found = published_recipe(entry.name, size).of(size) if published else entry.recipes.get(size, ())
    if not found or task == task_for(member, size):  # a model of one's own may have no task of its own
        return found
    if published:
        raise ValueError(
            f"the published recipe of {entry.name} is for its own task; leave out --task, or --recipe paper"
        )
    return ()


def is_run(member: object) -> bool:
    """Whether what stands for a member is the folder of a run."""
    named = isinstance(member, str | Path) and str(member) not in MEMBERS
    return named and (Path(str(member)).expanduser() / "recipe.json").is_file()


def _task_of_run(member: str | Model | EncoderDecoder) -> Task | None:
    from everyformer.train.folder import read_recipe

    return read_recipe(Path(str(member)).expanduser()).task if is_run(member) else None


MAX_WARMUP = 1000  # steps
TUNING = 0.25  # of the learning rate, for weights that were trained before
PARTS = ("run", "optim", "model", "task")  # of a recipe, with settings


def override(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Returns the recipe with `path=value` settings applied. Values are parsed by the type of their field."""
    for setting in settings:
        path, equals, text = setting.partition("=")
        if not equals or not path:
            raise ValueError(f"{setting!r} is not a setting; write path=value, for example run.steps=500")
        part, dot, name = path.partition(".")
        if part not in PARTS or not dot:
            raise ValueError(f"there is no setting {path!r}; {_suggestion(recipe, path)}")
        if part == "model":
            known = find(recipe.member).settings()
            if name == "context" and name in known:
                given = "context" in recipe.task.__struct_fields__  # type: ignore[attr-defined]
                remedy = f"write task.context={text}" if given else "leave it out: it follows from the data"
                raise ValueError(f"model.context has the size that the task needs; {remedy}")
            if name not in known:
                remedy = nearest(name, known) if known else "change the model itself"
                raise ValueError(f"{find(recipe.member).name} has no setting {name!r}; {remedy}")
            recipe = msgspec.structs.replace(recipe, model=recipe.model | {name: _parse(text, known[name], path)})
            continue
        value = getattr(recipe, part)
        hints = get_type_hints(type(value), include_extras=True)
        if name not in value.__struct_fields__:
            raise ValueError(f"{part} has no field {name!r}; {nearest(name, value.__struct_fields__)}")
        changed = msgspec.structs.replace(value, **{name: _parse(text, hints[name], path)})
        recipe = msgspec.structs.replace(recipe, **{part: changed})
    return recipe


def _suggestion(recipe: Recipe, path: str) -> str:
    """The settings of the same name in other parts, or the prefixes of all settings."""
    name = path.rpartition(".")[2]
    known = {part: getattr(recipe, part).__struct_fields__ for part in PARTS if part != "model"}
    known["model"] = find(recipe.member).settings()
    close = [f"{part}.{name}" for part in PARTS if name in known[part]]
    return f"did you mean {' or '.join(close)}?" if close else "settings begin with run., optim., model. or task."


def _parse(text: str, kind: Any, path: str) -> Any:
    """Returns the text of a setting as a value of a type."""
    if not text:
        raise ValueError(f"{path}= has no value; write one after the =")
    optional = get_origin(kind) in (Union, types.UnionType) and type(None) in get_args(kind)
    if optional and text.lower() == "none":
        return None
    if is_part(kind):
        return _read_part(text, kind, path)
    try:
        plain = decode_json(text) if text[:1] in '[{"' else text
        if any(get_origin(one) is tuple for one in (kind, *get_args(kind))) and isinstance(plain, str):
            plain = text.split(",")
        return msgspec.convert(plain, kind, strict=False)
    except msgspec.MsgspecError as error:
        choices = [name for one in (kind, *get_args(kind)) if get_origin(one) is Literal for name in get_args(one)]
        reason = nearest(text, choices + ["none"] * optional) if choices else _expected(str(error), optional)
        raise ValueError(f"{path}={text}: {reason}") from None


WORDS = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list in JSON, such as [[100, 8]]",
}


def _expected(error: str, optional: bool) -> str:
    """What to write instead of a text that cannot be converted, from the message of msgspec."""
    found = re.match(r"Expected `(\w+)[^`]*`( [<>]=? [\d.]+)?", error)
    if found is None:
        return f"{error.replace('`', '')}; write valid JSON"
    return f"give {WORDS.get(found[1], found[1])}{found[2] or ''}" + " or none" * optional


def _read_part(text: str, kind: Any, path: str) -> Any:
    """A part of a model: a pattern as text, or JSON. It stays plain data, so that a recipe equals the one read from its JSON."""
    try:
        plain = decode_json(text) if text[:1] in "[{" else text
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}={text}: {error}") from None
    read_setting(path, plain, kind)
    return plain
