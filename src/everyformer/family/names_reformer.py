"""Reformer as transformers stores what the authors published: both streams at the end, concatenated positions, chunks of sorted keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from everyformer.family.activations import activation
from everyformer.family.names import Change, Config, Field, Head, ModelType

_LAYER, _THEIRS = "body.layers.{n}.", "encoder.layers.{n}."
_MAPS = ("query", "key", "query_key", "value")
SEEDS = (-(2**63), 2**64 - 1)  # the numbers that torch takes as a seed
KINDS = {"local": "local", "lsh": "hashed"}


def _joined(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Joins the maps to queries, keys and values: layers that hash have two of them, the others three."""
    joined = dict[str, list[Tensor]]()
    for name in sorted(weights, key=lambda name: [f".{one}.weight" in name for one in _MAPS], reverse=True):
        stem, _, last = name.removesuffix(".weight").rpartition(".")
        if stem.endswith("self_attention") and last in _MAPS:
            joined.setdefault(f"{stem}.qkv.weight", []).append(weights.pop(name))
    return weights | {name: torch.cat(parts) for name, parts in joined.items()}


def _whole(number: Any) -> int:
    if type(number) is not int:
        raise TypeError
    return number


def _pair(shape: Any, config: Config) -> tuple[int, int]:
    """The numbers of rows and columns, or of the features of each."""
    if not isinstance(shape, list) or len(shape) != 2:
        raise TypeError
    return _whole(shape[0]), _whole(shape[1])


def _normal(config: Config, weights: Mapping[str, Tensor]) -> Config:
    kinds, layers = config.get("attn_layers"), config.get("num_hidden_layers")
    if isinstance(kinds, list) and layers not in (None, len(kinds)):
        raise ValueError(
            f"attn_layers names {len(kinds)} layers, but num_hidden_layers is {layers}; restore config.json"
        )
    return config


def _buckets(given: Any, config: Config) -> Any:
    """The numbers of buckets; where the config has none, those that transformers takes for the longest text."""
    if given is not None:
        return _pair(given, config) if isinstance(given, list) else _whole(given)
    chunk, context = config["lsh_attn_chunk_length"], math.prod(_pair(config["axial_pos_shape"], config))
    power = (2 * (context // chunk)).bit_length() - 1
    if 2**power <= 2 * max(math.isqrt(context // chunk), chunk):
        return max(2, 2**power)
    return 2 ** (power // 2), 2 ** (power - power // 2)


def _pattern(given: Any, config: Config) -> str:
    buckets = _buckets(given, config)
    return f"chunked({_whole(config['num_hashes'])}, {buckets}, {_whole(config['lsh_attn_chunk_length'])}, False, True)"


def _local_pattern(given: Any, config: Config) -> str:
    return f"causal & local({_whole(given)}, {given * _whole(config['local_num_chunks_before'])})"


def _rotations(config: Config, shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Random matrices of the hashes, which are no weights: transformers draws them in each call, all alike if `hash_seed` is given."""
    seed = config.get("hash_seed")
    if seed is not None and not (type(seed) is int and SEEDS[0] <= seed <= SEEDS[1]):
        raise ValueError(f"hash_seed is {seed!r} in config.json; give null, or a whole number of 64 bits")
    generator = torch.Generator().manual_seed(seed or 0)
    drawn = dict[str, Tensor]()
    for name, x_RHEN in shapes.items():
        if name.endswith(".hash.rotation_RHEN"):
            generator = generator if seed is None else generator.manual_seed(seed)
            rounds, heads, width, directions = x_RHEN.shape
            x_HERN = torch.randn(heads, width, rounds, directions, generator=generator)
            drawn[name] = x_HERN.permute(2, 0, 1, 3).contiguous()
    return drawn


REFORMER = ModelType(
    member="reformer",
    prefix="reformer",
    exported=False,
    settings={
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "head_width": "attention_head_size",
        "layers": "num_hidden_layers",
        "order": Field("attn_layers", lambda kinds, config: [KINDS[kind] for kind in kinds]),
        "context": Field("axial_pos_shape", lambda shape, config: math.prod(_pair(shape, config))),
        "axial_columns": Field("axial_pos_shape", lambda shape, config: _pair(shape, config)[1]),
        "axial_widths": Field("axial_pos_embds_dim", _pair),
        "round_counts": Field("num_hashes", lambda rounds, config: _whole(rounds) > 1),
        "pattern": Field("num_buckets", _pattern),
        "local_pattern": Field("local_attn_chunk_length", _local_pattern),
        "hidden": "feed_forward_size",
        "vocabulary": "vocab_size",
    },
    parts={
        "feed_forward.activation": activation("hidden_act"),
        "layer_norm.eps": "layer_norm_eps",
        "model.dropout": "hidden_dropout_prob",
        "reversible.dropout": "hidden_dropout_prob",
        "feed_forward.dropout": "hidden_dropout_prob",
        "attention.dropout": "lsh_attention_probs_dropout_prob",
    },
    defaults={
        "attention_head_size": 64,
        "num_attention_heads": 12,
        "axial_pos_shape": [64, 64],
        "axial_pos_embds_dim": [64, 192],
        "num_buckets": None,
        "num_hashes": 1,
        "lsh_attn_chunk_length": 64,
        "local_attn_chunk_length": 64,
        "local_num_chunks_before": 1,
        "feed_forward_size": 512,
        "hidden_act": "relu",
        "layer_norm_eps": 1e-12,
        "hidden_dropout_prob": 0.05,
        "lsh_attention_probs_dropout_prob": 0.0,
    },
    fixed={
        "is_decoder": True,
        "axial_pos_embds": True,
        "lsh_num_chunks_before": 1,
        "lsh_num_chunks_after": 0,
        "local_num_chunks_after": 0,
    },
    always={"merge": "concatenate"},
    rows={
        "embed.table.weight": ("embeddings.word_embeddings.weight",),
        "position.table.axes.0.weight": ("embeddings.position_embeddings.weights.0",),
        "position.table.axes.1.weight": ("embeddings.position_embeddings.weights.1",),
        _LAYER + "residuals.0.norm.*": (_THEIRS + "attention.layer_norm.*",),
        _LAYER + "sublayers.0.heads.qkv.weight": (_THEIRS + "attention.self_attention.qkv.weight",),
        _LAYER + "sublayers.0.heads.out.weight": (_THEIRS + "attention.output.dense.weight",),
        _LAYER + "residuals.1.norm.*": (_THEIRS + "feed_forward.layer_norm.*",),
        _LAYER + "sublayers.1.hidden.0.*": (_THEIRS + "feed_forward.dense.dense.*",),
        _LAYER + "sublayers.1.out.*": (_THEIRS + "feed_forward.output.dense.*",),
        "body.stream.norm.*": ("encoder.layer_norm.*",),
    },
    heads={
        "language": Head(
            "lm_head.decoder.weight",
            {"type": "language", "tied": False, "bias": True},
            {"map.weight": ("lm_head.decoder.weight",), "bias": ("lm_head.bias",)},
        )
    },
    architectures={("language",): "ReformerModelWithLMHead"},
    renamed={r"^lm_head\.decoder\.bias$": "lm_head.bias"},
    unused=r"\.self_attention\.(self_)?mask_value_float(16|32)$",  # numbers, which old files store among the weights
    changes={r"position_embeddings\.weights\.\d+$": Change(lambda x: x.flatten(0, -2), lambda x, model: x)},
    normal=_normal,
    spread=_joined,
    draw=_rotations,
)

MODEL_TYPES = {"reformer": REFORMER}
