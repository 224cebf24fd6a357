"""How models of Hugging Face transformers are named and stored, as one table for both directions: `ModelType`.

    state = safetensors.torch.load_file("gpt2/model.safetensors")
    network = everyformer.build("gpt2", "small")
    network.load_state_dict(from_transformers("gpt2", state))

`everyformer.from_pretrained` does this for a folder, with the model that its config.json describes; `to_transformers` goes back.
The names are those of the published files, as `save_pretrained` writes them, or those of a state dict, with or without the prefix
of the base model. A row is `ours: theirs`; {n} is the number of the layer, * stands for weight and bias, and the tensors of several
names are concatenated. The rows themselves are in names_gpt2.py, names_bert.py and names_image.py, collected by model_types.py.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

Rows = Mapping[str, tuple[str, ...]]
Config = Mapping[str, Any]
Builtin = Mapping[str, Any]  # a model as plain data


@dataclass(frozen=True)
class Field:
    """A field of config.json. `read` makes our setting of its value and the config; `write` makes its value of our setting."""

    name: str
    read: Callable[[Any, Config], Any] = lambda value, config: value
    write: Callable[[Any], Any] = lambda value: value


class Change(NamedTuple):
    """A tensor that is stored in another form than ours."""

    read: Callable[[Tensor], Tensor]
    write: Callable[[Tensor, Any], Tensor]  # also gets our model


@dataclass(frozen=True)
class Head:
    """An output head. `key` is a weight that only files with this head have, `output` our head as plain data."""

    key: str
    output: Builtin
    rows: Rows = field(default_factory=dict)
    size: str = ""  # the field of our head that is the number of rows of the key
    needs: tuple[str, ...] = ()  # other weights that a file with this head has
    fixed: Config = field(default_factory=dict)  # fields of the config that the head has with this value alone
    default: bool = False  # what a file has whose weights are of no other head


@dataclass(frozen=True)
class ModelType:
    """One `model_type` of transformers as a member of ours.

    Settings of our member, and fields of parts of our model ("feed_forward.hidden"), stand beside the fields of the config.
    """

    member: str
    prefix: str  # of the base model's names in the file of a model with a head
    settings: Mapping[str, str | Field]
    parts: Mapping[str, str | Field]
    rows: Rows
    heads: Mapping[str, Head]
    architectures: Mapping[tuple[str, ...], str]  # their class for our heads, by name
    defaults: Config = field(default_factory=dict)  # what a config means that leaves a field out
    fixed: Config = field(default_factory=dict)  # what our member is; also the meaning of a field that is left out
    tied: Mapping[str, str] = field(default_factory=dict)  # second names of tied weights
    renamed: Mapping[str, str] = field(default_factory=dict)  # other names of the same weights, as patterns
    unused: str = r"$^"  # names that are no weights, or that nothing of ours uses
    changes: Mapping[str, Change] = field(default_factory=dict)  # by a pattern of their name
    # Where a model has the settings of our member: a field of a part, or a function; PATHS has those of most members.
    paths: Mapping[str, str | Callable[[Any], Any]] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)  # settings that every model of this type has
    # A config with the fields of this table, from an old one and the weights.
    normal: Callable[[Config, Mapping[str, Tensor]], Config] = lambda config, weights: config
    spread: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda weights: (
        weights
    )  # weights that layers share, to each
    # Tensors of ours that are random and not stored, from a config and our shapes.
    draw: Callable[[Config, Mapping[str, Tensor]], dict[str, Tensor]] = lambda config, shapes: {}
    exported: bool = True  # whether transformers of today has it
    side: str = ""  # of a model with an encoder and a decoder: that of the output heads
    model_type: str = ""  # of the config; default: the name of the row
    variant: Callable[[Config], str | None] = lambda config: None  # the other row that a config of this type belongs to


def from_transformers(
    name: str, state: Mapping[str, Tensor], ours: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """Returns our state dict of a model type with the heads that the state has.

    `ours` is a state dict of our network, for its names and shapes; without it, tied weights are tied. Raises ValueError if names
    are missing or left over, or if shapes differ. A pooler that no head uses is left out, with a warning.
    """
    from everyformer.family.model_types import model_type

    kind = model_type(name)
    weights = plain_names(kind, state)
    rows = dict(kind.rows) | {
        f"{kind.side}outputs.{number}.{one}": theirs
        for number, key in enumerate(heads_of(kind, weights))
        for one, theirs in kind.heads[key].rows.items()
    }
    separate = {one: theirs for one, theirs in rows.items() if not kind.tied.keys() >= set(theirs)}
    found = {one: theirs_of(one, rows) for one in (expand(separate, weights) if ours is None else ours)}
    used = {one for theirs in found.values() for one in theirs}
    for copy, original in kind.tied.items():
        if {copy, original} <= weights.keys() - (used & {copy}) and not torch.equal(
            weights.pop(copy), weights[original]
        ):
            raise ValueError(f"{copy} differs from {original}, but {name} ties them; give a model with tied weights")
    problems = [f"{one} is missing" for one in sorted(used - weights.keys())]
    problems += [f"our {one} has no name there" for one, theirs in found.items() if not theirs]
    unused = sorted(weights.keys() - used)
    problems += [f"{one} is left over" for one in unused if not one.startswith("pooler.")]
    _refuse(name, problems)
    if unused:
        warnings.warn(f"{', '.join(unused)}: no head uses the pooler, so it is left out", stacklevel=2)
    read: dict[str, Tensor] = {}
    for one, theirs in found.items():
        parts = [change_of(kind, part).read(weights[part]) for part in theirs]
        if len({part.shape[1:] for part in parts}) == 1:
            read[one] = torch.cat(parts) if len(parts) > 1 else parts[0]
        expected, got = None if ours is None else ours[one].shape, read[one].shape if one in read else parts[0].shape
        if one not in read or (expected is not None and expected != got):
            problems.append(f"{' + '.join(theirs)} is {_shape(got)}, not {_shape(expected or ())}")
    _refuse(name, problems)
    return read


def _shape(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def _refuse(name: str, problems: list[str]) -> None:
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"these are not the weights of a {name}: {', '.join(problems[:5])}{more}; give the file of another model, or leave "
            "out the head that everyformer has not (import --leave-out)"
        )


def heads_of(kind: ModelType, weights: Iterable[str]) -> list[str]:
    """Returns the names of the heads that the weights have, in the order of our outputs."""
    known, found = set(weights), dict[str, str]()
    for name, head in kind.heads.items():
        if head.key in known and known.issuperset(head.needs):
            found.setdefault(head.key, name)
    others = [name for name in found.values() if not kind.heads[name].default]
    return others or list(found.values())


def plain_names(kind: ModelType, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights without the prefix of the base model, under the names of the published files."""
    weights = dict[str, Tensor]()
    for name, weight in state.items():
        if kind.prefix:
            name = name.removeprefix(f"{kind.prefix}.")
        for new, old in kind.renamed.items():
            name = re.sub(new, old, name)
        if not re.search(kind.unused, name):
            weights[name] = weight
    return kind.spread(weights)


