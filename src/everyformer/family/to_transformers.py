"""Our networks as models of Hugging Face transformers: the table of model types read backwards.

    config, weights = to_transformers(network)        # config.json and model.safetensors of a folder that from_pretrained opens

The config is found from the model, then read again: a model that does not come back equal has something that transformers has not,
and is refused with the first of its differences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from everyformer.attention.projection import LinearProjectionModule
from everyformer.family.model_types import MODEL_TYPES, row_of
from everyformer.family.names import Config, Field, ModelType, change_of, theirs_of
from everyformer.family.pretrained import model_of
from everyformer.network.initial import AsTorch
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify, Regress
from everyformer.value import flatten

PATHS = {  # where a model has the settings that most members have
    "width": "model.width",
    "heads": "standard.heads",
    "layers": "stack.num_layers",
    "context": "learned.length",
    "vocabulary": "tokens.vocabulary",
    "patch": "patches.size",
    "channels": "patches.channels",
}
NOTHING = object()


LEFT = {  # fields of a config that are written anew, that newer ones replace, or that name code to run
    "architectures", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id", "num_labels", "_name_or_path", "auto_map",
    "rope_theta", "rope_scaling", "rope_local_base_freq", "problem_type",
}  # fmt: skip


def to_transformers(
    network: Network | PairNetwork, published: Config | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the config and the weights of a network as transformers stores them.

    `published` is the config of the model that the network began with: its type is kept if the network still has it, and its fields.
    Raises ValueError if transformers has no such model, with what differs from the most similar one if it has the same parts.
    """
    name = row_of(published) if published else None
    if name is not None and MODEL_TYPES[name].exported:
        try:
            return as_model_type(name, network, published)
        except ValueError:  # another head, or other parts
            pass
    reasons: list[tuple[int, str]] = []
    exported = [name for name, kind in MODEL_TYPES.items() if kind.exported]
    for name in exported:
        try:
            return as_model_type(name, network)
        except NotTheirs as error:
            reasons.append((error.differences, str(error)))
    differences, reason = min(reasons)
    if differences >= FAR:  # then the most similar one says nothing
        reason = f"none of {', '.join(exported)} has the parts of this one"
    raise NotTheirs(0, f"transformers has no such model: {reason}")


class NotTheirs(ValueError):
    """Transformers has no such model."""

    def __init__(self, differences: int, reason: str):
        super().__init__(reason)
        self.differences = differences


FAR = 1 << 20  # differences of a model that cannot be compared


