"""Heads that transformers puts on its models beside the usual one: equal logits, and the way back."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

import everyformer
from everyformer.cli.main import main
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers.test_import import byte_level, refused

VOCABULARY = 400
SIZES = {
    "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2, "intermediate_size": 40,
    "vocab_size": VOCABULARY, "pad_token_id": 3, "bos_token_id": 0, "eos_token_id": 0, "id2label": {0: "bad", 1: "good", 2: "odd"},
}  # fmt: skip
WIDE = SIZES | {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
GPT2 = {"n_embd": 16, "n_head": 2, "n_layer": 2, "n_positions": 40} | {name: SIZES[name] for name in list(SIZES)[5:]}
CONFIGS = {
    "Llama": ("LlamaConfig", SIZES),
    "Mistral": ("MistralConfig", SIZES),
    "Qwen2": ("Qwen2Config", SIZES),
    "Qwen3": ("Qwen3Config", SIZES | {"head_dim": 8}),
    "Gemma2": ("Gemma2Config", WIDE),
    "Gemma3Text": ("Gemma3TextConfig", WIDE),
    "GPT2": ("GPT2Config", GPT2),
}
CASES = [
    *((name, "ForSequenceClassification") for name in CONFIGS),
    *((name, "ForTokenClassification") for name in ("Llama", "Qwen3", "GPT2")),
    *((name, "ForQuestionAnswering") for name in ("Llama", "Mistral", "GPT2")),
    *((name, "Model") for name in CONFIGS),
]


def write(name, head, folder):
    torch.manual_seed(0)
    config, fields = CONFIGS[name]
    theirs = getattr(transformers, name + head)(getattr(transformers, config)(**fields)).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    theirs.save_pretrained(folder)
    return theirs


def tokens():
    return torch.randint(4, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name, head", CASES)
def test_every_head_of_a_decoder_has_equal_outputs(name, head, tmp_path):
    theirs, token_BT = write(name, head, tmp_path), tokens()
    ours = everyformer.from_pretrained(tmp_path)
    with torch.no_grad():
        expected, output = theirs(token_BT), ours(token_BT)
    if head == "Model":
        assert bool(ours.value.outputs) == bool(theirs.config.tie_word_embeddings)  # a tied output needs no weight
        assert (output.hidden - expected.last_hidden_state).abs().max() < 1e-4
        return
    want = torch.stack((expected.start_logits, expected.end_logits), -1) if "Question" in head else expected.logits
    assert output.logits.shape == want.shape and (output.logits - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_class_is_that_of_the_last_token_and_comes_back(name, tmp_path):
    theirs = write(name, "ForSequenceClassification", tmp_path / "theirs")
    byte_level().save(str(tmp_path / "theirs" / "tokenizer.json"))
    import_run(tmp_path / "theirs", tmp_path / "run")
    texts = ["a rose is a rose", "the quick brown fox", "a"]
    predictions = load(tmp_path / "run").predict(texts)
    names = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "theirs" / "tokenizer.json"))
    for text, row in zip(texts, predictions.probabilities, strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([names(text)["input_ids"]])).logits.softmax(-1)[0].numpy()
        assert np.abs(expected - row).max() < 1e-5
    assert predictions.classes == ("bad", "good", "odd")
    assert main(["export", str(tmp_path / "run"), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    state, back = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "hf"))
    assert state.keys() == back.keys() and all(torch.equal(x, back[one]) for one, x in state.items())
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    row = torch.tensor([names(texts[0])["input_ids"]])
    with torch.no_grad():
        assert (again(row).logits - theirs(row).logits).abs().max() < 1e-5


VIT = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 64,
    "image_size": 8,
    "patch_size": 4,
}


@pytest.mark.parametrize("head", ["ForImageClassification", "ForImageClassificationWithTeacher"])
def test_deit_has_two_class_tokens_and_with_a_teacher_two_heads(head, tmp_path, capsys):
    torch.manual_seed(0)
    config = transformers.DeiTConfig(**VIT, id2label={0: "cat", 1: "dog"})
    theirs = getattr(transformers, f"DeiT{head}")(config).eval()
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    theirs.save_pretrained(tmp_path / "deit")
    import_run(tmp_path / "deit", tmp_path / "run")
    run = load(tmp_path / "run")
    image_YXC = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    pixel_CYX = (torch.from_numpy(image_YXC) / 127.5 - 1).permute(2, 0, 1)
    with torch.no_grad():
        expected = theirs(pixel_CYX[None]).logits.softmax(-1)[0].numpy()
    predictions = run.predict([image_YXC])
    assert np.abs(predictions.probabilities[0] - expected).max() < 1e-5 and predictions.classes == ("cat", "dog")
    assert main(["export", str(tmp_path / "run"), "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    again = getattr(transformers, f"DeiT{head}").from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert np.abs(again(pixel_CYX[None]).logits.softmax(-1)[0].numpy() - expected).max() < 1e-6
    config = json.loads((tmp_path / "deit" / "config.json").read_text())
    (tmp_path / "deit" / "config.json").write_text(json.dumps(config | {"image_size": 12}))
    assert "6 x 16, not 11 x 16" in refused(capsys, "import", tmp_path / "deit", "--out", tmp_path / "other")


def save_bert(name, folder):
    fields = {name: SIZES[name] for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")}
    getattr(transformers, name)(transformers.BertConfig(**fields, intermediate_size=40)).save_pretrained(folder)


def test_a_head_that_compares_several_texts_is_refused_and_can_be_left_out(tmp_path):
    save_bert("BertForMultipleChoice", tmp_path / "bert")
    reason = "is a BertForMultipleChoice, whose head compares several texts, .*with --leave-out classifier"
    with pytest.raises(ValueError, match=reason):
        import_run(tmp_path / "bert", tmp_path / "run")
    assert not import_run(tmp_path / "bert", tmp_path / "run", ["classifier"]).network.value.outputs


def test_the_next_command_of_an_import_without_a_tokenizer_can_be_run(tmp_path, capsys):
    save_bert("BertForSequenceClassification", tmp_path / "bert")
    assert main(["import", str(tmp_path / "bert"), "--out", str(tmp_path / "run")]) == 0
    (tmp_path / "ids.jsonl").write_text('{"text": [5, 6, 7]}\n')
    command = capsys.readouterr().err.partition("next: everyformer ")[2]
    assert command.startswith("predict")
    assert main(shlex.split(command.replace("FILE", str(tmp_path / "ids.jsonl")))) == 0
