"""What a trained model is used for from Python: each method equals its definition, on one text at a time without padding."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import everyformer
from everyformer.attention.context import Probe
from everyformer.infer.evaluate import window_nll
from everyformer.train import Recipe, load, train
from tests.train import small

TEXTS = ["the quick", "pack", "jugs.\n", "x", ""]
QUICK = ("run.steps=2", "run.batch=4", "run.evaluate=0", "run.device=cpu", "model.width=16", "model.heads=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folders of three runs: of a language model, a classifier of texts and a masked language model."""
    folder = tmp_path_factory.mktemp("trained")
    train(small.recipe(small.text(folder)), folder / "language")
    lines = "".join(f'{{"text": "{word} {n}", "label": "{word}"}}\n' for n in range(20) for word in ("good", "bad"))
    (folder / "words.jsonl").write_text(lines)
    train(Recipe.of("byte-classifier", *QUICK, size="tiny", data=folder / "words.jsonl"), folder / "classify")
    settings = (*QUICK, "task.vocabulary=80", "task.context=16", "task.next_sentence=false")
    train(Recipe.of("bert", *settings, size="tiny", data=folder / "text.txt"), folder / "masked")
    return folder


@pytest.fixture(scope="module", params=["language", "classify", "masked"])
def model(request, folder):
    return load(folder / request.param)


@pytest.fixture(scope="module")
def language(folder):
    return load(folder / "language")


def log_likelihood(network, ids):
    """log p(x_2, ..., x_n | x_1) as the sum of log softmax at each position."""
    logits_TV = network(torch.tensor([ids[:-1]])).logits[0].double()
    log_p_TV = logits_TV - logits_TV.exp().sum(-1, keepdim=True).log()
    return sum(float(log_p_TV[t, ids[t + 1]]) for t in range(len(ids) - 1))


@torch.no_grad()
def test_the_score_of_a_text_is_the_sum_of_its_log_probabilities(language):
    for text, score in zip(TEXTS, language.score(TEXTS), strict=True):  # at most a context of 8 tokens and a target
        ids = list(text.encode())
        expected = log_likelihood(language.network, ids) if len(ids) > 1 else 0.0
        assert score.log_likelihood == pytest.approx(expected, abs=1e-5) and score.tokens == max(0, len(ids) - 1)
        if score.tokens:
            assert score.bits_per_byte == pytest.approx(-expected / math.log(2) / score.tokens, abs=1e-6)
    assert language.score([""])[0].bits_per_byte is None


def test_a_text_longer_than_the_context_is_scored_as_in_evaluation(language):
    text = small.TEXT[:100]
    nll, count = window_nll(language.network, np.frombuffer(text.encode(), np.uint8), 8, 4)
    (score,) = language.score([text])
    assert (score.log_likelihood, score.tokens) == (pytest.approx(-nll), count)


def test_token_ids_are_scored_like_their_text(language):
    assert language.score([list(b"the fox")]) == language.score(["the fox"])
    with pytest.raises(ValueError, match="the token ids 1 to 256 are not all from 0 to 255"):
        language.score([[1, 256]])
    with pytest.raises(ValueError, match="'the fox' are one text; give a list"):
        language.score("the fox")


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["mean", "first", "last"])
def test_an_embedding_is_pooled_from_the_last_layer_of_the_text_alone(model, pooling):
    texts = [text[:8] for text in TEXTS]
    together = model.embed(texts, pooling)
    for text, vector in zip(texts, together, strict=True):
        inputs = model.task.inference.probe_input(model.network, text or "x")
        options = {name: x for name, x in inputs.options.items() if name != "visible"}
        hidden_TD = model.network(inputs.inputs[0][:, : len(inputs.labels)], **options).hidden[0]
        expected = {"mean": hidden_TD.mean(0), "first": hidden_TD[0], "last": hidden_TD[-1]}[pooling]
        if text:
            assert np.allclose(vector, expected.numpy(), atol=1e-5)
    assert together.shape == (len(TEXTS), 16) and np.isfinite(together).all()
    unit = model.embed(texts, pooling, normalize=True)
    assert np.allclose(unit, together / np.linalg.norm(together, axis=1, keepdims=True), atol=1e-6)


def test_a_text_longer_than_the_context_is_cut(language):
    assert np.array_equal(language.embed(["the quick brown fox"]), language.embed(["the quic"]))


def test_a_wrong_pooling_is_named(model):
    with pytest.raises(ValueError, match="pooling is 'meen'; did you mean mean"):
        model.embed(["x"], "meen")
    with pytest.raises(ValueError, match="nothing to embed"):
        model.embed([])


