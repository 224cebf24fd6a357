"""The table of the model types of transformers that everyformer reads and writes."""

from __future__ import annotations

from everyformer.family import (
    names_bert,
    names_gpt2,
    names_image,
    names_pair,
    names_reformer,
    names_rotary,
    names_shared,
    names_xl,
)
from everyformer.family.names import Config, ModelType
from everyformer.value import nearest

MODEL_TYPES: dict[str, ModelType] = {
    **names_gpt2.MODEL_TYPES,
    **names_rotary.MODEL_TYPES,
    **names_bert.MODEL_TYPES,
    **names_pair.MODEL_TYPES,
    **names_shared.MODEL_TYPES,
    **names_image.MODEL_TYPES,
    **names_xl.MODEL_TYPES,
    **names_reformer.MODEL_TYPES,
}
PUBLISHED = {kind.model_type or name for name, kind in MODEL_TYPES.items()}  # the names in config.json


def row_of(config: Config) -> str:
    """Returns the name of the row that reads a config. Raises ValueError if there is none."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise ValueError(
            f"model_type is {name!r} in config.json, which everyformer cannot read; {nearest(str(name), PUBLISHED)}"
        )
    return MODEL_TYPES[name].variant(config) or name


def model_type(name: str) -> ModelType:
    """Returns a row of the table. Raises ValueError if there is none of this name."""
    if name not in MODEL_TYPES:
        raise ValueError(f"no names of transformers are known for {name!r}; {nearest(str(name), MODEL_TYPES)}")
    return MODEL_TYPES[name]
