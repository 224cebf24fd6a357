"""The names of the weights of T5, ALBERT and ELECTRA in Hugging Face transformers, as data.

A row is `ours: theirs`, as in names.py: {n} is the number of the layer, * stands for weight and bias, and the tensors of several
names are concatenated. Theirs are the names of the published files, without the prefix of the base model (`albert.`, `electra.`).
`HEADS` has the output heads of a member, each under a name that only files with this head have; their rows begin with the name of
the head in our model: `outputs.0.`.
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


ROWS: dict[str, Rows] = {
    "t5": dict(_t5(gated=False)),
    "t5 v1.1": dict(_t5(gated=True)),  # feed_forward_proj is gated-gelu
}
HEADS: dict[str, dict[str, Rows]] = {
    "t5": {},  # the shared table
    "t5 v1.1": {"lm_head.weight": {"decoder.outputs.0.map.weight": ("lm_head.weight",)}},
}
