"""Transformer-XL as its authors' code names its weights, and as transformers 4 stored it (`transfo-xl`); transformers 5 has it no more.

A folder has config.json, with the arguments of the authors' train.py and `vocab_size`, and the state dict as pytorch_model.bin. Their
layers share r_w_bias and r_r_bias unless each has its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from everyformer.family.names import Config, Field, Head, ModelType

_LAYER, _THEIRS = "body.layers.{n}.", "layers.{n}."
BIASES = ("r_w_bias", "r_r_bias")  # u and v


def _spread(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gives every layer the vectors that all share."""
    layers = {match[1] for name in weights if (match := re.match(r"layers\.(\d+)\.", name))}
    shared = {name: weights.pop(name) for name in BIASES if name in weights}
    more = {f"layers.{n}.dec_attn.{name}": x for n in layers for name, x in shared.items()}
    return {**more, **weights}


def _normal(config: Config, weights: Mapping[str, Tensor]) -> Config:
    width, heads = config.get("d_model"), config.get("n_head")
    share = width // heads if isinstance(width, int) and isinstance(heads, int) and heads > 0 else config.get("d_head")
    for field, needed in (("d_embed", width), ("d_head", share)):
        if config.get(field, needed) != needed:
            raise ValueError(
                f"{field} is {config[field]!r}, but everyformer's transformer-xl has {needed} with this d_model"
            )
    return {"tie_word_embeddings": config.get("tie_weight", True), **config}


def _pattern(same_length: object, config: Config) -> str:
    if not isinstance(same_length, bool):
        raise TypeError
    return f"causal & window({config['mem_len']})" if same_length else "causal"


TRANSFO_XL = ModelType(
    member="transformer-xl",
    prefix="transformer",
    exported=False,
    settings={
        "width": "d_model",
        "heads": "n_head",
        "layers": "n_layer",
        "hidden": "d_inner",
        "memory": "mem_len",
        "vocabulary": "vocab_size",
        "pattern": Field("same_length", _pattern),
    },
    parts={
        "four_term.max_distance": Field("clamp_len", lambda length, config: length if length > 0 else None),
        "language.tied": "tie_word_embeddings",
        "model.dropout": "dropout",
        "post_norm.dropout": "dropout",
        "feed_forward.dropout": "dropout",
        "attention.dropout": "dropatt",
    },
    defaults={"same_length": False, "clamp_len": -1, "dropout": 0.1, "dropatt": 0.0},
    fixed={"cutoffs": [], "div_val": 1, "pre_lnorm": False, "attn_type": 0},
    rows={
        "embed.table.weight": ("word_emb.emb_layers.0.weight",),
        _LAYER + "sublayers.0.heads.qkv.weight": (_THEIRS + "dec_attn.qkv_net.weight",),
        _LAYER + "sublayers.0.heads.out.weight": (_THEIRS + "dec_attn.o_net.weight",),
        _LAYER + "sublayers.0.score_mods.0.w_r.weight": (_THEIRS + "dec_attn.r_net.weight",),
        _LAYER + "sublayers.0.score_mods.0.u_HE": (_THEIRS + "dec_attn.r_w_bias",),
        _LAYER + "sublayers.0.score_mods.0.v_HE": (_THEIRS + "dec_attn.r_r_bias",),
        _LAYER + "residuals.0.norm.*": (_THEIRS + "dec_attn.layer_norm.*",),
        _LAYER + "sublayers.1.hidden.0.*": (_THEIRS + "pos_ff.CoreNet.0.*",),
        _LAYER + "sublayers.1.out.*": (_THEIRS + "pos_ff.CoreNet.3.*",),
        _LAYER + "residuals.1.norm.*": (_THEIRS + "pos_ff.layer_norm.*",),
    },
    heads={
        "language": Head(
            "crit.out_layers.0.bias",
            {"type": "language"},
            {"bias": ("crit.out_layers.0.bias",), "map.weight": ("crit.out_layers.0.weight",)},
        )
    },
    architectures={("language",): "TransfoXLLMHeadModel"},
    tied={"crit.out_layers.0.weight": "word_emb.emb_layers.0.weight"},
    unused=r"^pos_emb\.inv_freq$",
    normal=_normal,
    spread=_spread,
)

MODEL_TYPES = {"transfo-xl": TRANSFO_XL}
