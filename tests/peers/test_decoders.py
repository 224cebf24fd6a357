"""Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 equal Hugging Face transformers: parameters of every released size, and logits, gradients
and cached text on the same random weights."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from msgspec.structs import replace
from torch import Tensor
from torch.nn import functional as F

import everyformer
from everyformer.family.names_decoder import MEMBERS, PREFIX, ROWS
from everyformer.family.table import MEMBERS as FAMILY
from everyformer.family.table import parameters

KINDS = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2", "gemma3_text": "Gemma3",
}  # fmt: skip
TINY: dict[str, Any] = {
    "width": 32, "heads": 4, "key_heads": 2, "head_width": 16, "layers": 2, "hidden": 48, "vocabulary": 97,
}  # fmt: skip
LLAMA3 = {"type": "llama3_scaling", "factor": 8.0, "context": 8}
YARN = {"type": "yarn_scaling", "factor": 4.0, "context": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"eps": 1e-3}),
    "llama, plain heads": ("llama", {"key_heads": None, "head_width": None}),
    "llama 3.2": ("llama", {"tied": True, "base": 500.0, "scaling": LLAMA3}),
    "mistral": ("mistral", {"window": 5, "base": 300.0, "eps": 1e-3}),
    "mistral without a window": ("mistral", {"window": None}),
    "qwen2": ("qwen2", {"bias": True, "key_heads": 1, "head_width": 8}),
    "qwen3": ("qwen3", {"tied": False, "base": 700.0, "eps": 1e-3}),
    "qwen3 tied, yarn": ("qwen3", {"tied": True, "scaling": YARN}),
    "gemma2": (
        "gemma2",
        {"window": 5, "base": 300.0, "eps": 1e-3, "soft_cap": 0.5, "final_soft_cap": 2.0, "scale": 0.2},
    ),
    "gemma": (
        "gemma3_text",
        {"window": 5, "eps": 1e-3, "sliding": 2, "layers": 4, "scale": 0.2, "base": 900.0, "near_base": 30.0},
    ),
    "gemma scaled": ("gemma3_text", {"window": 5, "sliding": 1, "scaling": {"type": "linear_scaling", "factor": 8.0}}),
}
SIZES = [
    (name, size)
    for name in dict.fromkeys(MEMBERS.values())
    for size in FAMILY[name].sizes
    if size not in ("tiny", "small")
]


def rope(settings: dict[str, Any], base: float) -> dict[str, Any]:
    scaling = settings.get("scaling") or {"type": "default"}
    found: dict[str, Any] = {"rope_theta": base, "rope_type": scaling["type"].removesuffix("_scaling")}
    if "factor" in scaling:
        found["factor"] = scaling["factor"]
    if found["rope_type"] == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if found["rope_type"] in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = scaling.get("context", 8192)
    return found


def config_of(kind: str, value: Any, settings: dict[str, Any], **more: Any) -> Any:
    """Their config of our model: its sizes as our value has them, its numbers as `settings` has them."""
    attention, net = value.body.layers[0].sublayers
    heads, base = attention.heads, settings.get("base", 1e6 if kind in ("qwen3", "gemma3_text") else 1e4)
    eps = settings.get("eps", 1e-5 if MEMBERS[kind] in ("llama", "mistral") else 1e-6)
    given: dict[str, Any] = {
        "hidden_size": value.width, "num_attention_heads": heads.heads, "num_key_value_heads": heads.key_heads or heads.heads,
        "head_dim": heads.key_width or value.width // heads.heads, "num_hidden_layers": value.body.num_layers,
        "intermediate_size": net.hidden, "vocab_size": value.embed.vocabulary, "max_position_embeddings": 64,
        "rms_norm_eps": eps, "tie_word_embeddings": value.outputs[0].tied,
        "rope_parameters": rope(settings, base), "bos_token_id": 0, "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    if kind in ("mistral", "gemma2", "gemma3_text"):
        given["sliding_window"] = settings.get("window")
    if kind.startswith("gemma"):
        given["query_pre_attn_scalar"] = round(settings["scale"] ** -2) if settings.get("scale") else given["head_dim"]
        period = len(value.body.layers)
        every = [
            "full_attention" if i % period == period - 1 else "sliding_attention" for i in range(value.body.num_layers)
        ]
        given["layer_types"] = every
    if kind == "gemma2":
        given |= {
            "attn_logit_softcapping": settings.get("soft_cap"),
            "final_logit_softcapping": settings.get("final_soft_cap"),
        }
    if kind == "gemma3_text":
        near = {"rope_theta": settings.get("near_base", 1e4), "rope_type": "default"}
        given["rope_parameters"] = {"full_attention": given["rope_parameters"], "sliding_attention": near}
    name = KINDS[kind] + ("TextConfig" if kind == "gemma3_text" else "Config")
    return getattr(transformers, name)(**given | more)


def their_class(kind: str) -> Any:
    return getattr(transformers, f"{KINDS[kind]}ForCausalLM")


def renamed(kind: str, state: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Our state dict, by the rows."""
    plain, table = {name.removeprefix(PREFIX): x for name, x in state.items()}, dict(ROWS[kind])
    if "lm_head.weight" in plain:
        table["outputs.0.map.weight"] = ("lm_head.weight",)
    found = {}
    for ours, theirs in table.items():
        for n in range(layers) if "{n}" in ours else (0,):
            for suffix in ("weight", "bias") if "*" in ours else ("",):
                names = [re.sub(r"\*", suffix, one.replace("{n}", str(n))) for one in theirs]
                found[re.sub(r"\*", suffix, ours.replace("{n}", str(n)))] = torch.cat(
                    [plain.pop(name) for name in names]
                )
    assert not plain, f"no row has {sorted(plain)}"
    return found


