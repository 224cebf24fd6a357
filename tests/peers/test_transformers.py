"""GPT-2, BERT and ViT equal Hugging Face transformers, with random weights loaded from the format of its published files."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

import everyformer
from everyformer.attention.context import SideInputs
from everyformer.family.names import from_transformers

LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10}
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {"width": 32, "heads": 4, "layers": 2, "context": 48, "vocabulary": 97},
    "bert": {"width": 32, "heads": 4, "layers": 2, "context": 48, "vocabulary": 97},
    "vit": {"width": 32, "heads": 4, "layers": 2, "image": 12, "patch": 3, "channels": 2, "classes": 5},
}


class Pair(NamedTuple):
    theirs: Any
    ours: Any


def their_model(name: str, attention: str) -> Any:
    sizes = SIZES[name]
    common: dict[str, Any] = {
        "hidden_size": sizes["width"],
        "num_attention_heads": sizes["heads"],
        "num_hidden_layers": sizes["layers"],
        "attn_implementation": attention,
    }
    wide = {"intermediate_size": 4 * sizes["width"]}
    if name == "vit":
        image = {"image_size": sizes["image"], "patch_size": sizes["patch"], "num_channels": sizes["channels"]}
        return ViTForImageClassification(ViTConfig(**common, **wide, **image, num_labels=sizes["classes"]))
    text = {"vocab_size": sizes["vocabulary"], "max_position_embeddings": sizes["context"]}
    if name == "bert":
        return BertForPreTraining(BertConfig(**common, **wide, **text))
    return GPT2LMHeadModel(GPT2Config(**common, **text, bos_token_id=0, eos_token_id=0))


def published(theirs: Any, name: str, folder: Any) -> dict[str, Tensor]:
    """Saves their weights as a published file and returns them under our names."""
    theirs.save_pretrained(folder)
    return from_transformers(name, load_file(folder / "model.safetensors"))


def pair(name: str, folder: Any, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> Pair:
    """Returns two models with the same weights; noise is added so that no weight is 0 or 1."""
    torch.manual_seed(0)
    theirs = their_model(name, attention).to(dtype).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    ours = everyformer.build(name, "tiny", **SIZES[name]).to(dtype).eval()
    ours.load_state_dict(published(theirs, name, folder))
    return Pair(theirs, ours)


def tokens(batch: int = 3, length: int = 11) -> Tensor:
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(1))


def inputs(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    if name != "vit":
        return tokens()
    return torch.randn(3, 2, 12, 12, dtype=dtype, generator=torch.Generator().manual_seed(1))


def their_logits(output: Any, name: str) -> tuple[Tensor, ...]:
    return (output.prediction_logits, output.seq_relationship_logits) if name == "bert" else (output.logits,)


def our_logits(output: everyformer.Output) -> tuple[Tensor, ...]:
    return output.logits if isinstance(output.logits, tuple) else (output.logits,)


def error(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@pytest.mark.spec(6, 13, 20, 21, 52, 55, 63)
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("name", SIZES)
def test_logits_are_equal(name, dtype, kernel, tmp_path):
    theirs, ours = pair(name, tmp_path, dtype)
    x = inputs(name, dtype)
    with torch.no_grad():
        expected = their_logits(theirs(x), name)
        logits = our_logits(ours(x, kernel=kernel))
    assert len(logits) == len(expected)
    for a, b in zip(logits, expected, strict=True):
        assert error(a, b) < LIMITS[dtype]


@pytest.mark.spec(19)
@pytest.mark.parametrize("name", SIZES)
def test_a_probe_records_the_weights_that_their_eager_attention_returns(name, tmp_path):
    theirs, ours = pair(name, tmp_path, attention="eager")
    probe = everyformer.Probe()
    with torch.no_grad():
        expected = theirs(inputs(name), output_attentions=True).attentions
        ours(inputs(name), probe=probe)
    assert len(probe.weights) == len(expected) == SIZES[name]["layers"]
    limit = 1e-6 if name == "vit" else 1e-10  # their eager ViT computes the softmax in float32
    assert max(error(a, b) for a, b in zip(probe.weights, expected, strict=True)) < limit


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_padded_batches_are_equal_at_visible_tokens(name, side, tmp_path):
    """Our positions count visible tokens only; transformers gets the same positions as position_ids."""
    theirs, ours = pair(name, tmp_path)
    token_BT, length_B1 = tokens(), torch.tensor([[11], [4], [7]])
    visible_BT = torch.arange(11) < length_B1
    visible_BT = visible_BT.flip(1) if side == "left" else visible_BT
    position_BT = (visible_BT.long().cumsum(1) - 1).clamp(min=0)
    segment_BT = (position_BT > 2).long()
    side_inputs = SideInputs(segments=segment_BT) if name == "bert" else None
    types = {"token_type_ids": segment_BT} if name == "bert" else {}
    with torch.no_grad():
        output = theirs(token_BT, attention_mask=visible_BT.long(), position_ids=position_BT, **types)
        logits = our_logits(ours(token_BT, visible=visible_BT, side_inputs=side_inputs))
    assert error(logits[0][visible_BT], their_logits(output, name)[0][visible_BT]) < 1e-10
    if name == "bert" and side == "right":  # their pooler reads index 0, which is padding on the left
        assert error(logits[1], output.seq_relationship_logits) < 1e-10


def loss(logits: tuple[Tensor, ...], name: str) -> Tensor:
    """Returns the loss of the member's task, for both models: their own would be computed in float32."""
    if name == "gpt2":
        return F.cross_entropy(logits[0][:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    class_B = torch.tensor([0, 1, 1])
    if name == "vit":
        return F.cross_entropy(logits[0], class_B)
    target_BT = tokens().masked_fill(torch.arange(11) % 3 > 0, -100)  # only some tokens are predicted
    return F.cross_entropy(logits[0].flatten(0, 1), target_BT.flatten()) + F.cross_entropy(logits[1], class_B)


@pytest.mark.parametrize("name", SIZES)
def test_gradients_of_the_loss_are_equal(name, tmp_path):
    theirs, ours = pair(name, tmp_path)
    loss(their_logits(theirs(inputs(name)), name), name).backward()
    loss(our_logits(ours(inputs(name))), name).backward()
    for weight in theirs.parameters():
        weight.data = weight.grad  # so that gradients are saved and renamed as weights are
    expected = published(theirs, name, tmp_path / "gradients")
    gradients = {name: weight.grad for name, weight in ours.named_parameters()}
    assert gradients.keys() == expected.keys()
    for key, gradient in gradients.items():
        assert gradient.abs().max() > 0
        assert error(gradient, expected[key]) < 1e-10, key


@pytest.mark.spec(58, 60)
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("lengths", [(8, 8), (9, 3)])
def test_greedy_generation_is_equal(lengths, cached, tmp_path):
    """Generates 20 tokens from prompts of equal and of different lengths (padded on the left)."""
    theirs, ours = pair("gpt2", tmp_path)
    prompts = [row[:length].tolist() for row, length in zip(tokens(2), lengths, strict=True)]
    longest = max(lengths)
    token_BT = torch.tensor([[0] * (longest - len(row)) + row for row in prompts])
    mask_BT = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    theirs.generation_config.eos_token_id = None  # never stop early
    expected_BT = theirs.generate(token_BT, attention_mask=mask_BT, max_new_tokens=20, do_sample=False, pad_token_id=0)
    generated = everyformer.generate(ours, prompts, 20, temperature=0, cached=cached)
    for row, prompt, expected_T in zip(generated, prompts, expected_BT, strict=True):
        assert len(set(expected_T[longest:].tolist())) > 2  # the text is not a single repeated token
        assert row == prompt + expected_T[longest:].tolist()


def test_gpt2_small_is_equal_at_full_size():
    torch.manual_seed(0)
    with torch.device("meta"):
        theirs = GPT2LMHeadModel(GPT2Config()).eval()
        ours = everyformer.build("gpt2", "small").eval()
    theirs.to_empty(device="cpu").tie_weights()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.normal_(std=0.02) if weight.dim() > 1 else weight.uniform_(0.5, 1.5)
    ours.load_state_dict(from_transformers("gpt2", theirs.state_dict()), assign=True)
    token_BT = torch.randint(50257, (1, 16))
    with torch.no_grad():
        assert error(ours(token_BT).logits, theirs(token_BT).logits) < 1e-5


def old_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames weights as in the oldest published files: no prefix, no head, masks among the weights, gamma and beta."""
    plain = {name.removeprefix("transformer.").removeprefix("bert."): weight for name, weight in state.items()}
    plain = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): weight for name, weight in plain.items()}
    plain = {name.replace("LayerNorm.bias", "LayerNorm.beta"): weight for name, weight in plain.items()}
    extra = "h.0.attn.bias" if "wte.weight" in plain else "embeddings.position_ids"
    return {name: weight for name, weight in plain.items() if name != "lm_head.weight"} | {extra: torch.ones(1, 1)}


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_old_names_and_a_state_dict_give_the_same_weights(name, tmp_path):
    theirs = their_model(name, "sdpa")
    expected = published(theirs, name, tmp_path)
    for state in (theirs.state_dict(), old_names(theirs.state_dict())):
        converted = from_transformers(name, state)
        assert converted.keys() == expected.keys()
        assert all(torch.equal(converted[key], weight) for key, weight in expected.items())


def test_missing_unexpected_or_untied_weights_raise():
    state = their_model("gpt2", "sdpa").state_dict()
    missing = {name: weight for name, weight in state.items() if "h.1.ln_2.bias" not in name}
    with pytest.raises(ValueError, match=r"not the weights of a gpt2: h\.1\.ln_2\.bias is missing;"):
        from_transformers("gpt2", missing)
    with pytest.raises(ValueError, match=r"not the weights of a gpt2: summary\.weight is left over;"):
        from_transformers("gpt2", state | {"summary.weight": torch.ones(1)})
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from wte\.weight, but gpt2 ties them"):
        from_transformers("gpt2", state | {"lm_head.weight": state["lm_head.weight"] + 1})
    with pytest.raises(ValueError, match="no names of transformers are known for 'gpt'; did you mean gpt2"):
        from_transformers("gpt", state)


def test_every_weight_has_a_name_in_transformers(tmp_path):
    """The tables of names cover all weights, with equal shapes."""
    for name in SIZES:
        state = published(their_model(name, "sdpa"), name, tmp_path / name)
        expected: nn.Module = everyformer.build(name, "tiny", **SIZES[name])
        assert {key: x.shape for key, x in state.items()} == {key: x.shape for key, x in expected.state_dict().items()}
