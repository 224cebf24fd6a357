"""A causal model as a prefix language model (Raffel et al. 2019)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from everyformer.attention.pattern import Prefix
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.sublayer import Sublayer


def with_prefix(model: Model) -> Model:
    """Returns the model with attention to the prefix that each call states, in every layer that does not attend to one already."""

    def changed(sublayer: Sublayer) -> Sublayer:
        if not isinstance(sublayer, Attention) or Prefix() in sublayer.pattern.walk():
            return sublayer
        return replace(sublayer, pattern=sublayer.pattern | Prefix())

    own = model.body.prefix()
    if own is not None and own.length:
        raise ValueError(f"the model's own prefix has {own.length} tokens; leave task.prefix out")
    if not any(model.body.patterns()):
        raise ValueError("the model has no attention, with which it would read a prefix in full; leave task.prefix out")
    layers = tuple(replace(layer, sublayers=tuple(map(changed, layer.sublayers))) for layer in model.body.layers)
    body: Any = model.body
    return replace(model, body=replace(body, layers=layers))
