"""Vision Transformers and DeiT as transformers stores them: the map of patches is a convolution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isqrt
from typing import Any

from everyformer.family.activations import activation
from everyformer.family.names import Change, Head, ModelType, Rows

_LAYER = "body.layers.{n}."
_THEIRS = "encoder.layer.{n}."
ROWS: Rows = {
    "class_token": ("embeddings.cls_token",),
    "embed.map.*": ("embeddings.patch_embeddings.projection.*",),
    "position.table.weight": ("embeddings.position_embeddings",),
    _LAYER + "residuals.0.norm.*": (_THEIRS + "layernorm_before.*",),
    _LAYER + "sublayers.0.heads.qkv.*": tuple(f"{_THEIRS}attention.attention.{x}.*" for x in ("query", "key", "value")),
    _LAYER + "sublayers.0.heads.out.*": (_THEIRS + "attention.output.dense.*",),
    _LAYER + "residuals.1.norm.*": (_THEIRS + "layernorm_after.*",),
    _LAYER + "sublayers.1.hidden.0.*": (_THEIRS + "intermediate.dense.*",),
    _LAYER + "sublayers.1.out.*": (_THEIRS + "output.dense.*",),
    "body.stream.norm.*": ("layernorm.*",),
}
NEW_NAMES = {  # of transformers 5 in memory
    r"^layers\.(\d+)\.attention\.q_proj\.": r"encoder.layer.\1.attention.attention.query.",
    r"^layers\.(\d+)\.attention\.k_proj\.": r"encoder.layer.\1.attention.attention.key.",
    r"^layers\.(\d+)\.attention\.v_proj\.": r"encoder.layer.\1.attention.attention.value.",
    r"^layers\.(\d+)\.attention\.o_proj\.": r"encoder.layer.\1.attention.output.dense.",
    r"^layers\.(\d+)\.mlp\.fc1\.": r"encoder.layer.\1.intermediate.dense.",
    r"^layers\.(\d+)\.mlp\.fc2\.": r"encoder.layer.\1.output.dense.",
    r"^layers\.(\d+)\.layernorm_": r"encoder.layer.\1.layernorm_",
}
DEFAULTS: Mapping[str, Any] = {
    "image_size": 224,
    "patch_size": 16,
    "num_channels": 3,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}

VIT = ModelType(
    member="vit",
    prefix="vit",
    settings={
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "layers": "num_hidden_layers",
        "image": "image_size",
        "patch": "patch_size",
        "channels": "num_channels",
    },
    parts={
        "feed_forward.hidden": "intermediate_size",
        "feed_forward.activation": activation("hidden_act"),
        "layer_norm.eps": "layer_norm_eps",
        "model.dropout": "hidden_dropout_prob",
        "pre_norm.dropout": "hidden_dropout_prob",
        "attention.dropout": "attention_probs_dropout_prob",
    },
    defaults=DEFAULTS,
    fixed={"qkv_bias": True},
    rows=ROWS,
    heads={
        "classify": Head(
            "classifier.weight", {"type": "classify", "reading": "first"}, {"map.*": ("classifier.*",)}, "classes"
        )
    },
    architectures={(): "ViTModel", ("classify",): "ViTForImageClassification"},
    renamed=NEW_NAMES,
    paths={"image": lambda model: isqrt(model.position.length - model.class_token) * model.embed.size},
    changes={
        r"\.projection\.weight$": Change(
            lambda x: x.flatten(1),
            lambda x, model: x.unflatten(1, (model.embed.channels, model.embed.size, model.embed.size)),
        ),
        r"\.position_embeddings$": Change(lambda x: x[0], lambda x, model: x[None]),
    },
)

DEIT = replace(
    VIT,
    prefix="deit",
    always={"distilled": True},
    rows={**ROWS, "class_token": ("embeddings.cls_token", "embeddings.distillation_token")},
    heads={
        **VIT.heads,
        "distilled": Head(
            "cls_classifier.weight",
            {"type": "classify", "reading": "first", "distilled": True},
            {"map.*": ("cls_classifier.*",), "distilled.*": ("distillation_classifier.*",)},
            "classes",
        ),
    },
    architectures={
        (): "DeiTModel",
        ("classify",): "DeiTForImageClassification",
        ("distilled",): "DeiTForImageClassificationWithTeacher",
    },
)

MODEL_TYPES = {"vit": VIT, "deit": DEIT}
