"""Networks from folders of Hugging Face transformers: config.json decides the model, model.safetensors has the weights.

    network = everyformer.from_pretrained("gpt2")           # a folder that save_pretrained wrote, or a copy of a published one

What the config asks for and a member has not is refused. `model_types.py` has the table of what is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from everyformer.family.model_types import MODEL_TYPES, row_of
from everyformer.family.names import Config, Field, Head, ModelType, from_transformers, heads_of, plain_names
from everyformer.family.table import member
from everyformer.family.weight_files import read_config, read_weights
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.size import empty_weights
from everyformer.network.store import model_from_json

CHOICE = "ForMultipleChoice"  # the end of the name of a class whose head is read from several texts together


def from_pretrained(folder: str | Path) -> Network | PairNetwork:
    """Returns the network of a `folder` that `save_pretrained` of transformers wrote, in evaluation mode and in its precision.

    The model has the heads that the weights have: for language, masked tokens, the next sentence, classes of sequences, tokens or
    images, or questions. Example: `network = everyformer.from_pretrained("exported")`. Raises ValueError if the config
    asks for what the member has not, or if the weights do not fit it. `everyformer import` makes a run of such a folder.
    """
    folder = Path(folder).expanduser()
    return read_network(folder, read_config(folder), read_weights(folder))


def read_network(folder: Path, config: Config, state: Mapping[str, Tensor]) -> Network | PairNetwork:
    """Returns the network of a config and the weights of its folder."""
    model = model_of(config, state)
    name = row_of(config)
    kind = MODEL_TYPES[name]
    _check_layers(kind, config, state, folder)
    shapes = empty_weights(model)
    drawn = kind.draw(config, shapes)
    try:
        weights = from_transformers(name, state, {one: x for one, x in shapes.items() if one not in drawn})
    except ValueError as error:
        raise ValueError(f"the weights of {folder} do not fit its config.json: {error}") from None
    dtypes = {weight.dtype for weight in weights.values() if weight.is_floating_point()}
    network = model.build().to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    network.load_state_dict(weights | drawn)
    return network.eval()


def model_of(config: Config, state: Mapping[str, Tensor]) -> Model | EncoderDecoder:
    """Returns the model that a config describes, with the heads that the weights have."""
    name = row_of(config)
    kind = MODEL_TYPES[name]
    weights = plain_names(kind, state)
    config = {**kind.fixed, **kind.defaults, **kind.normal(config, weights)}
    headless = _is_base(config)
    heads = [kind.heads[key] for key in heads_of(kind, weights)]
    heads = [head for head in heads if not (headless and head.default)]
    if heads and _architecture(config).endswith(CHOICE):
        raise ValueError(
            f"the model is a {_architecture(config)}, whose head compares several texts, which everyformer has not; import its body "
            "with --leave-out classifier"
        )
    for field, ours in kind.fixed.items():
        if config[field] != ours:
            raise ValueError(
                f"{field} is {config[field]!r}, but everyformer's {name} has {ours!r}; give a model with {field}={ours!r}"
            )
    for head in heads:
        _check_head(head, config)
    try:
        settings = {ours: _read(theirs, config) for ours, theirs in kind.settings.items()}
        tree = msgspec.to_builtins(member(kind.member, **settings | dict(kind.always)))
        side = tree["decoder"] if kind.side else tree
        own = {one["type"]: one for one in side.get("outputs", ()) if one["type"] == "language"}
        outputs = [
            {
                **own.get(head.output["type"], {}),
                **head.output,
                **({head.size: len(weights[head.key])} if head.size else {}),
            }
            for head in heads
        ]
        if outputs or headless or "language" not in kind.heads:
            side["outputs"] = outputs
        return _with_parts(tree, kind, config)
    except ValueError as error:
        reason = str(error)
        for ours, theirs in kind.settings.items():
            field = theirs if isinstance(theirs, str) else theirs.name
            reason = re.sub(rf"^{re.escape(kind.member)}\.{ours} is ", f"{field} is ", reason)
        raise ValueError(
            f"config.json does not describe a {name} that everyformer has: {reason}; correct it, or give another model"
        ) from None


def _is_base(config: Config) -> bool:
    """Whether the model was saved without a head; one that ties its output to the table has it all the same."""
    name, tied = _architecture(config), config.get("tie_word_embeddings", True)
    return name.endswith("Model") and not name.endswith("LMHeadModel") and not tied


def _architecture(config: Config) -> str:
    """The class of transformers that saved the model; empty if that is not known."""
    names = config.get("architectures")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""


def _with_parts(tree: Any, kind: ModelType, config: Config) -> Model | EncoderDecoder:
    """Returns the model with the fields of parts that the config sets. Raises ValueError with the field that does not fit."""
    parts = {ours: _read(theirs, config) for ours, theirs in kind.parts.items()}
    try:
        return model_from_json(msgspec.json.encode(_changed(tree, parts)))
    except (ValueError, TypeError):
        for ours, theirs in kind.parts.items():
            try:
                model_from_json(msgspec.json.encode(_changed(tree, {ours: parts[ours]})))
            except (ValueError, TypeError) as error:
                name = theirs if isinstance(theirs, str) else theirs.name
                reason = re.sub("^this JSON is not a [A-Za-z]+: ", "", str(error))
                raise ValueError(f"{name} is {config[name]!r}: {reason}") from None
        raise


def _check_head(head: Head, config: Config) -> None:
    for field, ours in head.fixed.items():
        if config[field] != ours:
            raise ValueError(
                f"{field} is {config[field]!r}, but the {head.output['type']} head has {ours!r}; give a model without that head"
            )


def _read(theirs: str | Field, config: Config) -> Any:
    """The value of a field as our setting."""
    field = Field(theirs) if isinstance(theirs, str) else theirs
    if field.name not in config:
        raise ValueError(f"it has no {field.name}")
    try:
        return field.read(config[field.name], config)
    except (TypeError, KeyError, ArithmeticError):
        raise ValueError(
            f"{field.name} is {config[field.name]!r}, which is no value of this field or does not go with the others"
        ) from None


def _changed(tree: Any, parts: Mapping[str, Any]) -> Any:
    """Returns the plain data of a value with other fields, which are named by the tags of its parts."""
    if isinstance(tree, list | tuple):
        return [_changed(part, parts) for part in tree]
    if not isinstance(tree, dict):
        return tree
    tag = tree.get("type", "")
    given = {path.partition(".")[2]: value for path, value in parts.items() if path.partition(".")[0] == tag}
    return {name: given[name] if name in given else _changed(part, parts) for name, part in (tree | given).items()}


def _check_layers(kind: ModelType, config: Config, state: Mapping[str, Tensor], folder: Path) -> None:
    """Raises ValueError if the weights have fewer layers than the config, before so many are built."""
    field = kind.settings.get("layers")
    stems = {one.partition("{n}")[0] for theirs in kind.rows.values() for one in theirs if "{n}" in one}
    if not isinstance(field, str) or not stems:
        return
    layers = 1 + max(_numbers(plain_names(kind, state), stems), default=-1)
    if config.get(field) != layers:
        raise ValueError(
            f"the weights of {folder} do not fit its config.json: they have {layers} layers, but {field} is {config.get(field)}; "
            "restore both"
        )


def _numbers(names: Mapping[str, Any], stems: set[str]) -> Iterator[int]:
    for name in names:
        for stem in stems:
            number = name.removeprefix(stem).partition(".")[0]
            if name.startswith(stem) and number.isdigit():
                yield int(number)
