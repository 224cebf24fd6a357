"""ALBERT and ELECTRA as transformers stores them. The rows are those of names_encoder.py."""

from __future__ import annotations

from everyformer.family.activations import activation
from everyformer.family.names import Head, ModelType
from everyformer.family.names_bert import DEFAULTS, FIRST, FIXED, OLD_NAMES, PARTS, QUESTIONS, SETTINGS, TOKENS, UNUSED
from everyformer.family.names_encoder import HEADS, ROWS

ALBERT = ModelType(
    member="albert",
    prefix="albert",
    settings={**SETTINGS, "hidden": "intermediate_size", "embed_width": "embedding_size"},
    parts={
        **{path: field for path, field in PARTS.items() if not path.startswith("classify.")},
        "classify.dropout": "classifier_dropout_prob",
        "masked.width": "embedding_size",
        "masked.activation": activation("hidden_act"),
    },
    defaults={
        **DEFAULTS,
        "hidden_act": "gelu_new",
        "embedding_size": 128,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout_prob": 0.1,
    },
    fixed={**FIXED, "num_hidden_groups": 1, "inner_group_num": 1},
    rows=ROWS["albert"],
    heads={
        "masked": Head("predictions.bias", {"type": "masked"}, HEADS["albert"]["predictions.bias"]),
        "pair": Head(
            "sop_classifier.classifier.weight",
            FIRST,
            HEADS["albert"]["sop_classifier.classifier.weight"],
            "classes",
        ),
        "classify": Head(
            "classifier.weight",
            FIRST,
            {"pooler.*": ("pooler.*",), "map.*": ("classifier.*",)},
            "classes",
            ("pooler.weight",),
        ),
        "tokens": TOKENS,
        "questions": QUESTIONS,
    },
    architectures={
        (): "AlbertModel",
        ("masked",): "AlbertForMaskedLM",
        ("masked", "pair"): "AlbertForPreTraining",
        ("classify",): "AlbertForSequenceClassification",
        ("tokens",): "AlbertForTokenClassification",
        ("questions",): "AlbertForQuestionAnswering",
    },
    tied={
        "predictions.decoder.weight": "embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    renamed=OLD_NAMES,
    unused=UNUSED,
    paths={"layers": "repeat.steps", "hidden": "feed_forward.hidden", "embed_width": "model.embed_width"},
)

ELECTRA = ModelType(
    member="electra",
    prefix="electra",
    settings={**SETTINGS, "hidden": "intermediate_size", "embed_width": "embedding_size"},
    parts={
        **{path: field for path, field in PARTS.items() if path != "masked.activation"},
        "masked.width": "embedding_size",
        "replaced_token.activation": activation("hidden_act"),
    },
    defaults={**DEFAULTS, "embedding_size": 128},
    fixed=FIXED,
    always={"generator": None},  # which serves training only
    rows=ROWS["electra"],
    heads={
        "masked": Head(
            "generator_lm_head.bias",
            {"type": "masked", "activation": "gelu"},
            HEADS["electra"]["generator_lm_head.bias"],
        ),
        "replaced": Head(
            "discriminator_predictions.dense_prediction.weight",
            {"type": "replaced_token"},
            HEADS["electra"]["discriminator_predictions.dense_prediction.weight"],
        ),
        "classify": Head(
            "classifier.out_proj.weight",
            FIRST | {"pooler_activation": "gelu"},
            {"pooler.*": ("classifier.dense.*",), "map.*": ("classifier.out_proj.*",)},
            "classes",
        ),
        "tokens": TOKENS,
        "questions": QUESTIONS,
    },
    architectures={
        (): "ElectraModel",
        ("masked",): "ElectraForMaskedLM",
        ("replaced",): "ElectraForPreTraining",
        ("classify",): "ElectraForSequenceClassification",
        ("tokens",): "ElectraForTokenClassification",
        ("questions",): "ElectraForQuestionAnswering",
    },
    tied={"generator_lm_head.weight": "embeddings.word_embeddings.weight"},
    renamed=OLD_NAMES,
    unused=UNUSED,
    paths={
        "hidden": "feed_forward.hidden",
        "embed_width": lambda model: model.embed_width or model.width,
        "layers": lambda model: model.body.num_layers,
    },
)

MODEL_TYPES = {"albert": ALBERT, "electra": ELECTRA}
