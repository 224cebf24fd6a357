"""`everyformer export --to hf` (docs/import_export.md): transformers opens the folder, with equal tokens, logits and text."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from safetensors.torch import load_file

import everyformer
from everyformer.cli.export import FORMATS, reasons
from everyformer.cli.main import main
from everyformer.data.tokenizer import ByteTokenizer, train, train_characters
from everyformer.infer.signature import Signature, call
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers import make_export_table
from tests.peers.test_import import CORPUS, TEXTS, refused, write_gpt2
from tests.peers.test_pretrained import logits

TEXT = "a rose is a rose is a rose"
TOKENIZERS = {
    "bytes": ByteTokenizer,
    "characters": lambda: train_characters(lambda: CORPUS),
    "bpe": lambda: train("bpe", lambda: CORPUS, 400),
    "wordpiece": lambda: train("wordpiece", lambda: CORPUS, 400),
}
DECODERS = {"gpt2": {"context": 40}, "llama": {}, "mistral": {}, "qwen3": {}, "gemma": {}, "gemma2": {}}
THEIRS = {
    "tokens": "input_ids", "visible": "attention_mask", "segments": "token_type_ids", "images": "pixel_values",
    "source_tokens": "input_ids", "source_visible": "attention_mask", "target_tokens": "decoder_input_ids",
}  # fmt: skip
TABLE = re.findall(r"^\| ([\w-]+) \| (yes|–) \| yes \| yes \| (yes|–) \|$", make_export_table.PAGE.read_text(), re.M)


def save(folder, member, tokenizer, **settings):
    """Writes a small model with noisy weights and its tokenizer; returns the network."""
    torch.manual_seed(0)
    network = everyformer.build(member, "tiny", vocabulary=tokenizer.vocabulary, **settings)
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    everyformer.save(network, folder)
    tokenizer.save(folder)
    return network.eval()


def exported(run, folder, **changes):
    assert main(["export", str(run), "--to", "hf", "--out", str(folder)]) == 0
    return folder


def assert_equal_text(network, tokenizer, folder):
    """Equal tokens, equal logits, and equal greedy text."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    names = transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text.encode()).tolist()
        assert names(text)["input_ids"] == [*tokenizer.start, *ids]
        assert names.decode(ids, clean_up_tokenization_spaces=False) == tokenizer.decode(ids)
    token_BT = torch.tensor([tokenizer.encode(TEXT.encode()).tolist()[:20]])
    with torch.no_grad():
        expected = network(token_BT).logits
        assert (theirs(token_BT).logits - expected).abs().max() < 1e-5 * expected.abs().max()
    text = theirs.generate(token_BT, max_new_tokens=15, do_sample=False)[0].tolist()
    assert everyformer.generate(network, token_BT.tolist(), 15, temperature=0) == [text]


@pytest.mark.parametrize("name", ["bytes", "characters", "bpe"])
def test_every_tokenizer_of_a_language_model_is_exported(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    network = save(tmp_path / "saved", "gpt2", tokenizer, context=40)
    assert_equal_text(network, tokenizer, exported(tmp_path / "saved", tmp_path / "hf"))


@pytest.mark.parametrize("member", DECODERS)
def test_every_language_model_that_transformers_has_is_exported(member, tmp_path):
    tokenizer = ByteTokenizer()
    network = save(tmp_path / "saved", member, tokenizer, **DECODERS[member])
    assert_equal_text(network, tokenizer, exported(tmp_path / "saved", tmp_path / "hf"))


def test_a_tied_table_is_stored_once(tmp_path):
    save(tmp_path / "saved", "gpt2", ByteTokenizer(), context=40)
    names = load_file(exported(tmp_path / "saved", tmp_path / "hf") / "model.safetensors").keys()
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names


@pytest.mark.parametrize("name", ["bpe", "wordpiece"])
def test_a_masked_model_is_exported_with_its_marks(name, tmp_path):
    tokenizer = TOKENIZERS[name]()
    value = everyformer.member("bert", "tiny", vocabulary=tokenizer.vocabulary)
    torch.manual_seed(0)
    network = everyformer.build(replace(value, outputs=value.outputs[:1])).eval()
    everyformer.save(network, tmp_path / "saved")
    tokenizer.save(tmp_path / "saved")
    exported(tmp_path / "saved", tmp_path / "hf")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "hf").eval()
    names = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    for text in TEXTS:
        row = [*tokenizer.marks[0], *tokenizer.encode(text.encode()).tolist(), *tokenizer.marks[1]]
        assert names(text)["input_ids"] == row
        with torch.no_grad():
            expected = network(torch.tensor([row])).logits
            assert (theirs(torch.tensor([row])).logits - expected).abs().max() < 1e-5
    assert names.mask_token_id == tokenizer.special_id("[MASK]") and names.pad_token_id == tokenizer.special_id("[PAD]")


