"""The names of the weights in Hugging Face transformers as a table, so that published weights load into our members.

    state = safetensors.torch.load_file("gpt2/model.safetensors")
    network = everyformer.build("gpt2", "small")
    network.load_state_dict(from_transformers("gpt2", state))

`everyformer.from_pretrained` does this for a folder, with the model that its config.json describes. The names are those of the
published files, as `save_pretrained` writes them, or those of a state dict, with or without the prefix of the base model. A row is
`ours: theirs`; {n} is the number of the layer, * stands for weight and bias, and the tensors of several names are concatenated.
"""

from __future__ import annotations

import re
import warnings
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
    },
}

# The heads of a member, each with a name that only files with this head have, in the order of our outputs. A head that needs the
# pooler is one of the whole sequence.
HEADS: dict[str, dict[str, Rows]] = {
    "gpt2": {},
    "bert": {
        "cls.predictions.bias": {
            "map.*": ("cls.predictions.transform.dense.*",),
            "norm.*": ("cls.predictions.transform.LayerNorm.*",),
            "bias": ("cls.predictions.bias",),
        },
        "cls.seq_relationship.weight": {"pooler.*": ("pooler.dense.*",), "map.*": ("cls.seq_relationship.*",)},
        "classifier.weight": {"pooler.*": ("pooler.dense.*",), "map.*": ("classifier.*",)},
        "qa_outputs.weight": {"map.*": ("qa_outputs.*",)},
    },
    "vit": {"classifier.weight": {"map.*": ("classifier.*",)}},
}

# The names of transformers 5 in memory, as those of its files.
RENAMED = {
    r"^layers\.(\d+)\.attention\.q_proj\.": r"encoder.layer.\1.attention.attention.query.",
    r"^layers\.(\d+)\.attention\.k_proj\.": r"encoder.layer.\1.attention.attention.key.",
    r"^layers\.(\d+)\.attention\.v_proj\.": r"encoder.layer.\1.attention.attention.value.",
    r"^layers\.(\d+)\.attention\.o_proj\.": r"encoder.layer.\1.attention.output.dense.",
    r"^layers\.(\d+)\.mlp\.fc1\.": r"encoder.layer.\1.intermediate.dense.",
    r"^layers\.(\d+)\.mlp\.fc2\.": r"encoder.layer.\1.output.dense.",
    r"^layers\.(\d+)\.layernorm_": r"encoder.layer.\1.layernorm_",
    r"LayerNorm\.gamma$": "LayerNorm.weight",  # of old files
    r"LayerNorm\.beta$": "LayerNorm.bias",
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
    """Returns our state dict of a member ("gpt2", "bert" or "vit") with the heads that the state has.

    Raises ValueError if names are missing or left over. A pooler that no head uses is left out, with a warning.
    """
    if member not in ROWS:
        raise ValueError(f"no names of transformers are known for {member!r}; {nearest(member, ROWS)}")
    weights = plain_names(state)
    for copy, name in TIED.items():
        if copy in weights and name in weights and not torch.equal(weights.pop(copy), weights[name]):
            raise ValueError(f"{copy} differs from {name}, but {member} ties them; give a model with tied weights")
    table = ROWS[member] | {
        f"outputs.{number}.{ours}": theirs
        for number, rows in enumerate(heads(member, weights).values())
        for ours, theirs in rows.items()
    }
    rows = dict(_rows(table, _layers(weights)))
    wanted = {name for names in rows.values() for name in names}
    problems = [f"{name} is missing" for name in sorted(wanted - weights.keys())]
    unused = sorted(weights.keys() - wanted)
    problems += [f"{name} is left over" for name in unused if not name.startswith("pooler.dense.")]
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(
            f"these are not the weights of a {member}: {', '.join(problems[:5])}{more}; give the file of another model, or leave a "
            "head out that everyformer has not"
        )
    if unused:
        warnings.warn(f"{', '.join(unused)}: no head uses the pooler, so it is left out", stacklevel=2)
    return {ours: torch.cat([_changed(name, weights[name]) for name in names]) for ours, names in rows.items()}


def heads(member: str, weights: Mapping[str, Tensor]) -> dict[str, Rows]:
    """Returns the heads that the weights have, with their rows. Without a pooler a classifier is one of each token."""
    found = {name: rows for name, rows in HEADS[member].items() if name in weights}
    has_pooler = "pooler.dense.weight" in weights
    return {
        name: {ours: theirs for ours, theirs in rows.items() if has_pooler or not ours.startswith("pooler")}
        for name, rows in found.items()
    }


def plain_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights without the prefix of the base model, under the names of the published files."""
    weights = dict[str, Tensor]()
    for name, weight in state.items():
        name = re.sub(r"^(transformer|bert|vit)\.", "", name)
        for new, old in RENAMED.items():
            name = re.sub(new, old, name)
        if not NOT_WEIGHTS.search(name):
            weights[name] = weight
    return weights


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
