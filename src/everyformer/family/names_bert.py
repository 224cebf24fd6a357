"""BERT and its descendants as transformers stores them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from everyformer.family.activations import activation
from everyformer.family.names import Change, Field, Head, ModelType, Rows

_LAYER = "body.layers.{n}."
_THEIRS = "encoder.layer.{n}."


def _some(segments: Any) -> Any:
    """The number of segment embeddings: transformers adds the first one to every token."""
    if segments == 0:
        raise ValueError("type_vocab_size is 0, but every token has one of these embeddings; give at least 1")
    return segments


SETTINGS: Mapping[str, str | Field] = {
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "layers": "num_hidden_layers",
    "context": "max_position_embeddings",
    "vocabulary": "vocab_size",
}
PARTS: Mapping[str, str | Field] = {
    "feed_forward.hidden": "intermediate_size",
    "feed_forward.activation": activation("hidden_act"),
    "layer_norm.eps": "layer_norm_eps",
    "masked.eps": "layer_norm_eps",
    "masked.activation": activation("hidden_act"),
    "model.dropout": "hidden_dropout_prob",
    "post_norm.dropout": "hidden_dropout_prob",
    "attention.dropout": "attention_probs_dropout_prob",
    "model.segments": Field("type_vocab_size", lambda segments, config: _some(segments)),
    "classify.dropout": Field(
        "classifier_dropout", lambda share, config: config["hidden_dropout_prob"] if share is None else share
    ),
}
DEFAULTS: Mapping[str, Any] = {
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "type_vocab_size": 2,
    "classifier_dropout": None,
}
FIXED: Mapping[str, Any] = {
    "is_decoder": False,
    "add_cross_attention": False,
    "position_embedding_type": "absolute",
    "tie_word_embeddings": True,
}
ENCODER: Rows = {
    "embed.table.weight": ("embeddings.word_embeddings.weight",),
    "segments.weight": ("embeddings.token_type_embeddings.weight",),
    "position.table.weight": ("embeddings.position_embeddings.weight",),
    "norm.*": ("embeddings.LayerNorm.*",),
    _LAYER + "sublayers.0.heads.qkv.*": tuple(f"{_THEIRS}attention.self.{x}.*" for x in ("query", "key", "value")),
    _LAYER + "sublayers.0.heads.out.*": (_THEIRS + "attention.output.dense.*",),
    _LAYER + "residuals.0.norm.*": (_THEIRS + "attention.output.LayerNorm.*",),
    _LAYER + "sublayers.1.hidden.0.*": (_THEIRS + "intermediate.dense.*",),
    _LAYER + "sublayers.1.out.*": (_THEIRS + "output.dense.*",),
    _LAYER + "residuals.1.norm.*": (_THEIRS + "output.LayerNorm.*",),
}
OLD_NAMES = {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"}
UNUSED = r"^embeddings\.(position_ids|token_type_ids)$"  # indices, which old files store among the weights
FIRST: dict[str, Any] = {"type": "classify", "reading": "first", "pooler": True}
POOLER: dict[str, tuple[str, ...]] = {"pooler.*": ("pooler.dense.*",)}
TOKENS = Head("classifier.weight", {"type": "per_token"}, {"map.*": ("classifier.*",)}, "outputs")
QUESTIONS = Head("qa_outputs.weight", {"type": "per_token"}, {"map.*": ("qa_outputs.*",)}, "outputs")

BERT = ModelType(
    member="bert",
    prefix="bert",
    settings=SETTINGS,
    parts=PARTS,
    defaults=DEFAULTS,
    fixed=FIXED,
    rows=ENCODER,
    heads={
        "masked": Head(
            "cls.predictions.bias",
            {"type": "masked"},
            {
                "map.*": ("cls.predictions.transform.dense.*",),
                "norm.*": ("cls.predictions.transform.LayerNorm.*",),
                "bias": ("cls.predictions.bias",),
            },
        ),
        "pair": Head("cls.seq_relationship.weight", FIRST, POOLER | {"map.*": ("cls.seq_relationship.*",)}, "classes"),
        "classify": Head(
            "classifier.weight", FIRST, POOLER | {"map.*": ("classifier.*",)}, "classes", ("pooler.dense.weight",)
        ),
        "tokens": TOKENS,
        "questions": QUESTIONS,
    },
    architectures={
        (): "BertModel",
        ("masked",): "BertForMaskedLM",
        ("masked", "pair"): "BertForPreTraining",
        ("classify",): "BertForSequenceClassification",
        ("tokens",): "BertForTokenClassification",
        ("questions",): "BertForQuestionAnswering",
    },
    tied={
        "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    renamed=OLD_NAMES,
    unused=UNUSED,
)

# RoBERTa numbers positions from the padding token on: the first two rows of its table are never used.
ROBERTA = ModelType(
    member="bert",
    prefix="roberta",
    settings={
        **SETTINGS,
        "context": Field("max_position_embeddings", lambda rows, config: rows - 2, lambda length: length + 2),
    },
    parts={path: field for path, field in PARTS.items() if path != "masked.activation"},  # which is GELU
    defaults={**DEFAULTS},
    fixed={**FIXED, "pad_token_id": 1},
    rows=ENCODER,
    heads={
        "masked": Head(
            "lm_head.bias",
            {"type": "masked", "activation": "gelu"},
            {"map.*": ("lm_head.dense.*",), "norm.*": ("lm_head.layer_norm.*",), "bias": ("lm_head.bias",)},
        ),
        "classify": Head(
            "classifier.out_proj.weight",
            FIRST,
            {"pooler.*": ("classifier.dense.*",), "map.*": ("classifier.out_proj.*",)},
            "classes",
        ),
        "tokens": TOKENS,
        "questions": QUESTIONS,
    },
    architectures={
        (): "RobertaModel",
        ("masked",): "RobertaForMaskedLM",
        ("classify",): "RobertaForSequenceClassification",
        ("tokens",): "RobertaForTokenClassification",
        ("questions",): "RobertaForQuestionAnswering",
    },
    tied={"lm_head.decoder.weight": "embeddings.word_embeddings.weight", "lm_head.decoder.bias": "lm_head.bias"},
    renamed=OLD_NAMES,
    unused=UNUSED,
    changes={
        r"position_embeddings\.weight$": Change(
            lambda x: x[2:], lambda x, model: torch.cat((x.new_zeros(2, x.shape[1]), x))
        )
    },
)

_DISTILLED = "transformer.layer.{n}."
DISTILBERT = ModelType(
    member="bert",
    prefix="distilbert",
    settings={
        "width": "dim",
        "heads": "n_heads",
        "layers": "n_layers",
        "context": "max_position_embeddings",
        "vocabulary": "vocab_size",
    },
    parts={
        "feed_forward.hidden": "hidden_dim",
        "feed_forward.activation": activation("activation"),
        "masked.activation": activation("activation"),
        "model.dropout": "dropout",
        "post_norm.dropout": "dropout",
        "attention.dropout": "attention_dropout",
        "classify.dropout": "seq_classif_dropout",
        "model.segments": Field("type_vocab_size"),
    },
    defaults={
        "hidden_dim": 3072,
        "activation": "gelu",
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "seq_classif_dropout": 0.2,
        "type_vocab_size": 0,
    },
    fixed={"sinusoidal_pos_embds": False, "tie_word_embeddings": True, "type_vocab_size": 0},
    rows={
        "embed.table.weight": ("embeddings.word_embeddings.weight",),
        "position.table.weight": ("embeddings.position_embeddings.weight",),
        "norm.*": ("embeddings.LayerNorm.*",),
        _LAYER + "sublayers.0.heads.qkv.*": tuple(f"{_DISTILLED}attention.{x}_lin.*" for x in "qkv"),
        _LAYER + "sublayers.0.heads.out.*": (_DISTILLED + "attention.out_lin.*",),
        _LAYER + "residuals.0.norm.*": (_DISTILLED + "sa_layer_norm.*",),
        _LAYER + "sublayers.1.hidden.0.*": (_DISTILLED + "ffn.lin1.*",),
        _LAYER + "sublayers.1.out.*": (_DISTILLED + "ffn.lin2.*",),
        _LAYER + "residuals.1.norm.*": (_DISTILLED + "output_layer_norm.*",),
    },
    heads={
        "masked": Head(
            "vocab_projector.bias",
            {"type": "masked"},
            {"map.*": ("vocab_transform.*",), "norm.*": ("vocab_layer_norm.*",), "bias": ("vocab_projector.bias",)},
        ),
        "classify": Head(
            "classifier.weight",
            FIRST | {"pooler_activation": "relu"},
            {"pooler.*": ("pre_classifier.*",), "map.*": ("classifier.*",)},
            "classes",
            ("pre_classifier.weight",),
        ),
        "tokens": TOKENS,
        "questions": QUESTIONS,
    },
    architectures={
        (): "DistilBertModel",
        ("masked",): "DistilBertForMaskedLM",
        ("classify",): "DistilBertForSequenceClassification",
        ("tokens",): "DistilBertForTokenClassification",
        ("questions",): "DistilBertForQuestionAnswering",
    },
    tied={"vocab_projector.weight": "embeddings.word_embeddings.weight"},
    unused=UNUSED,
)

MODEL_TYPES = {"bert": BERT, "roberta": ROBERTA, "distilbert": DISTILBERT}