def test_a_classifier_that_was_trained_here_opens_with_its_classes(tmp_path):
    rows = "text,label\n" + "".join(f"{word} film,{label}\n" for word, label in (("good", "pos"), ("bad", "neg")) * 20)
    (tmp_path / "films.csv").write_text(rows)
    settings = ("run.steps=1", "run.batch=4", "run.evaluate=0", "run.examples=2", "task.vocabulary=60")
    recipe = everyformer.Recipe.of("bert", *settings, size="tiny", task="classify", data=tmp_path / "films.csv")
    everyformer.train(recipe, tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    names = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    predictions = load(tmp_path / "run").predict(["a good film", "bad"])
    for text, row in zip(("a good film", "bad"), predictions.probabilities, strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([names(text)["input_ids"]])).logits.softmax(-1)[0]
        assert np.abs(expected.numpy() - row).max() < 1e-5
    assert tuple(theirs.config.id2label.values()) == predictions.classes


def test_an_image_classifier_opens_with_the_scaling_of_its_images(tmp_path):
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 40}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, id2label={0: "cat", 1: "dog"})
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    scaling = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.2, 0.3, 0.1]}
    settings = {"size": {"height": 8, "width": 8}, **scaling}
    (tmp_path / "vit" / "preprocessor_config.json").write_text(json.dumps(settings))
    import_run(tmp_path / "vit", tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hf").eval()
    given = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    for name, expected in scaling.items():
        assert np.abs(np.array(given[name]) - expected).max() < 1e-6
    image_YXC = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    mean, std = (torch.tensor(given[name]) for name in scaling)
    pixel_CYX = ((torch.from_numpy(image_YXC) / 255 - mean) / std).permute(2, 0, 1)
    with torch.no_grad():
        expected = theirs(pixel_CYX[None]).logits.softmax(-1)[0].numpy()
    assert np.abs(load(tmp_path / "run").predict([image_YXC]).probabilities[0] - expected).max() < 1e-5


def test_what_is_imported_and_exported_is_equal(tmp_path):
    """The weights, the config and the tokenizer come back."""
    write_gpt2(tmp_path / "gpt2")
    import_run(tmp_path / "gpt2", tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "hf")
    state, back = (load_file(tmp_path / one / "model.safetensors") for one in ("gpt2", "hf"))
    assert state.keys() == back.keys() and all(torch.equal(x, back[name]) for name, x in state.items())
    import_run(tmp_path / "hf", tmp_path / "again")
    first, again = (load(tmp_path / one) for one in ("run", "again"))
    assert again.network.value == first.network.value
    assert again.task.data.tokenizer.key == first.task.data.tokenizer.key


def test_a_model_that_transformers_has_not_is_refused_with_the_difference(tmp_path, capsys):
    everyformer.save(everyformer.build("transformer-xl", "tiny"), tmp_path / "saved")
    message = refused(capsys, "export", tmp_path / "saved", "--to", "hf", "--out", tmp_path / "hf")
    assert "transformers has no such model" in message and not (tmp_path / "hf").exists()
    message = refused(capsys, "export", tmp_path / "saved", "--to", "tf", "--out", tmp_path / "hf")
    assert "there is no format 'tf'" in message
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    save(tmp_path / "gpt2", "gpt2", ByteTokenizer(), context=40)
    message = refused(capsys, "export", tmp_path / "gpt2", "--to", "hf", "--out", tmp_path / "full")
    assert "already exists and is not empty" in message
    assert (tmp_path / "full" / "mine.txt").read_text() == "mine"


def test_the_table_of_members_and_formats_in_the_docs_is_current():
    assert make_export_table.table() in make_export_table.PAGE.read_text()
    assert set(reasons(everyformer.build("gpt2", "tiny"))) == set(FORMATS)
    assert [row[0] for row in TABLE] == everyformer.members()


@pytest.mark.parametrize("member, in_hf, in_gguf", TABLE)
def test_every_cell_of_the_table_is_what_the_command_does(member, in_hf, in_gguf, tmp_path, capsys):
    """The columns torch and onnx, which are all yes, are in tests/train/test_export_graph.py and test_export_onnx.py (slow)."""
    torch.manual_seed(0)
    network = everyformer.build(member, "tiny").eval()
    everyformer.save(network, tmp_path / "saved")
    for name, cell in (("hf", in_hf), ("gguf", in_gguf)):
        words = ("export", str(tmp_path / "saved"), "--to", name, "--out", str(tmp_path / name))
        if cell == "yes":
            assert main(list(words)) == 0
        else:
            message = refused(capsys, *words)
            assert f"cannot be exported to {name}: " in message and "; use --to" in message
            assert not (tmp_path / name).exists()
    if in_hf == "yes":
        assert_same_outputs(network, tmp_path / "hf")


def assert_same_outputs(network, folder):
    """What the class that config.json names returns."""
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    theirs, given = (
        getattr(transformers, name).from_pretrained(folder).eval(),
        Signature.of(network.value).example(1, 7),
    )
    with torch.no_grad():
        expected, found = call(network, given), theirs(**{THEIRS[one]: x for one, x in given.items()})
    for x, y in zip(logits(found), expected, strict=True):
        assert (x.view(y.shape) - y).abs().max() < 1e-5 * y.abs().max()
