"""Folders of `save_pretrained` load as what they are: their config decides the model, and every common head is found."""

from __future__ import annotations

import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import everyformer
from everyformer import from_pretrained
from everyformer.family.names import from_transformers
from everyformer.family.to_transformers import as_model_type

SMALL = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40}
TEXT = {"vocab_size": 23, "max_position_embeddings": 12}
IMAGE = {"image_size": 8, "patch_size": 4, "num_channels": 2}
GPT2 = {
    "n_embd": 16,
    "n_head": 2,
    "n_layer": 2,
    "n_positions": 12,
    "vocab_size": 23,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
ROBERTA = {"vocab_size": 23, "max_position_embeddings": 14, "type_vocab_size": 1}  # two of the 14 rows are never used
DISTILBERT = {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 40} | TEXT
MODELS = {
    "BertModel": SMALL | TEXT,
    "BertForMaskedLM": SMALL | TEXT,
    "BertForPreTraining": SMALL | TEXT,
    "BertForSequenceClassification": SMALL | TEXT | {"num_labels": 3},
    "BertForTokenClassification": SMALL | TEXT | {"num_labels": 5},
    "BertForQuestionAnswering": SMALL | TEXT,
    "RobertaModel": SMALL | ROBERTA,
    "RobertaForMaskedLM": SMALL | ROBERTA,
    "RobertaForSequenceClassification": SMALL | ROBERTA | {"num_labels": 3},
    "RobertaForTokenClassification": SMALL | ROBERTA | {"num_labels": 5},
    "DistilBertModel": DISTILBERT,
    "DistilBertForMaskedLM": DISTILBERT,
    "DistilBertForSequenceClassification": DISTILBERT | {"num_labels": 3},
    "DistilBertForTokenClassification": DISTILBERT | {"num_labels": 5},
    "AlbertModel": SMALL | TEXT | {"embedding_size": 8},
    "AlbertForMaskedLM": SMALL | TEXT | {"embedding_size": 8},
    "AlbertForPreTraining": SMALL | TEXT | {"embedding_size": 8},
    "AlbertForSequenceClassification": SMALL | TEXT | {"embedding_size": 8, "num_labels": 3},
    "ElectraModel": SMALL | TEXT | {"embedding_size": 8},
    "ElectraForMaskedLM": SMALL | TEXT | {"embedding_size": 8},
    "ElectraForPreTraining": SMALL | TEXT | {"embedding_size": 16},
    "ElectraForSequenceClassification": SMALL | TEXT | {"embedding_size": 8, "num_labels": 3},
    "ViTModel": SMALL | IMAGE,
    "ViTForImageClassification": SMALL | IMAGE | {"num_labels": 4},
    "GPT2Model": GPT2,
    "GPT2LMHeadModel": GPT2 | {"n_inner": 24},
    "GPT2LMHeadModel untied": GPT2 | {"tie_word_embeddings": False},
}
POOLED = ("AlbertModel", "BertModel", "RobertaModel", "ViTModel")  # with a pooler that no head uses


def their_model(name, **changes):
    torch.manual_seed(0)
    kind = name.split("For")[0].partition(" ")[0].removesuffix("Model").removesuffix("LMHead")
    config = getattr(transformers, f"{kind}Config")(**(MODELS[name] | changes))
    model = getattr(transformers, name.partition(" ")[0])(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    return model


def inputs(name):
    generator = torch.Generator().manual_seed(1)
    if name.startswith("ViT"):
        return torch.randn(2, 2, 8, 8, dtype=torch.float64, generator=generator)
    return torch.randint(2, 23, (2, 9), generator=generator)  # 1 is the padding of RoBERTa


def logits(output):
    """Their logits, in the order of our heads; none of a model without a head."""
    if hasattr(output, "start_logits"):
        return [torch.stack((output.start_logits, output.end_logits), dim=-1)]
    names = ("prediction_logits", "seq_relationship_logits", "sop_logits", "logits")
    return [output[name] for name in names if name in output]


def assert_equal(name, theirs, folder):
    theirs.save_pretrained(folder)
    if name in POOLED:
        with pytest.warns(UserWarning, match=r"pooler\..*weight.* left out"):
            ours = from_pretrained(folder)
    else:
        ours = from_pretrained(folder)
    with torch.no_grad():
        expected, output = theirs(inputs(name), output_hidden_states=True), ours(inputs(name))
    last = expected["last_hidden_state"] if "last_hidden_state" in expected else expected.hidden_states[-1]
    if not name.startswith("ViTFor"):  # whose last hidden state has no norm yet
        assert (output.hidden - last).abs().max() < 1e-10
    mine = output.logits if isinstance(output.logits, tuple) else [output.logits] * (output.logits is not None)
    for a, b in zip(mine, logits(expected), strict=not name.startswith("GPT2Model")):
        assert (a.view(b.shape) - b).abs().max() < 1e-10
    if not name.endswith("QuestionAnswering"):  # whose head is that of two classes of each token
        assert_back(ours, folder)
    return ours


def assert_back(ours, folder):
    """The same table read backwards gives their config and their weights again."""
    given, state = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    config, weights = as_model_type(given["model_type"], ours)
    for field, value in config.items():
        assert given.get(field) in (None, value) or field == "architectures", field  # null: it follows from others
    unused = {one for one in state if one.endswith("position_ids") or "pooler." in one}
    if "GPT2Model" in given["architectures"]:  # which has no head: our language head is tied
        state = {f"transformer.{one}": x for one, x in state.items()}
    elif weights.keys() == state.keys() - unused:
        assert config["architectures"] == given["architectures"]
    assert weights.keys() == state.keys() - (unused - weights.keys())
    start = 2 * (given["model_type"] == "roberta")  # rows of its table that are never used
    for one, x in weights.items():
        start_of = start if "position_embeddings" in one else 0
        assert torch.equal(x[start_of:], state[one][start_of:]), one


@pytest.mark.parametrize("name", MODELS)
def test_every_common_model_loads_with_equal_outputs(name, tmp_path):
    ours = assert_equal(name, their_model(name), tmp_path)
    assert not ours.training and next(ours.parameters()).dtype == torch.float64


@pytest.mark.parametrize(
    "name, changes",
    [
        ("BertModel", {"hidden_act": "relu"}),
        ("BertForMaskedLM", {"hidden_act": "relu"}),
        ("BertModel", {"layer_norm_eps": 1e-2, "type_vocab_size": 3}),
        ("BertForSequenceClassification", {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
        ("ViTForImageClassification", {"hidden_act": "silu", "layer_norm_eps": 1e-2}),
        ("GPT2LMHeadModel", {"activation_function": "relu", "layer_norm_epsilon": 1e-2}),
    ],
)
def test_activations_and_eps_are_those_of_the_config(name, changes, tmp_path):
    assert_equal(name, their_model(name, **changes), tmp_path)


def test_dropouts_are_those_of_the_config(tmp_path):
    their_model("GPT2LMHeadModel", resid_pdrop=0.3, attn_pdrop=0.2, embd_pdrop=0.4).save_pretrained(tmp_path)
    value = from_pretrained(tmp_path).value
    (layer,) = value.body.layers
    assert (value.dropout, layer.sublayers[0].dropout, value.body.residual.dropout) == (0.4, 0.2, 0.3)


@pytest.mark.parametrize(
    "name, changes, reason",
    [
        ("BertModel", {"hidden_act": "mish"}, r"hidden_act is 'mish'.*the names are"),
        ("BertModel", {"is_decoder": True}, r"is_decoder is True, but everyformer's bert has False"),
        ("GPT2LMHeadModel", {"scale_attn_by_inverse_layer_idx": True}, r"scale_attn_by_inverse_layer_idx is True"),
        ("ViTForImageClassification", {"qkv_bias": False}, r"qkv_bias is False"),
        ("BertModel", {"model_type": "alberta"}, r"model_type is 'alberta'.*albert"),
        ("GPT2LMHeadModel", {"n_embd": 20}, r"do not fit its config\.json: .*is 23 x 16, not 23 x 20"),
    ],
)
def test_what_the_config_asks_for_and_we_do_not_have_is_refused(name, changes, reason, tmp_path):
    their_model(name).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=reason):
        from_pretrained(tmp_path)


def test_missing_files_are_named_with_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json; give a folder that save_pretrained wrote"):
        from_pretrained(tmp_path)
    their_model("GPT2LMHeadModel").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor pytorch_model\.bin; copy"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize("file, save", [("model.safetensors", save_file), ("pytorch_model.bin", torch.save)])
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_in_one_or_several_files_of_safetensors_or_torch_are_read(shards, file, save, tmp_path):
    their_model("GPT2LMHeadModel").save_pretrained(tmp_path)
    whole = from_pretrained(tmp_path).state_dict()
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = {name: file if shards == 1 else f"{number % 2}-{file}" for number, name in enumerate(weights)}
    for one in set(names.values()):
        save({name: x for name, x in weights.items() if names[name] == one}, tmp_path / one)
    if shards > 1:
        (tmp_path / f"{file}.index.json").write_text(json.dumps({"weight_map": names}))
    assert all(torch.equal(x, whole[name]) for name, x in from_pretrained(tmp_path).state_dict().items())


class Code:
    """A pickle of this runs code when it is read."""

    def __reduce__(self):
        return (print, ("run",))


def refused(folder, weights=None, **config):
    """The message with which a folder is refused after its weights or its config were changed."""
    if weights is not None:
        (folder / "model.safetensors").unlink(missing_ok=True)
        (folder / "pytorch_model.bin").write_bytes(weights)
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | config))
    with pytest.raises(ValueError) as caught:
        from_pretrained(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path, capsys):
    their_model("GPT2LMHeadModel").save_pretrained(tmp_path)
    torch.save({"wte.weight": Code()}, tmp_path / "code")
    assert "is a pickle that holds code" in refused(tmp_path, (tmp_path / "code").read_bytes())
    assert "is a pickle that holds code" in refused(tmp_path, pickle.dumps({"wte.weight": Code()}))
    assert "cannot be read" in refused(tmp_path, (tmp_path / "code").read_bytes()[:100])
    torch.save({"epoch": 3, "model": {}}, tmp_path / "nested")
    assert "something else than tensors" in refused(tmp_path, (tmp_path / "nested").read_bytes())
    assert "run" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"n_embd": 10**12}, "n_embd is 1000000000000"),
        ({"n_embd": "16"}, "n_embd is '16'"),
        ({"n_embd": [16]}, r"n_embd is [16]"),
        ({"n_layer": 60000}, "they have 2 layers, but n_layer is 60000"),
        ({"n_layer": 1}, "they have 2 layers, but n_layer is 1"),
        ({"n_layer": None}, "n_layer is None"),
        ({"vocab_size": 10**9}, "transformer.wte.weight"),
        ({"n_inner": {"a": 1}}, "n_inner is {'a': 1}"),
        ({"n_inner": 10**9}, "c_fc.weight is 24 x 16, not 1000000000 x 16"),
        ({"n_head": 3}, "does not divide into 3 heads"),
        ({"activation_function": ["gelu"]}, "activation_function is ['gelu']"),
        ({"resid_pdrop": 2.0}, "resid_pdrop is 2.0: expected float < 1.0"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon is 'small'"),
        ({"model_type": ["gpt2"]}, "model_type is ['gpt2']"),
    ],
)
def test_a_hostile_config_is_refused_in_one_line(config, reason, tmp_path):
    their_model("GPT2LMHeadModel", n_inner=24).save_pretrained(tmp_path)
    assert reason.replace("transformer.", "") in refused(tmp_path, **config)


def test_a_cut_off_file_and_weights_of_another_model_are_refused_in_one_line(tmp_path):
    theirs = their_model("GPT2LMHeadModel")
    theirs.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refused(tmp_path)
    their_model("BertForMaskedLM").save_pretrained(tmp_path / "bert")
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "bert" / "model.safetensors").read_bytes())
    assert "they have 0 layers, but n_layer is 2" in refused(tmp_path)


def test_the_new_names_of_a_vision_transformer_give_the_same_weights(tmp_path):
    """transformers 5 writes the old names to files, and has new ones in memory."""
    theirs = their_model("ViTForImageClassification")
    theirs.save_pretrained(tmp_path)
    assert any("q_proj" in name for name in theirs.state_dict())
    old, new = (
        from_transformers("vit", state) for state in (load_file(tmp_path / "model.safetensors"), theirs.state_dict())
    )
    assert old.keys() == new.keys() and all(torch.equal(x, new[name]) for name, x in old.items())


def test_the_feed_forward_width_of_bert_is_a_setting():
    assert everyformer.build("bert", "tiny", hidden=24).body.layers[0].sublayers[1].hidden[0].weight.shape == (24, 64)
