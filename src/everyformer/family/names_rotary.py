"""Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 as transformers stores them. The rows are those of names_decoder.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from torch import Tensor

from everyformer.attention.pattern import Window
from everyformer.attention.softmax import SoftCap
from everyformer.family.activations import activation
from everyformer.family.names import Config, Field, ModelType
from everyformer.family.names_decoder import MEMBERS, PREFIX, ROWS, decoder_heads
from everyformer.network.output_head import Language

ROPE = "rope_parameters"
SCALINGS: dict[str, dict[str, str]] = {  # fields of our scalings, by rope_type: theirs
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low": "low_freq_factor",
        "high": "high_freq_factor",
        "context": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "context": "original_max_position_embeddings",
        "fast": "beta_fast",
        "slow": "beta_slow",
        "attention": "attention_factor",
        "truncate": "truncate",
    },
}


def _normal(config: Config, weights: Mapping[str, Tensor]) -> Config:
    """A config of today: rotary positions in one field, and no field that is left out because it follows from others."""
    if ROPE in config:
        return config
    rope = {"rope_theta": config.get("rope_theta", 10000.0), **(config.get("rope_scaling") or {})}
    if "rope_local_base_freq" in config:
        near = {"rope_theta": config["rope_local_base_freq"], "rope_type": "default"}
        return {**config, ROPE: {"full_attention": rope, "sliding_attention": near}}
    return {**config, ROPE: rope}


def _scaling(rope: Any, config: Config) -> Any:
    """Our scaling as plain data; None: not scaled."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ValueError(
            f"rope_type is {kind!r}, which everyformer has not; the names are default, {', '.join(SCALINGS)}"
        )
    given = {ours: rope[theirs] for ours, theirs in SCALINGS[kind].items() if rope.get(theirs) is not None}
    if kind == "yarn":
        given.setdefault("context", config.get("max_position_embeddings"))
    return {"type": f"{kind}_scaling", **given}


def _written(scaling: Any) -> Mapping[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    kind = scaling["type"].removesuffix("_scaling")
    if kind not in SCALINGS:
        return {"rope_type": kind}
    return {"rope_type": kind} | {theirs: scaling[ours] for ours, theirs in SCALINGS[kind].items()}


def _head_width(width: Any, config: Config) -> Any:
    return None if width is None or width * config["num_attention_heads"] == config["hidden_size"] else width


def _key_heads(heads: Any, config: Config) -> Any:
    return None if heads == config["num_attention_heads"] else heads


def _scale(scalar: Any, config: Config) -> Any:
    return None if scalar == config["head_dim"] else scalar**-0.5


SETTINGS: Mapping[str, str | Field] = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "key_heads": Field("num_key_value_heads", _key_heads),
    "head_width": Field("head_dim", _head_width),
    "layers": "num_hidden_layers",
    "hidden": "intermediate_size",
    "vocabulary": "vocab_size",
    "eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "base": Field(ROPE, lambda rope, config: rope["rope_theta"], lambda base: {"rope_theta": base}),
    "scaling": Field(ROPE, _scaling, _written),
}
OWN_WIDTH: Mapping[str, str | Field] = {**SETTINGS, "head_width": "head_dim"}
PARTS: Mapping[str, str | Field] = {
    "feed_forward.activation": activation("hidden_act"),
    "attention.dropout": "attention_dropout",
}
PATHS: dict[str, Any] = {
    "key_heads": lambda model: _projection(model).key_heads or _projection(model).heads,
    "head_width": lambda model: _projection(model).key_width or model.width // _projection(model).heads,
    "hidden": "feed_forward.hidden",
    "eps": "rmsnorm.eps",
    "tied": lambda model: all(head.tied for head in _language(model)),
    "base": lambda model: _rotary(model, -1).base,
    "near_base": lambda model: _rotary(model, 0).base,
    "scaling": "rotary.scaling",
    "window": lambda model: next((part.size for part in _patterns(model) if isinstance(part, Window)), None),
}
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32768,
}
HEADS = decoder_heads("embed_tokens.weight")


def _projection(model: Any) -> Any:
    return model.body.layers[0].sublayers[0].heads


def _patterns(model: Any) -> list[Any]:
    return list(model.body.layers[0].sublayers[0].pattern.walk())


def _soft_cap(model: Any) -> float | None:
    score_mods = model.body.layers[0].sublayers[0].score_mods
    return next((one.cap for one in score_mods if isinstance(one, SoftCap)), None)


def _language(model: Any) -> list[Language]:
    return [head for head in model.outputs if isinstance(head, Language)]


def _final_soft_cap(model: Any) -> float | None:
    return next((head.soft_cap for head in _language(model)), None)


def _rotary(model: Any, layer: int) -> Any:
    return model.body.layers[layer].sublayers[0].score_mods[0]


def _model_type(name: str, theirs: str, **changes: Any) -> ModelType:
    """A row of the table. `always` are settings that every model of this type has."""
    fields: dict[str, Any] = {
        "settings": SETTINGS,
        "parts": PARTS,
        "defaults": DEFAULTS,
        "paths": PATHS,
        "normal": _normal,
        "architectures": {
            (): f"{theirs}Model",
            ("language",): f"{theirs}ForCausalLM",
            ("classify",): f"{theirs}ForSequenceClassification",
            ("tokens",): f"{theirs}ForTokenClassification",
        },
    }
    return ModelType(
        member=MEMBERS[name],
        prefix=PREFIX.rstrip("."),
        rows=ROWS[name],
        heads=HEADS,
        tied={"lm_head.weight": "embed_tokens.weight"},
        renamed={r"^transformer\.": ""},  # of models that answer questions
        unused=r"rotary_emb\.inv_freq$",
        **(fields | changes),
    )


