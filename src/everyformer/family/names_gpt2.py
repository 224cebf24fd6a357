"""GPT-2 as transformers stores it: its maps are transposed, and the output map is the embedding table."""

from __future__ import annotations

from everyformer.family.activations import activation
from everyformer.family.names import Change, Field, ModelType
from everyformer.family.names_bert import TOKENS
from everyformer.family.names_decoder import decoder_heads

_LAYER = "body.layers.{n}."

GPT2 = ModelType(
    member="gpt2",
    prefix="transformer",
    settings={
        "width": "n_embd",
        "heads": "n_head",
        "layers": "n_layer",
        "context": "n_positions",
        "vocabulary": "vocab_size",
    },
    parts={
        "feed_forward.hidden": Field("n_inner", lambda hidden, config: hidden or 4 * config["n_embd"]),
        "feed_forward.activation": activation("activation_function"),
        "layer_norm.eps": "layer_norm_epsilon",
        "model.dropout": "embd_pdrop",
        "pre_norm.dropout": "resid_pdrop",
        "attention.dropout": "attn_pdrop",
        "language.tied": "tie_word_embeddings",
    },
    defaults={
        "n_inner": None,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    rows={
        "embed.table.weight": ("wte.weight",),
        "position.table.weight": ("wpe.weight",),
        _LAYER + "residuals.0.norm.*": ("h.{n}.ln_1.*",),
        _LAYER + "sublayers.0.heads.qkv.*": ("h.{n}.attn.c_attn.*",),
        _LAYER + "sublayers.0.heads.out.*": ("h.{n}.attn.c_proj.*",),
        _LAYER + "residuals.1.norm.*": ("h.{n}.ln_2.*",),
        _LAYER + "sublayers.1.hidden.0.*": ("h.{n}.mlp.c_fc.*",),
        _LAYER + "sublayers.1.out.*": ("h.{n}.mlp.c_proj.*",),
        "body.stream.norm.*": ("ln_f.*",),
    },
    heads=decoder_heads("wte.weight") | {"tokens": TOKENS},
    architectures={
        (): "GPT2Model",
        ("language",): "GPT2LMHeadModel",
        ("classify",): "GPT2ForSequenceClassification",
        ("tokens",): "GPT2ForTokenClassification",
    },
    tied={"lm_head.weight": "wte.weight"},
    unused=r"^h\.\d+\.attn\.(masked_)?bias$",  # causal masks, which old files store among the weights
    changes={r"\.c_(attn|proj|fc)\.weight$": Change(lambda x: x.T, lambda x, model: x.T)},
)

MODEL_TYPES = {"gpt2": GPT2}
