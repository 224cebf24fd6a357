"""The names of activations in transformers."""

from __future__ import annotations

from everyformer.family.names import Config, Field

ACTIVATIONS = {  # ours by theirs; of several names of one, the first is written
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu", "quick_gelu": "gelu_sigmoid",
}  # fmt: skip


def activation(name: str) -> Field:
    """Returns the field of a config that names an activation."""

    def read(given: object, config: Config) -> str:
        if not isinstance(given, str) or given not in ACTIVATIONS:
            raise ValueError(f"{name} is {given!r}, which everyformer has not; the names are {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[given]

    def write(ours: str) -> str:
        return next((theirs for theirs, one in ACTIVATIONS.items() if one == ours), ours)

    return Field(name, read, write)