# Gemma: layers that attend to a window and layers that attend to all take turns.
GEMMA: Mapping[str, str | Field] = {
    **{name: field for name, field in OWN_WIDTH.items() if name != "tied"},
    "key_heads": "num_key_value_heads",
    "window": "sliding_window",
    "scale": Field("query_pre_attn_scalar", _scale),
}
GEMMA_PARTS: Mapping[str, str | Field] = {
    "feed_forward.activation": activation("hidden_activation"),
    "attention.dropout": "attention_dropout",
}
GEMMA_DEFAULTS = {name: value for name, value in DEFAULTS.items() if name != "hidden_act"} | {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
GEMMA_FIXED = {"attention_bias": False, "tie_word_embeddings": True}


def _scalar(model: Any) -> float:
    """query_pre_attn_scalar: the scale of the scores is its root's inverse."""
    projection = _projection(model)
    scalar = projection.key_width if projection.scale is None else round(projection.scale**-2, 6)
    return int(scalar) if scalar == int(scalar) else scalar


def _layer_types(model: Any) -> list[str]:
    period = len(model.body.layers)
    full = [number % period == period - 1 for number in range(model.body.num_layers)]
    return ["full_attention" if one else "sliding_attention" for one in full]


def _sliding(types: Any, config: Config) -> int:
    """The number of sliding layers before each full one."""
    period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    if types is None:
        return int(period) - 1
    sliding = types.index("full_attention") if "full_attention" in types else max(len(types), period - 1)
    expected = ["full_attention" if n % (sliding + 1) == sliding else "sliding_attention" for n in range(len(types))]
    if types == expected and len(types) != config["num_hidden_layers"]:
        raise ValueError(
            f"num_hidden_layers is {config['num_hidden_layers']!r}, but layer_types has {len(types)} layers"
        )
    if types != expected:
        raise ValueError(f"layer_types is {types}, whose sliding and full layers do not take turns in one rhythm")
    return int(sliding)


def _alternating(config: Config, weights: Mapping[str, Tensor]) -> Config:
    types = config.get("layer_types")
    if types is not None and (not isinstance(types, list) or _sliding(types, config) != 1):
        raise ValueError(f"layer_types is {types}, but the layers of gemma2 take turns one by one")
    return _normal(config, weights)


def _of(side: str, field: Field) -> Field:
    """A field of rotary positions in one side of Gemma 3's pair of them."""
    return Field(
        ROPE,
        lambda rope, config: field.read(rope[side], config),
        lambda value: {side: field.write(value)},
    )


BASE = Field(ROPE, lambda rope, config: rope["rope_theta"], lambda base: {"rope_theta": base, "rope_type": "default"})
MODEL_TYPES = {
    "llama": _model_type("llama", "Llama", fixed={"attention_bias": False, "mlp_bias": False}),
    "mistral": _model_type(
        "mistral",
        "Mistral",
        settings={name: field for name, field in SETTINGS.items() if name != "scaling"} | {"window": "sliding_window"},
        defaults={**DEFAULTS, "sliding_window": None},
    ),
    "qwen2": _model_type(
        "qwen2",
        "Qwen2",
        fixed={"use_sliding_window": False},
        always={"bias": True},
        defaults={**DEFAULTS, "layer_types": None},
    ),
    "qwen3": _model_type(
        "qwen3",
        "Qwen3",
        settings=OWN_WIDTH,
        fixed={"use_sliding_window": False, "attention_bias": False},
        defaults={**DEFAULTS, "head_dim": 128},
    ),
    "gemma2": _model_type(
        "gemma2",
        "Gemma2",
        settings={name: field for name, field in GEMMA.items() if name != "scaling"}
        | {"soft_cap": "attn_logit_softcapping", "final_soft_cap": "final_logit_softcapping"},
        parts=GEMMA_PARTS,
        defaults={**GEMMA_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        fixed=GEMMA_FIXED,
        normal=_alternating,
        paths={**PATHS, "scale": _scalar, "soft_cap": _soft_cap, "final_soft_cap": _final_soft_cap},
    ),
    "gemma3_text": _model_type(
        "gemma3_text",
        "Gemma3",
        architectures={
            (): "Gemma3TextModel",
            ("language",): "Gemma3ForCausalLM",
            ("classify",): "Gemma3TextForSequenceClassification",
        },
        settings={
            **GEMMA,
            "sliding": Field("layer_types", _sliding),
            "base": _of(
                "full_attention", Field(ROPE, lambda rope, config: rope["rope_theta"], lambda x: {"rope_theta": x})
            ),
            "near_base": _of("sliding_attention", BASE),
            "scaling": _of("full_attention", Field(ROPE, _scaling, _written)),
        },
        parts=GEMMA_PARTS,
        defaults=GEMMA_DEFAULTS,
        fixed={**GEMMA_FIXED, "attn_logit_softcapping": None, "final_logit_softcapping": None},
        paths={
            **PATHS,
            "scale": _scalar,
            "sliding": _layer_types,
            "scaling": lambda model: _plain(_rotary(model, -1).scaling),
        },
    ),
}


def _plain(scaling: Any) -> Any:
    return None if scaling is None else msgspec.to_builtins(scaling)
