"""A new head on an imported model is one that transformers has: classes and numbers of texts, and questions, come back there."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace

import everyformer
from everyformer.cli.main import main
from everyformer.family.to_transformers import to_transformers
from everyformer.task.target import ClassTarget
from everyformer.train.imported import import_run
from everyformer.train.trained import load
from tests.peers.test_export import TOKENIZERS, exported, save
from tests.peers.test_import import BERT, refused, word_pieces, write_gpt2, write_sentence_encoder

BODIES = {
    "bert": ("BertForMaskedLM", transformers.BertConfig, BERT),
    "roberta": ("RobertaForMaskedLM", transformers.RobertaConfig, BERT),
    "distilbert": (
        "DistilBertForMaskedLM", transformers.DistilBertConfig,
        {"dim": 16, "n_heads": 2, "n_layers": 2, "hidden_dim": 40, "vocab_size": 400, "max_position_embeddings": 64},
    ),
    "albert": ("AlbertForMaskedLM", transformers.AlbertConfig, BERT | {"embedding_size": 8}),
    "electra": ("ElectraForPreTraining", transformers.ElectraConfig, BERT | {"embedding_size": 8}),
}  # fmt: skip


def write_bert(folder, architecture="BertForMaskedLM", config=transformers.BertConfig, sizes=BERT):
    torch.manual_seed(0)
    theirs = getattr(transformers, architecture)(config(**sizes))
    theirs.save_pretrained(folder)
    word_pieces().save(str(folder / "tokenizer.json"))
    return theirs.eval()


def with_classes(network):
    value = network.value
    return replace(value, outputs=(ClassTarget(("a", "b", "c")).head(value),)).build().eval()


@pytest.mark.parametrize("headless", [False, True], ids=["with a head", "without"])
@pytest.mark.parametrize("name", BODIES)
def test_the_new_head_of_an_encoder_is_that_of_its_type(name, headless, tmp_path):
    architecture, config, sizes = BODIES[name]
    write_bert(
        tmp_path / "theirs", architecture.partition("For")[0] + "Model" if headless else architecture, config, sizes
    )
    begun = load(tmp_path / "theirs")
    network = with_classes(begun.network)
    config, weights = to_transformers(network, begun.published)
    architecture = BODIES[name][0].partition("For")[0] + "ForSequenceClassification"
    assert (config["model_type"], config["architectures"]) == (name, [architecture])
    config = BODIES[name][1](**config, num_labels=3)
    theirs = getattr(transformers, architecture)(config).eval()
    assert not theirs.load_state_dict(weights, strict=False).unexpected_keys
    token_BT = torch.randint(5, 90, (2, 9))
    with torch.no_grad():
        assert (theirs(token_BT).logits - network(token_BT).logits).abs().max() < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3", "gemma", "gemma2"])
def test_the_new_head_of_a_language_model_is_that_of_its_type(name):
    network = everyformer.build(name, "tiny")
    for value in (network.value, replace(network.value, outputs=())):  # LlamaModel has no head
        config, _ = to_transformers(with_classes(value.build()))
        assert config["architectures"][0].endswith("ForSequenceClassification")


def test_a_sentence_encoder_is_fine_tuned_with_the_head_of_its_type(tmp_path, capsys):
    write_sentence_encoder(tmp_path / "theirs", "mean", True)
    run, data, new = str(tmp_path / "run"), str(tmp_path / "rows.csv"), str(tmp_path / "new")
    assert main(["import", str(tmp_path / "theirs"), "--out", run]) == 0
    (tmp_path / "rows.csv").write_text("text,label\n" + "a rose,good\nthe rose,bad\n" * 20)
    words = [run, "--init-from", run, "--data", data, "run.batch=4"]
    for verb in ("plan", "train"):
        assert "use embed, or give it a head with --task and --init-from" in refused(capsys, verb, *words)
    assert main(["plan", *words, "--task", "classify"]) == 0
    few = ("run.steps=1", "run.evaluate=0", "run.examples=1", "run.final_examples=2")
    assert main(["train", *words, "--task", "classify", *few, "--out", new]) == 0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(exported(new, tmp_path / "hf")).eval()
    names = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    with torch.no_grad():
        expected = theirs(torch.tensor([names("a rose")["input_ids"]])).logits.softmax(-1)
    assert np.abs(expected.numpy() - load(new).predict(["a rose"]).probabilities).max() < 1e-5


@pytest.mark.parametrize(("name", "task"), [("bert", "classify"), ("bert", "regress"), ("gpt2", "classify")])
def test_a_head_that_was_trained_here_gives_equal_predictions_there(name, task, tmp_path):
    (write_bert if name == "bert" else write_gpt2)(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "begun")
    labels = ("good", "bad") if task == "classify" else (107, 93)
    rows = "text,label\n" + "".join(f"{word} rose {n},{labels[n % 2]}\n" for n in range(40) for word in ("a", "the"))
    (tmp_path / "rows.csv").write_text(rows)
    settings = ("run.steps=1", "run.batch=4", "run.evaluate=0", "run.examples=1", "run.final_examples=2")
    recipe = everyformer.Recipe.of(
        str(tmp_path / "begun"), *settings, task=task, data=tmp_path / "rows.csv", init_from=tmp_path / "begun"
    )
    everyformer.train(recipe, tmp_path / "run")
    exported(tmp_path / "run", tmp_path / "hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf").eval()
    names = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    found = load(tmp_path / "run").predict(["a rose", "the rose"])
    for number, text in enumerate(("a rose", "the rose")):
        with torch.no_grad():
            expected = theirs(torch.tensor([names(text)["input_ids"]])).logits[0]
        if task == "classify":
            assert np.abs(expected.softmax(-1).numpy() - found.probabilities[number]).max() < 1e-5
        else:
            assert abs(expected.item() - found.values[number]) < 1e-3 < abs(found.values[number]) - 50


def test_a_model_of_numbers_comes_back_and_questions_stay_questions(tmp_path):
    for head, labels in (("ForSequenceClassification", 1), ("ForQuestionAnswering", 2)):
        theirs = write_bert(tmp_path / head, f"Bert{head}", sizes=BERT | {"num_labels": labels})
        import_run(tmp_path / head, tmp_path / f"run{head}")
        folder = exported(tmp_path / f"run{head}", tmp_path / f"hf{head}")
        again = getattr(transformers, f"AutoModel{head}").from_pretrained(folder)
        assert type(again) is type(theirs)
        assert all(torch.equal(x, again.state_dict()[name]) for name, x in theirs.state_dict().items())


def test_a_masked_model_without_segments_opens_there(tmp_path):
    """BERT and RoBERTa add the first segment to every token, DistilBERT has none."""
    network = save(tmp_path / "saved", "bert", TOKENIZERS["wordpiece"]())
    network = replace(network.value, segments=0, outputs=network.value.outputs[:1]).build().eval()
    everyformer.save(network, tmp_path / "saved")
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(exported(tmp_path / "saved", tmp_path / "hf")).eval()
    token_BT = torch.randint(5, 90, (2, 9))
    with torch.no_grad():
        assert (theirs(token_BT).logits - network(token_BT).logits).abs().max() < 1e-5


def test_the_mean_of_numbers_has_no_place_without_a_bias(tmp_path, capsys):
    write_gpt2(tmp_path / "theirs")
    import_run(tmp_path / "theirs", tmp_path / "begun")
    (tmp_path / "rows.csv").write_text("text,label\n" + "a rose,107\nthe rose,93\n" * 20)
    settings = ("run.steps=1", "run.batch=4", "run.evaluate=0", "run.examples=1", "run.final_examples=2")
    recipe = everyformer.Recipe.of(
        str(tmp_path / "begun"), *settings, task="regress", data=tmp_path / "rows.csv", init_from=tmp_path / "begun"
    )
    everyformer.train(recipe, tmp_path / "run")
    capsys.readouterr()
    assert main(["export", str(tmp_path / "run"), "--to", "hf", "--out", str(tmp_path / "hf")]) == 2
    assert "would be a bias of the head" in capsys.readouterr().err and not (tmp_path / "hf").exists()
