"""The names of the weights of Llama, Mistral, Qwen 2, Qwen 3, Gemma 2 and Gemma 3 in Hugging Face transformers, as data.

A row is `ours: theirs`, as in names.py: {n} is the number of the layer, * stands for weight and bias, and the tensors of several
names are concatenated. Theirs are the names of the published files, without the prefix of the base model (`model.`). The keys are
the `model_type` of config.json; `MEMBERS` has our member of each. No tensor is stored in another form than ours: rotary is in the layout
of halves on both sides, and a norm with a unit offset keeps the offset in the code.
"""

from __future__ import annotations

from everyformer.family.names import Head
from everyformer.family.names_bert import QUESTIONS

Rows = dict[str, tuple[str, ...]]

_LAYER, _THEIRS = "body.layers.{n}.", "layers.{n}."


def _rows(*, qkv: str = "weight", head_norms: bool = False, sandwich: bool = False) -> Rows:
    """`qkv` is * if queries, keys and values have biases. In a sandwich their second norm stands after the attention, in the others
    before the net."""
    attention, net = _THEIRS + "self_attn.", _THEIRS + "mlp."
    before_net = "pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"
    rows: Rows = {
        "embed.table.weight": ("embed_tokens.weight",),
        _LAYER + "residuals.0.norm.weight": (_THEIRS + "input_layernorm.weight",),
        _LAYER + f"sublayers.0.heads.qkv.{qkv}": tuple(f"{attention}{one}_proj.{qkv}" for one in "qkv"),
        _LAYER + "sublayers.0.heads.out.weight": (attention + "o_proj.weight",),
        _LAYER + "residuals.1.norm.weight": (f"{_THEIRS}{before_net}.weight",),
        _LAYER + "sublayers.1.hidden.0.weight": tuple(f"{net}{one}_proj.weight" for one in ("gate", "up")),
        _LAYER + "sublayers.1.out.weight": (net + "down_proj.weight",),
        "body.stream.norm.weight": ("norm.weight",),
    }
    if head_norms:
        rows |= {_LAYER + f"sublayers.0.heads.{one}_norm.weight": (f"{attention}{one}_norm.weight",) for one in "qk"}
    if sandwich:
        rows[_LAYER + "residuals.0.after.weight"] = (_THEIRS + "post_attention_layernorm.weight",)
        rows[_LAYER + "residuals.1.after.weight"] = (_THEIRS + "post_feedforward_layernorm.weight",)
    return rows


ROWS: dict[str, Rows] = {
    "llama": _rows(),
    "mistral": _rows(),
    "qwen2": _rows(qkv="*"),
    "qwen3": _rows(head_norms=True),
    "gemma2": _rows(sandwich=True),
    "gemma3_text": _rows(head_norms=True, sandwich=True),
}
MEMBERS = {name: {"qwen2": "llama", "gemma3_text": "gemma"}.get(name, name) for name in ROWS}
PREFIX = "model."


def decoder_heads(table: str) -> dict[str, Head]:
    """The heads of a causal model, whose embedding table has this name. A class is read from the last token, without a bias."""
    last = {"type": "classify", "reading": "last", "bias": False}
    return {
        "language": Head(table, {"type": "language"}, {"map.weight": ("lm_head.weight",)}, default=True),
        "tokens": Head("score.weight", {"type": "per_token"}, {"map.*": ("score.*",)}, "outputs", ("score.bias",)),
        "classify": Head("score.weight", last, {"map.weight": ("score.weight",)}, "classes"),
        "questions": QUESTIONS,
    }
