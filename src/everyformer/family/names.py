"""The names of the weights in Hugging Face transformers as a table, so that published weights load into our members.

    state = safetensors.torch.load_file("gpt2/model.safetensors")
    network = everyformer.build("gpt2", "small")
    network.load_state_dict(from_transformers("gpt2", state))

The names are those of the published files (GPT2LMHeadModel, BertForPreTraining, ViTForImageClassification as
`save_pretrained` writes them), with or without the prefix of the base model. A row is `ours: theirs`; {n} is the number of the
layer, * stands for weight and bias, and the tensors of several names are concatenated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from everyformer.value import nearest

Rows = dict[str, tuple[str, ...]]

_LAYER = "body.layers.{n}."
_BERT = "encoder.layer.{n}."

ROWS: dict[str, Rows] = {
    "gpt2": {
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
    "bert": {
        "embed.table.weight": ("embeddings.word_embeddings.weight",),
        "segments.weight": ("embeddings.token_type_embeddings.weight",),
        "position.table.weight": ("embeddings.position_embeddings.weight",),
        "norm.*": ("embeddings.LayerNorm.*",),
        _LAYER + "sublayers.0.heads.qkv.*": tuple(f"{_BERT}attention.self.{x}.*" for x in ("query", "key", "value")),
        _LAYER + "sublayers.0.heads.out.*": (_BERT + "attention.output.dense.*",),
        _LAYER + "residuals.0.norm.*": (_BERT + "attention.output.LayerNorm.*",),
        _LAYER + "sublayers.1.hidden.0.*": (_BERT + "intermediate.dense.*",),
        _LAYER + "sublayers.1.out.*": (_BERT + "output.dense.*",),
        _LAYER + "residuals.1.norm.*": (_BERT + "output.LayerNorm.*",),
        "outputs.0.map.*": ("cls.predictions.transform.dense.*",),
        "outputs.0.norm.*": ("cls.predictions.transform.LayerNorm.*",),
        "outputs.0.bias": ("cls.predictions.bias",),
        "outputs.1.pooler.*": ("pooler.dense.*",),
        "outputs.1.map.*": ("cls.seq_relationship.*",),
    },
    "vit": {
        "class_token": ("embeddings.cls_token",),
        "embed.map.*": ("embeddings.patch_embeddings.projection.*",),
        "position.table.weight": ("embeddings.position_embeddings",),
        _LAYER + "residuals.0.norm.*": (_BERT + "layernorm_before.*",),
        _LAYER + "sublayers.0.heads.qkv.*": tuple(
            f"{_BERT}attention.attention.{x}.*" for x in ("query", "key", "value")
        ),
        _LAYER + "sublayers.0.heads.out.*": (_BERT + "attention.output.dense.*",),
        _LAYER + "residuals.1.norm.*": (_BERT + "layernorm_after.*",),
        _LAYER + "sublayers.1.hidden.0.*": (_BERT + "intermediate.dense.*",),
        _LAYER + "sublayers.1.out.*": (_BERT + "output.dense.*",),
        "body.stream.norm.*": ("layernorm.*",),
        "outputs.0.map.*": ("classifier.*",),
    },
}

# Tensors that are stored in another form than ours: GPT-2's maps are transposed, a patch map is a convolution.
CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    r"\.c_(attn|proj|fc)\.weight$": lambda x: x.T,
    r"\.projection\.weight$": lambda x: x.flatten(1),
    r"\.position_embeddings$": lambda x: x[0],
}

# Second names of tied weights in a state dict.
TIED = {
    "lm_head.weight": "wte.weight",
    "cls.predictions.decoder.weight": "embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

# Causal masks and position indices, which old files store among the weights.
NOT_WEIGHTS = re.compile(r"^h\.\d+\.attn\.(masked_)?bias$|^embeddings\.position_ids$")


def from_transformers(member: str, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns our state dict of a member ("gpt2", "bert" or "vit"). Raises ValueError if names are missing or left over."""
    if member not in ROWS:
        raise ValueError(f"no names of transformers are known for {member!r}; {nearest(member, ROWS)}")
    named = ((_without_prefix(name), weight) for name, weight in state.items())
    weights = {name: weight for name, weight in named if not NOT_WEIGHTS.search(name)}
    for copy, name in TIED.items():
        if copy in weights and name in weights and not torch.equal(weights.pop(copy), weights[name]):
            raise ValueError(f"{copy} differs from {name}, but {member} ties them; give a model with tied weights")
    rows = dict(_rows(ROWS[member], _layers(weights)))
    wanted = {name for names in rows.values() for name in names}
    problems = [f"{name} is missing" for name in sorted(wanted - weights.keys())]
    problems += [f"{name} is left over" for name in sorted(weights.keys() - wanted)]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"these are not the weights of a {member}: {', '.join(problems[:5])}{more}")
    return {ours: torch.cat([_changed(name, weights[name]) for name in names]) for ours, names in rows.items()}


def _without_prefix(name: str) -> str:
    """The name without the prefix of the base model. Old files call the weight and bias of a norm gamma and beta."""
    name = re.sub(r"^(transformer|bert|vit)\.", "", name)
    return re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name))


def _layers(names: Iterable[str]) -> int:
    matches = (re.match(r"(?:h|encoder\.layer)\.(\d+)\.", name) for name in names)
    return max((int(match[1]) + 1 for match in matches if match), default=1)


def _rows(table: Rows, layers: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    for ours, theirs in table.items():
        for n in range(layers) if "{n}" in ours else (0,):
            for kind in ("weight", "bias") if "*" in ours else ("",):
                ours_n, *theirs_n = (x.replace("{n}", str(n)).replace("*", kind) for x in (ours, *theirs))
                yield ours_n, tuple(theirs_n)


def _changed(name: str, weight: Tensor) -> Tensor:
    for pattern, change in CHANGES.items():
        if re.search(pattern, name):
            return change(weight)
    return weight