def test_prompts_are_continued_together_as_they_are_alone(language):
    prompts = ["the quick", "pack my box with", "x"]
    together = language.generate(prompts, tokens=12, seed=3)
    assert together == [language.generate(prompt, tokens=12, seed=3) for prompt in prompts]
    assert language.generate([list(b"the quick")], tokens=12, seed=3) == together[:1]
    assert "".join(["x", *language.stream("x", tokens=12, seed=3)]) == together[2]
    assert language.generate([]) == []


def test_classes_have_the_probabilities_of_the_network(folder):
    model = load(folder / "classify")
    predictions = model.classify(["good 3", "bad"])
    assert predictions.classes == ("bad", "good") and np.allclose(predictions.probabilities.sum(1), 1)
    assert model.generate("good 3").startswith(predictions.values[0])


def test_attention_has_the_weights_of_the_probe_and_the_tokens(model):
    attention, probe = model.attention("a fox"), Probe()
    inputs = model.task.inference.probe_input(model.network, "a fox")
    model.network(*inputs.inputs, **inputs.options, probe=probe)
    assert attention.queries == attention.keys == inputs.labels and len(attention.weights) == len(probe.weights)
    for weight_HQK, expected in zip(attention.weights, probe.weights, strict=True):
        assert weight_HQK.shape[1:] == (len(inputs.labels),) * 2
        assert np.allclose(weight_HQK, expected[0, :, : len(inputs.labels), : len(inputs.labels)].detach().numpy())


METHODS = {
    "language": ("generate", "stream", "score", "embed", "attention"),
    "classify": ("generate", "predict", "classify", "embed", "attention"),
    "masked": ("generate", "predict", "embed", "attention"),
}


@pytest.mark.parametrize("kind", METHODS)
def test_a_method_that_does_not_apply_names_those_that_do(kind, folder):
    model = load(folder / kind)
    assert model.methods == METHODS[kind]
    for name in {"score", "classify", "stream"} - set(METHODS[kind]):
        with pytest.raises(ValueError, match=rf"so {name} does not apply; it has {', '.join(METHODS[kind])}$"):
            getattr(model, name)(["a fox"])


@pytest.mark.parametrize(
    ("verb", "given", "message"),
    [
        ("embed", None, "the inputs None are of type NoneType; give a list of inputs"),
        ("embed", [3.5], "3.5 is n"),
        ("attention", 5, "the text 5 is of type int; give a str"),
    ],
)
def test_inputs_of_a_wrong_type_are_named(model, verb, given, message):
    with pytest.raises(ValueError, match=message):
        getattr(model, verb)(given)


def test_data_are_opened_when_they_are_needed(folder, tmp_path):
    run = train(small.recipe(small.text(tmp_path)), tmp_path / "run")
    model = load(tmp_path / "run")
    assert model.evaluate()["bits_per_byte"] == pytest.approx(run.metrics["bits_per_byte"], rel=0.2)
    (tmp_path / "text.txt").unlink()
    moved = load(tmp_path / "run")
    assert moved.generate("x", tokens=4, seed=0) == model.generate("x", tokens=4, seed=0)
    with pytest.raises(ValueError, match=r"the data of .* are missing"):
        moved.evaluate()
    with pytest.raises(ValueError, match=r"the data of .* are missing"):
        load(tmp_path / "run", data=True)


def test_a_saved_model_is_used_like_a_run(language, folder, tmp_path):
    everyformer.save(language.network, tmp_path / "bytes")
    saved = everyformer.load(tmp_path / "bytes")
    assert saved.methods == language.methods and saved.network.value == language.network.value
    assert saved.score(["a fox"]) == language.score(["a fox"])
    assert saved.generate(["a fox"], tokens=8, seed=0) == language.generate(["a fox"], tokens=8, seed=0)
    with pytest.raises(ValueError, match="is a saved model, which has no data; give load a path as data="):
        saved.evaluate()
    measured = everyformer.load(tmp_path / "bytes", data=folder / "text.txt").evaluate()
    assert measured["bits_per_byte"] > 0
    everyformer.save(everyformer.build("gpt2", "tiny", vocabulary=30), tmp_path / "ids")
    of_ids = everyformer.load(tmp_path / "ids")
    assert of_ids.generate("1 2 3", tokens=2, seed=0).startswith("1 2 3 ")
    assert of_ids.score([[1, 2, 3]])[0].bits_per_byte is None
    everyformer.save(load(folder / "masked").network, tmp_path / "masked")
    assert everyformer.load(tmp_path / "masked").methods == ("embed", "attention")
    everyformer.save(everyformer.build("vit", "tiny"), tmp_path / "vit")
    with pytest.raises(ValueError, match="so score does not apply; use its network"):
        everyformer.load(tmp_path / "vit").score(["x"])
