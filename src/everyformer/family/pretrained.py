"""Networks from folders of Hugging Face transformers: config.json decides the model, model.safetensors has the weights.

    network = everyformer.from_pretrained("gpt2")           # a folder that save_pretrained wrote, or a copy of a published one

What the config asks for and a member has not is refused. The names of the weights are in `names.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from everyformer.family.names import ROWS, from_transformers, heads, plain_names
from everyformer.family.table import member
from everyformer.network.model import Model
from everyformer.network.network import Network
from everyformer.network.output_head import Classify, Masked, OutputHead, PerToken
from everyformer.network.store import model_from_json, read_tensors
from everyformer.value import decode_json, nearest

BERT = {"width": "hidden_size", "heads": "num_attention_heads", "layers": "num_hidden_layers"}
SETTINGS: dict[str, dict[str, str]] = {  # of our members, by the names of a config
    "gpt2": {
        "width": "n_embd",
        "heads": "n_head",
        "layers": "n_layer",
        "context": "n_positions",
        "vocabulary": "vocab_size",
    },
    "bert": BERT | {"context": "max_position_embeddings", "vocabulary": "vocab_size"},
    "vit": BERT | {"image": "image_size", "patch": "patch_size", "channels": "num_channels"},
}
HIDDEN = {"gpt2": "n_inner", "bert": "intermediate_size", "vit": "intermediate_size"}
ACTIVATION = {"gpt2": "activation_function", "bert": "hidden_act", "vit": "hidden_act"}
EPS = {"gpt2": "layer_norm_epsilon", "bert": "layer_norm_eps", "vit": "layer_norm_eps"}
DROPOUTS = {  # of the embedding, of each branch, of the attention weights
    "gpt2": ("embd_pdrop", "resid_pdrop", "attn_pdrop"),
    "bert": ("hidden_dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"),
    "vit": ("hidden_dropout_prob", "hidden_dropout_prob", "attention_probs_dropout_prob"),
}
ACTIVATIONS = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu",
    "silu": "silu", "swish": "silu", "quick_gelu": "gelu_sigmoid",
}  # fmt: skip
FIXED: dict[str, dict[str, Any]] = {  # what our members are
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "bert": {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"},
    "vit": {"qkv_bias": True},
}


def from_pretrained(folder: str | Path) -> Network:
    """Returns the network of a folder that `save_pretrained` of transformers wrote, in evaluation mode and in its precision.

    GPT-2, BERT and ViT, with a head for language, masked tokens, the next sentence, classes of sequences, tokens or images, or
    questions, or without a head: `network = everyformer.from_pretrained("bert-base-uncased")`. Raises ValueError if the config
    asks for what the member has not, or if the weights do not fit it.
    """
    folder = Path(folder).expanduser()
    config, state = _read_config(folder), _read_weights(folder)
    model = model_of(config, state)
    weights = from_transformers(config["model_type"], state)
    dtypes = {weight.dtype for weight in weights.values()}
    network = model.build().to(dtypes.pop() if len(dtypes) == 1 else torch.float32)
    try:
        network.load_state_dict(weights)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the weights of {folder} do not fit its config.json: {reason}; restore both") from None
    return network.eval()


def model_of(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Model:
    """Returns the model that a config describes, with the heads that the weights have."""
    name = config.get("model_type")
    if name not in ROWS:
        raise ValueError(
            f"model_type is {name!r} in config.json, which everyformer cannot read; {nearest(str(name), ROWS)}"
        )
    for field, ours in FIXED[name].items():
        if config.get(field, ours) != ours:
            raise ValueError(
                f"{field} is {config[field]!r}, but everyformer's {name} has {ours!r}; give a model with {field}={ours!r}"
            )
    if missing := [field for field in SETTINGS[name].values() if field not in config]:
        raise ValueError(f"config.json has no {missing[0]}; give the config.json that save_pretrained wrote")
    settings = {setting: config[field] for setting, field in SETTINGS[name].items()}
    value = member(name, **settings)
    assert isinstance(value, Model)
    activation = _activation(name, config)
    changes = {
        "feed_forward": {"hidden": config.get(HIDDEN[name]) or 4 * value.width, "activation": activation},
        "layer_norm": {"eps": config[EPS[name]]} if EPS[name] in config else {},
    }
    embedding, branch, attention = (config.get(field, value.dropout) for field in DROPOUTS[name])
    changes |= {"attention": {"dropout": attention}, "post_norm": {"dropout": branch}, "pre_norm": {"dropout": branch}}
    tree = _changed(msgspec.to_builtins(value), changes) | {"dropout": embedding}
    if "type_vocab_size" in config:
        tree["segments"] = config["type_vocab_size"]
    model = model_from_json(msgspec.json.encode(tree))
    assert isinstance(model, Model)
    if name == "gpt2":
        return model
    return msgspec.structs.replace(model, outputs=_outputs(name, config, state, activation))


def _activation(name: str, config: Mapping[str, Any]) -> str:
    field = ACTIVATION[name]
    given = config.get(field, "gelu_new" if name == "gpt2" else "gelu")
    if given not in ACTIVATIONS:
        raise ValueError(f"{field} is {given!r}, which everyformer has not; the names are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[given]


def _outputs(
    name: str, config: Mapping[str, Any], state: Mapping[str, Tensor], activation: str
) -> tuple[OutputHead, ...]:
    weights, outputs = plain_names(state), list[OutputHead]()
    for key, rows in heads(name, weights).items():
        if key == "cls.predictions.bias":
            if activation != "gelu":
                raise ValueError(
                    f"hidden_act is {config['hidden_act']!r}, but the masked head has GELU; give a model without that head"
                )
            outputs.append(Masked(config.get(EPS[name], 1e-12)))
        elif name == "vit" or "pooler.*" in rows:
            outputs.append(Classify(len(weights[key]), "first", pooler="pooler.*" in rows))
        else:
            outputs.append(PerToken(len(weights[key])))
    return tuple(outputs)


def _changed(tree: Any, changes: Mapping[str, Mapping[str, Any]]) -> Any:
    """Returns the plain data of a value with other fields, by the tags of its parts."""
    if isinstance(tree, list | tuple):
        return [_changed(part, changes) for part in tree]
    if not isinstance(tree, dict):
        return tree
    return {name: _changed(part, changes) for name, part in tree.items()} | dict(changes.get(tree.get("type", ""), {}))


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json; give a folder that save_pretrained wrote")
    try:
        config = decode_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore it") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not the config of a model; restore it")
    return config


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Returns the weights of model.safetensors, or of the files that its index names."""
    names, index = ["model.safetensors"], folder / "model.safetensors.index.json"
    if not (folder / names[0]).is_file():
        if not index.is_file():
            raise ValueError(
                f"{folder} has no model.safetensors; if it has pytorch_model.bin, load it with transformers and save it with "
                "save_pretrained"
            )
        names = sorted(set(decode_json(index.read_bytes())["weight_map"].values()))
    return {name: x for file in names for name, x in read_tensors(folder / Path(file).name).items()}
