"""T5 as transformers stores it: version 1.0, and version 1.1 with gated nets. The rows are those of names_encoder.py.

Whether the output is the shared table is read from the weights: newer versions of transformers tie it unless the file has another one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from everyformer.family.activations import ACTIVATIONS
from everyformer.family.names import Config, Field, Head, ModelType
from everyformer.family.names_encoder import ROWS

PROJECTION = "feed_forward_proj"  # the activation; after "gated-" that of a gated net


def _normal(config: Config, weights: Mapping[str, Tensor]) -> Config:
    """A config of today, with what follows from other fields."""
    output = weights.get("lm_head.weight")
    layers = config.get("num_layers")
    found = {
        "scale_decoder_outputs": config.get("tie_word_embeddings") is not False,
        "num_decoder_layers": layers,
        **{name: value for name, value in config.items() if value is not None},
        "tie_word_embeddings": output is None or torch.equal(output, weights.get("shared.weight", output[:0])),
    }
    if found["num_decoder_layers"] != layers:
        raise ValueError(
            f"num_decoder_layers is {found['num_decoder_layers']} and num_layers {layers}, but everyformer's t5 has as many on both sides"
        )
    return found


def _activation(given: object, config: Config) -> str:
    name = "gelu_new" if given == "gated-gelu" else str(given).removeprefix("gated-")
    own = config.get("dense_act_fn") or name
    if own != name and own not in ACTIVATIONS:
        raise ValueError(f"dense_act_fn is {own!r}, which everyformer has not; the names are {', '.join(ACTIVATIONS)}")
    if own not in ACTIVATIONS:
        raise ValueError(
            f"{PROJECTION} is {given!r}, which everyformer has not; the names are {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[own]


def _written(ours: str) -> str:
    return next(theirs for theirs, one in ACTIVATIONS.items() if one == ours)


T5 = ModelType(
    member="t5",
    prefix="",
    side="decoder.",
    variant=lambda config: "t5 v1.1" if str(config.get(PROJECTION, "relu")).startswith("gated-") else None,
    settings={
        "width": "d_model",
        "heads": "num_heads",
        "head_width": "d_kv",
        "layers": "num_layers",
        "hidden": "d_ff",
        "vocabulary": "vocab_size",
    },
    parts={
        "feed_forward.activation": Field(PROJECTION, _activation, _written),
        "t5_bias.buckets": "relative_attention_num_buckets",
        "t5_bias.max_distance": "relative_attention_max_distance",
        "rmsnorm.eps": "layer_norm_epsilon",
        "language.tied": "tie_word_embeddings",
        "language.scaled": "scale_decoder_outputs",
        "model.dropout": "dropout_rate",
        "pre_norm.dropout": "dropout_rate",
        "attention.dropout": "dropout_rate",
        "cross_attention.dropout": "dropout_rate",
    },
    defaults={
        PROJECTION: "relu",
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "dropout_rate": 0.1,
        "d_kv": 64,
        "vocab_size": 32128,
    },
    fixed={"is_encoder_decoder": True},
    rows=ROWS["t5"],
    heads={"language": Head("shared.weight", {"type": "language"}, {"map.weight": ("lm_head.weight",)})},
    architectures={("language",): "T5ForConditionalGeneration"},
    tied={
        "encoder.embed_tokens.weight": "shared.weight",
        "decoder.embed_tokens.weight": "shared.weight",
        "lm_head.weight": "shared.weight",
    },
    unused=r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$",  # of the first files
    normal=_normal,
    paths={
        "head_width": lambda model: _projection(model).key_width or model.encoder.width // _projection(model).heads,
        "hidden": "feed_forward.hidden",
    },
)
T5_GATED = replace(
    T5,
    model_type="t5",
    variant=lambda config: None,
    rows=ROWS["t5 v1.1"],
    always={"gated": True},
    parts={
        **T5.parts,
        "feed_forward.activation": Field(
            PROJECTION, _activation, lambda ours: "gated-" + ("gelu" if ours == "gelu_tanh" else _written(ours))
        ),
    },
    defaults={**T5.defaults, PROJECTION: "gated-gelu"},
)


def _projection(model: Any) -> Any:
    return model.encoder.body.layers[0].sublayers[0].heads


MODEL_TYPES = {"t5": T5, "t5 v1.1": T5_GATED}