def theirs_of(ours: str, rows: Rows) -> tuple[str, ...]:
    """Returns their names of one of our weights; empty if they have none."""
    number = re.search(r"\blayers\.(\d+)\.", ours)
    row = ours if number is None else f"{ours[: number.start(1)]}{{n}}{ours[number.end(1) :]}"
    stem, _, last = row.rpartition(".")
    for key in (ours, f"{ours.rpartition('.')[0]}.*", row, f"{stem}.*"):
        if key in rows:
            return tuple(one.replace("{n}", number[1] if number else "").replace("*", last) for one in rows[key])
    return ()


def expand(rows: Rows, weights: Iterable[str]) -> Iterator[str]:
    """Yields our names of all rows, for as many layers and with those biases that the weights have."""
    known = set(weights)
    for ours, theirs in rows.items():
        start = theirs[0].partition("{n}")[0]
        found = (re.match(rf"{re.escape(start)}(\d+)\.", name) for name in known)
        layers = max((int(match[1]) + 1 for match in found if match), default=1)
        for n in range(layers) if "{n}" in ours else (0,):
            for last in ("weight", "bias") if "*" in ours else ("",):
                names = (one.replace("*", last) for one in theirs)
                pattern = "|".join(re.escape(one).replace(r"\{n\}", r"\d+") for one in names)
                if last != "bias" or any(re.fullmatch(pattern, name) for name in known):
                    yield ours.replace("{n}", str(n)).replace("*", last)


def change_of(kind: ModelType, name: str) -> Change:
    for pattern, change in kind.changes.items():
        if re.search(pattern, name):
            return change
    return Change(lambda x: x, lambda x, model: x)
