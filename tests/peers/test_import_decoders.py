"""Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3: folders load with equal logits, and the same table gives their config back."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

import everyformer
from everyformer import from_pretrained
from everyformer.family.names_decoder import MEMBERS
from everyformer.family.to_transformers import as_model_type
from tests.peers.test_decoders import CASES, TINY, config_of, their_class


@pytest.mark.parametrize("name", CASES)
def test_a_folder_loads_with_equal_logits_and_comes_back(name, tmp_path):
    kind, changes = CASES[name]
    settings = TINY | changes
    value = everyformer.member(MEMBERS[kind], "tiny", **settings)
    torch.manual_seed(0)
    theirs = their_class(kind)(config_of(kind, value, settings)).double().eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    theirs.save_pretrained(tmp_path)
    ours = from_pretrained(tmp_path)
    token_BT = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert (ours(token_BT).logits - theirs(token_BT).logits).abs().max() < 1e-5  # their angles are in float32
    config, weights = as_model_type(kind, ours)
    given, state = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    for field in config.keys() - {"architectures", "max_position_embeddings", "rope_parameters", "hidden_activation"}:
        assert config[field] is None or given.get(field) in (None, config[field]), field  # null: it follows from others
    assert weights.keys() == state.keys() and all(torch.equal(x, state[one]) for one, x in weights.items())


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type is 'dynamic'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "xielu"}, "hidden_act is 'xielu'"),
        ({"rope_parameters": [1]}, "rope_parameters is [1]"),
        ({"num_key_value_heads": 3}, "3"),
    ],
)
def test_what_a_llama_asks_for_and_we_do_not_have_is_refused(changes, reason, tmp_path):
    value = everyformer.member("llama", "tiny", **TINY)
    their_class("llama")(config_of("llama", value, TINY)).save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(given | changes))
    with pytest.raises(ValueError) as caught:
        from_pretrained(tmp_path)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_an_old_config_with_rope_theta_and_rope_scaling_is_read(tmp_path):
    value = everyformer.member("llama", "tiny", **TINY)
    their_class("llama")(config_of("llama", value, TINY)).save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    del given["rope_parameters"]
    given |= {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    rotary = from_pretrained(tmp_path).value.body.layers[0].sublayers[0].score_mods[0]
    assert (rotary.base, rotary.scaling.factor, rotary.layout) == (500.0, 2.0, "halves")