def as_model_type(
    name: str, network: Network | PairNetwork, published: Config | None = None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the config and the weights of a network as one model type. Raises NotTheirs if it is none of these."""
    kind, model = MODEL_TYPES[name], _as_classes(network.value)
    heads = _heads(name, kind, model, published)
    kept = {field: value for field, value in (published or {}).items() if field not in LEFT}
    config = _config(name, kind, model, kept) | {"architectures": [kind.architectures[tuple(heads)]]}
    weights = _weights(name, kind, network, heads)
    try:
        again = model_of(config, weights)
    except ValueError as error:
        raise NotTheirs(FAR, f"{name} refuses it ({error})") from None
    ours, theirs = (dict(_leaves(one)) for one in (model, again))
    wrong = [key for key in {**ours, **theirs} if ours.get(key, NOTHING) != theirs.get(key, NOTHING)]
    if wrong:
        here, there = (f"{values[wrong[0]]!r}" if wrong[0] in values else "none" for values in (ours, theirs))
        raise NotTheirs(
            len(wrong), f"{name} is the most similar, and has {wrong[0]} = {there} where this model has {here}"
        )
    return config, weights


def _leaves(model: Model | EncoderDecoder) -> Iterator[tuple[str, Any]]:
    """The fields of a model, without dropout, and with those that follow from others left out."""
    for path, value in flatten(_explicit(msgspec.to_builtins(_plain(model)))):
        if path.rpartition(".")[2] != "dropout":
            yield path, value


def _explicit(tree: Any, width: int = 0) -> Any:
    if isinstance(tree, list | tuple):
        return [_explicit(part, width) for part in tree]
    if not isinstance(tree, dict):
        return tree
    width = tree["width"] if "body" in tree else width
    tree = {name: _explicit(part, width) for name, part in tree.items()}
    if tree.get("type") == "standard":
        share = width // tree["heads"]
        defaults = {"key_width": share, "value_width": share, "key_heads": tree["heads"]}
        tree |= {name: tree.get(name) or default for name, default in defaults.items()}
    return tree


def _plain(model: Model | EncoderDecoder) -> Model | EncoderDecoder:
    """The model without what only training reads: how it is initialized, auxiliary predictions, a generator of replaced tokens."""
    if isinstance(model, EncoderDecoder):
        return replace(model, encoder=_plain(model.encoder), decoder=_plain(model.decoder))
    return replace(model, initial=AsTorch(), auxiliary=None, generator=None)


def _as_classes(model: Model | EncoderDecoder) -> Model | EncoderDecoder:
    """The model with a head for classes in place of one for numbers: transformers has one head for both."""
    if isinstance(model, EncoderDecoder):
        return model
    fields = ("reading", "pooler", "dropout", "pooler_activation", "bias")
    outputs = (
        Classify(head.numbers, **{field: getattr(head, field) for field in fields})
        if isinstance(head, Regress)
        else head
        for head in model.outputs
    )
    return replace(model, outputs=tuple(outputs))


def _heads(name: str, kind: ModelType, model: Model | EncoderDecoder, published: Config | None) -> list[str]:
    """The names of the output heads in the table. Of two that are alike, that of the published model is taken."""
    found = list[str]()
    theirs = (published or {}).get("architectures")
    for output in (model.decoder if isinstance(model, EncoderDecoder) else model).outputs:
        tree = msgspec.to_builtins(output)
        names = [key for key, head in kind.heads.items() if head.output.items() <= tree.items()]
        free = [key for key in names if key not in found]
        fitting = [key for key in free if any(heads[: len(found) + 1] == (*found, key) for heads in kind.architectures)]
        if not fitting:
            raise NotTheirs(2 * FAR, f"{name} has no {tree['type']} head like that of this model")
        ours = [key for key in fitting if [kind.architectures.get((*found, key))] == theirs]
        found.append(max(ours or fitting, key=lambda key: len(kind.heads[key].output)))  # the most specific one
    if tuple(found) not in kind.architectures:
        raise NotTheirs(2 * FAR, f"{name} has no model with the heads {', '.join(found) or 'none'}")
    return found


def _config(name: str, kind: ModelType, model: Model | EncoderDecoder, kept: Config) -> dict[str, Any]:
    tree = msgspec.to_builtins(model)
    config: dict[str, Any] = {**kind.fixed, **kind.defaults, **kept, "model_type": kind.model_type or name}
    found = list[tuple[str | Field, Any]]()
    for setting, theirs in kind.settings.items():
        path = {**PATHS, **kind.paths}[setting]
        try:
            value = next(_find(tree, path), NOTHING) if isinstance(path, str) else path(model)
        except (AttributeError, IndexError, TypeError):
            value = NOTHING
        if value is NOTHING:
            raise NotTheirs(FAR, f"{name} has {setting}, which this model has not")
        found.append((theirs, value))
    found += [(theirs, value) for path, theirs in kind.parts.items() for value in list(_find(tree, path))[:1]]
    for theirs, value in found:
        field = Field(theirs) if isinstance(theirs, str) else theirs
        config[field.name] = _merged(config.get(field.name), field.write(value))
    return config


def _merged(old: Any, new: Any) -> Any:
    """What several of our settings write into one field."""
    if not isinstance(old, Mapping) or not isinstance(new, Mapping):
        return new
    return {**old, **{name: _merged(old.get(name), value) for name, value in new.items()}}


def _find(tree: Any, path: str) -> Iterator[Any]:
    """Yields the fields of a name in all parts of a tag."""
    tag, _, name = path.partition(".")
    if isinstance(tree, list | tuple):
        for part in tree:
            yield from _find(part, path)
    elif isinstance(tree, dict):
        if tree.get("type") == tag and name in tree:
            yield tree[name]
        for part in tree.values():
            yield from _find(part, path)


def _weights(name: str, kind: ModelType, network: Network | PairNetwork, heads: list[str]) -> dict[str, Tensor]:
    """Our weights under their names; tied ones once."""
    rows = dict(kind.rows) | {
        f"{kind.side}outputs.{number}.{ours}": theirs
        for number, key in enumerate(heads)
        for ours, theirs in kind.heads[key].rows.items()
    }
    weights = dict[str, Tensor]()
    for ours, x in network.state_dict().items():
        if ours.startswith("generator."):
            continue
        theirs = theirs_of(ours, rows)
        if not theirs:
            raise NotTheirs(FAR, f"{name} has nothing for {ours} of this model")
        for one, part in zip(theirs, _split(network, ours, x, len(theirs)), strict=True):
            in_base = bool(theirs_of(ours, kind.rows)) or one.startswith("pooler.")
            prefix = f"{kind.prefix}." if heads and in_base and kind.prefix else ""
            stored = change_of(kind, one).write(part, network.value)
            weights[prefix + one] = stored.detach().cpu().contiguous().clone()
    return weights


def _split(network: Any, ours: str, x: Tensor, parts: int) -> tuple[Tensor, ...]:
    """The tensors that are concatenated in one of ours: queries, keys and values, or equal parts."""
    if parts == 1:
        return (x,)
    module = network.get_submodule(ours.rpartition(".")[0].rpartition(".")[0])
    if isinstance(module, LinearProjectionModule):
        return torch.split(x, [size for size in (module.queries, module.keys, module.values) if size])
    return torch.chunk(x, parts)
