"""The names of the weights of T5, ALBERT and ELECTRA in Hugging Face transformers, as data.

A row is `ours: theirs`, as in names.py: {n} is the number of the layer, * stands for weight and bias, and the tensors of several
names are concatenated. Theirs are the names of the published files, without the prefix of the base model (`albert.`, `electra.`).
`HEADS` has the output heads of a member, each under a name that only files with this head have, in the order of our outputs; a row
of a head begins at the head: `map.*` stands for `outputs.0.map.*` in the first. ELECTRA's generator is a file of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

Rows = dict[str, tuple[str, ...]]


def _t5(gated: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "encoder.embed.table.weight", ("shared.weight",)
    yield "decoder.embed.table.weight", ("shared.weight",)
    for side, attentions in (("encoder", ("SelfAttention",)), ("decoder", ("SelfAttention", "EncDecAttention"))):
        layer, block = f"{side}.body.layers.{{n}}.", f"{side}.block.{{n}}.layer."
        for i, name in enumerate(attentions):
            projections = tuple(f"{block}{i}.{name}.{one}.weight" for one in "qkv")
            yield f"{layer}sublayers.{i}.heads.qkv.weight", projections
            yield f"{layer}sublayers.{i}.heads.out.weight", (f"{block}{i}.{name}.o.weight",)
            yield f"{layer}residuals.{i}.norm.weight", (f"{block}{i}.layer_norm.weight",)
        i, net = len(attentions), f"{block}{len(attentions)}.DenseReluDense."
        hidden = ("wi_0", "wi_1") if gated else ("wi",)
        yield f"{layer}sublayers.{i}.hidden.0.weight", tuple(f"{net}{one}.weight" for one in hidden)
        yield f"{layer}sublayers.{i}.out.weight", (f"{net}wo.weight",)
        yield f"{layer}residuals.{i}.norm.weight", (f"{block}{i}.layer_norm.weight",)
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield f"{side}.body.shared.0.bias_RH", (bias,)
        yield f"{side}.body.stream.norm.weight", (f"{side}.final_layer_norm.weight",)


_LAYER = "body.layers.0."
_SHARED = "encoder.albert_layer_groups.0.albert_layers.0."
_EMBEDDING: Rows = {
    "embed.table.weight": ("embeddings.word_embeddings.weight",),
    "segments.weight": ("embeddings.token_type_embeddings.weight",),
    "position.table.weight": ("embeddings.position_embeddings.weight",),
    "norm.*": ("embeddings.LayerNorm.*",),
}
_ALBERT: Rows = _EMBEDDING | {
    "widen.*": ("encoder.embedding_hidden_mapping_in.*",),
    _LAYER + "sublayers.0.heads.qkv.*": tuple(f"{_SHARED}attention.{x}.*" for x in ("query", "key", "value")),
    _LAYER + "sublayers.0.heads.out.*": (_SHARED + "attention.dense.*",),
    _LAYER + "residuals.0.norm.*": (_SHARED + "attention.LayerNorm.*",),
    _LAYER + "sublayers.1.hidden.0.*": (_SHARED + "ffn.*",),
    _LAYER + "sublayers.1.out.*": (_SHARED + "ffn_output.*",),
    _LAYER + "residuals.1.norm.*": (_SHARED + "full_layer_layer_norm.*",),
}
_OURS, _THEIRS = "body.layers.{n}.", "encoder.layer.{n}."
_ELECTRA: Rows = _EMBEDDING | {
    "widen.*": ("embeddings_project.*",),  # not in a file whose embedding is as wide as its layers
    _OURS + "sublayers.0.heads.qkv.*": tuple(f"{_THEIRS}attention.self.{x}.*" for x in ("query", "key", "value")),
    _OURS + "sublayers.0.heads.out.*": (_THEIRS + "attention.output.dense.*",),
    _OURS + "residuals.0.norm.*": (_THEIRS + "attention.output.LayerNorm.*",),
    _OURS + "sublayers.1.hidden.0.*": (_THEIRS + "intermediate.dense.*",),
    _OURS + "sublayers.1.out.*": (_THEIRS + "output.dense.*",),
    _OURS + "residuals.1.norm.*": (_THEIRS + "output.LayerNorm.*",),
}

ROWS: dict[str, Rows] = {
    "t5": dict(_t5(gated=False)),
    "t5 v1.1": dict(_t5(gated=True)),  # with gated nets
    "albert": _ALBERT,
    "electra": _ELECTRA,
}
HEADS: dict[str, dict[str, Rows]] = {
    "albert": {
        "predictions.bias": {
            "map.*": ("predictions.dense.*",),
            "norm.*": ("predictions.LayerNorm.*",),
            "bias": ("predictions.bias",),
        },
        "sop_classifier.classifier.weight": {"pooler.*": ("pooler.*",), "map.*": ("sop_classifier.classifier.*",)},
    },
    "electra": {
        "discriminator_predictions.dense_prediction.weight": {
            "map.*": ("discriminator_predictions.dense.*",),
            "out.*": ("discriminator_predictions.dense_prediction.*",),
        },
        "generator_lm_head.bias": {
            "map.*": ("generator_predictions.dense.*",),
            "norm.*": ("generator_predictions.LayerNorm.*",),
            "bias": ("generator_lm_head.bias",),
        },
    },
}
