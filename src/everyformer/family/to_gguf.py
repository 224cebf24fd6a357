"""Our language models as llama.cpp stores them in a GGUF file: the metadata of its architectures, and tensors under its names.

    name, header, tensors = to_gguf(*to_transformers(network))    # "llama", {"llama.block_count": 2, ...}, {"blk.0.attn_q.weight": ...}

It starts from the config and the weights of transformers, as llama.cpp's own converter does. What an architecture computes by
itself, such as its activation, is refused where a model has another one. Two things are stored in another form: where the dimensions
that rotary turns together are neighbours (llama), the rows of queries and keys are reordered; where a norm multiplies by 1 + w (gemma),
the 1 is added to its weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import log
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.rotary import Llama3Scaling, plain_frequencies
from everyformer.family.activations import ACTIVATIONS
from everyformer.family.names import Config
from everyformer.family.names_rotary import ROPE, SCALINGS

Header = dict[str, Any]
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}  # what it computes with in these architectures
LARGEST = {"gemma2": 46, "gemma3_text": 62}  # layers of the 27B models, whose scores have another scale in llama.cpp


class NoArchitecture(ValueError):
    """llama.cpp has no architecture for a model."""


@dataclass(frozen=True)
class Architecture:
    """A model of llama.cpp: its name there, its activation, and the form of its weights."""

    name: str
    activation: str  # the field of the config
    computed: str  # the one activation that it has
    neighbours: bool = False  # rotary turns neighbouring dimensions
    offset: bool = False  # the weights of norms include the 1


SILU = ("hidden_act", "silu")
TANH = ("hidden_activation", "gelu_tanh")
ARCHITECTURES: Mapping[str, Architecture] = {  # by model_type
    "gpt2": Architecture("gpt2", "activation_function", "gelu_tanh"),
    "llama": Architecture("llama", *SILU, neighbours=True),
    "mistral": Architecture("llama", *SILU, neighbours=True),
    "qwen2": Architecture("qwen2", *SILU),
    "qwen3": Architecture("qwen3", *SILU),
    "gemma2": Architecture("gemma2", *TANH, offset=True),
    "gemma3_text": Architecture("gemma3", *TANH, offset=True),
}


def to_gguf(config: Config, weights: Mapping[str, Tensor]) -> tuple[str, Header, dict[str, Tensor]]:
    """Returns the name of the architecture, its metadata, and the tensors. Raises NoArchitecture if llama.cpp has none."""
    import gguf

    found = architecture(config)
    fields = _gpt2(config) if found.name == "gpt2" else _rotary(config)
    header = {f"{found.name}.{key}": value for key, value in fields}
    layers = header[f"{found.name}.block_count"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[found.name.upper()], layers)
    return found.name, header, {_their_name(names, name): x for name, x in _stored(found, config, weights)}


def architecture(config: Config) -> Architecture:
    """Returns the architecture of a config. Raises NoArchitecture with the reason if there is none."""
    kind = config["model_type"]
    language = config["architectures"][0].endswith(("ForCausalLM", "LMHeadModel"))
    if kind not in ARCHITECTURES or not language:
        raise NoArchitecture(
            f"gguf is written for language models of the types {', '.join(ARCHITECTURES)}, not for a {config['architectures'][0]}"
        )
    found = ARCHITECTURES[kind]
    activation = ACTIVATIONS[config[found.activation]]
    if activation != found.computed:
        raise NoArchitecture(
            f"the activation is {activation}, but llama.cpp computes {found.computed} in a {found.name}"
        )
    for field in ("attn_logit_softcapping", "final_logit_softcapping"):
        if kind == "gemma2" and config[field] is None:
            raise NoArchitecture(f"{field} is none, but llama.cpp bounds the values of a gemma2")
    rope = _rope(config)
    for field, only in YARN.items() if rope.get("rope_type") == "yarn" else ():
        if rope[field] != only:
            raise NoArchitecture(f"the scaling has {field} = {rope[field]}, but llama.cpp computes with {only}")
    return found


def _rope(config: Config) -> Config:
    """The rotary positions of layers that attend to all positions; empty if there are none."""
    rope: Config = config.get(ROPE, {})
    return rope.get("full_attention", rope)


def _gpt2(config: Config) -> Iterator[tuple[str, Any]]:
    yield "context_length", config["n_positions"]
    yield "embedding_length", config["n_embd"]
    yield "feed_forward_length", config["n_inner"]
    yield "block_count", config["n_layer"]
    yield "attention.head_count", config["n_head"]
    yield "attention.layer_norm_epsilon", float(config["layer_norm_epsilon"])
    yield "vocab_size", config["vocab_size"]


def _rotary(config: Config) -> Iterator[tuple[str, Any]]:
    context, window = config["max_position_embeddings"], config.get("sliding_window")
    if not isinstance(context, int) or context < 1:
        raise ValueError(
            f"max_position_embeddings is {context!r} in published.json; give a number of positions, such as 4096"
        )
    if config["model_type"] == "mistral" and window is not None:
        context = min(context, window)  # the architecture llama has no window
    elif window is not None:
        yield "attention.sliding_window", window
        layers = config.get("layer_types") or ["sliding_attention", "full_attention"]
        yield "attention.sliding_window_pattern", [*layers, "full_attention"].index("full_attention") + 1
    yield "context_length", context
    yield "embedding_length", config["hidden_size"]
    yield "feed_forward_length", config["intermediate_size"]
    yield "block_count", config["num_hidden_layers"]
    yield "attention.head_count", config["num_attention_heads"]
    yield "attention.head_count_kv", config["num_key_value_heads"]
    yield "attention.layer_norm_rms_epsilon", float(config["rms_norm_eps"])
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        yield key, config["head_dim"]
    for key, field in (("attn", "attn_logit_softcapping"), ("final", "final_logit_softcapping")):
        if config.get(field) is not None:
            yield f"{key}_logit_softcapping", float(config[field])
    yield "vocab_size", config["vocab_size"]
    yield from _rope_header(config)


def _rope_header(config: Config) -> Iterator[tuple[str, Any]]:
    rope, near = _rope(config), config[ROPE].get("sliding_attention")
    yield "rope.freq_base", float(rope["rope_theta"])
    if near is not None:
        yield "rope.freq_base_swa", float(near["rope_theta"])
    kind = rope.get("rope_type", "default")
    if kind not in ("linear", "yarn"):  # those of llama3 are a tensor
        yield "rope.scaling.type", "none"
        return
    yield "rope.scaling.type", kind
    yield "rope.scaling.factor", float(rope["factor"])
    if kind == "yarn":
        yield "rope.scaling.original_context_length", rope["original_max_position_embeddings"]
        if rope["attention_factor"] is not None:  # llama.cpp multiplies its own by this
            yield "rope.scaling.attn_factor", float(rope["attention_factor"]) / (1 + 0.1 * log(rope["factor"]))


def _stored(found: Architecture, config: Config, weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields the weights in the form of llama.cpp, under the names of transformers."""
    for name, x in weights.items():
        x = x.float()
        if found.name == "gpt2" and ".c_" in name and name.endswith(".weight"):
            x = x.T.contiguous()
        if found.offset and name.endswith("norm.weight"):
            x = x + 1
        scaled = "q_norm.weight" if found.name == "gemma3" else "q_proj.weight"
        if found.offset and name.endswith(scaled):
            x = x * _scale(config)
        for part, heads in (("q_proj.", "num_attention_heads"), ("k_proj.", "num_key_value_heads")):
            if found.neighbours and part in name:
                x = neighbours(x, config[heads])
        yield name, x
    if _rope(config).get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config)


def _scale(config: Config) -> float:
    """The scale of the scores over the one that llama.cpp computes."""
    largest = config["num_hidden_layers"] == LARGEST[config["model_type"]]
    theirs = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    return float((theirs / config["query_pre_attn_scalar"]) ** 0.5)


def neighbours(x: Tensor, heads: int) -> Tensor:
    """Returns the rows of each head with the first of its second half after the first of its first half, and so on."""
    return x.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(x.shape)


def _llama3_factors(config: Config) -> Tensor:
    """The wavelength of each rotary frequency, scaled over not scaled."""
    rope, width = _rope(config), config["head_dim"]
    given = {ours: rope[theirs] for ours, theirs in SCALINGS["llama3"].items()}
    args = (width, rope["rope_theta"], torch.device("cpu"))
    return (plain_frequencies(*args) / Llama3Scaling(**given).frequencies(*args)).float()


def _their_name(names: Any, name: str) -> str:
    theirs = names.get_name(name, (".weight", ".bias"))
    assert theirs is not None, name
    return str(theirs)