def state_of(theirs: Any) -> dict[str, Tensor]:
    state = theirs.state_dict()
    if theirs.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


@cache
def pair(name: str) -> tuple[Any, Any]:
    """Their model and ours with the same random weights, in float64."""
    kind, changes = CASES[name]
    settings = TINY | changes
    value = everyformer.member(MEMBERS[kind], "tiny", **settings)
    torch.manual_seed(0)
    theirs = their_class(kind)(config_of(kind, value, settings)).double().eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    ours = value.build().double().eval()
    ours.load_state_dict(renamed(kind, state_of(theirs), settings["layers"]))
    return theirs, ours


def tokens(batch: int = 3, length: int = 11) -> Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(1))


# Their norms, rotary tables and eager softmax compute in float32 whatever the weights are: so near can the logits be.
LIMIT = 5e-6


@pytest.mark.parametrize("kernel", ["reference", "auto"])
@pytest.mark.parametrize("name", CASES)
def test_logits_are_equal(name, kernel):
    theirs, ours = pair(name)
    with torch.no_grad():
        expected, found = theirs(tokens()).logits, ours(tokens(), kernel=kernel).logits
    assert expected.std() > 0.1
    assert (found - expected).abs().max() < LIMIT


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_equal(name):
    theirs, ours = pair(name)
    for network in (theirs, ours):
        network.zero_grad()
        logits = network(tokens()).logits
        F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten()).backward()
    gradients = {key: weight.grad for key, weight in theirs.named_parameters()}
    expected = renamed(CASES[name][0], gradients, len(ours.body.layers))
    for key, weight in ours.named_parameters():
        assert (weight.grad - expected[key]).abs().max() < LIMIT, key


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_greedy_generation_is_equal(name, cached):
    """From prompts of different lengths, past the window and, with the cache, past the keys that it drops."""
    theirs, ours = pair(name)
    lengths = (9, 9) if name == "gemma2" else (9, 4)  # their eager attention in float64 is NaN where a query is padding
    prompts = [row[:length].tolist() for row, length in zip(tokens(2), lengths, strict=True)]
    token_BT = torch.tensor([[0] * (9 - len(row)) + row for row in prompts])
    mask_BT = torch.tensor([[0] * (9 - len(row)) + [1] * len(row) for row in prompts])
    expected_BT = theirs.generate(token_BT, attention_mask=mask_BT, max_new_tokens=15, do_sample=False, pad_token_id=0)
    generated = everyformer.generate(ours, prompts, 15, temperature=0, cached=cached)
    for row, prompt, expected_T in zip(generated, prompts, expected_BT, strict=True):
        assert row == prompt + expected_T[9:].tolist()
    assert len(set(expected_BT[:, 9:].flatten().tolist())) > 1  # the text is not a single repeated token


@pytest.mark.parametrize("name, size", SIZES)
def test_parameters_of_every_released_size_are_theirs(name, size):
    """Their layers have equal numbers of parameters, so two short models tell those of a long one."""
    kind = {"gemma": "gemma3_text"}.get(name, name)
    value: Any = everyformer.member(name, size)
    counts = []
    for layers in (1, 2):
        short = replace(value, body=replace(value.body, num_layers=layers))
        with torch.device("meta"):
            theirs = their_class(kind)(config_of(kind, short, dict(FAMILY[name].sizes[size]), layer_types=None))
        counts.append(sum(x.numel() for x in theirs.parameters()))
    assert parameters(value) == counts[0] + (value.body.num_layers - 1) * (counts[1] - counts[0])


PUBLISHED = {  # of the files that their authors released
    ("llama", "2-7b"): 6_738_415_616,
    ("llama", "2-13b"): 13_015_864_320,
    ("llama", "2-70b"): 68_976_648_192,
    ("llama", "3-8b"): 8_030_261_248,
    ("llama", "3-70b"): 70_553_706_496,
    ("llama", "3.2-1b"): 1_235_814_400,
    ("llama", "3.2-3b"): 3_212_749_824,
    ("mistral", "7b"): 7_241_732_096,
    ("qwen3", "0.6b"): 596_049_920,
    ("qwen3", "8b"): 8_190_735_360,
    ("gemma", "1b"): 999_885_952,
    ("gemma2", "2b"): 2_614_341_888,
    ("gemma2", "9b"): 9_241_705_984,
    ("gemma2", "27b"): 27_227_128_320,
}


@pytest.mark.parametrize("name, size", PUBLISHED)
def test_parameters_are_those_of_the_released_files(name, size):
    assert parameters(everyformer.member(name, size)) == PUBLISHED[name, size]
