"""The tiny member of each task learns its embedded data in seconds, through the public API."""

from __future__ import annotations

import pytest

from everyformer.data.synthetic import shakespeare
from everyformer.family.table import MEMBERS, Member
from everyformer.task import Classify, Image, Language, Masked, Translate
from everyformer.train.loop import train
from everyformer.train.recipe import Optim, Recipe, Run
from tests.task.members import features, nodes


@pytest.fixture(autouse=True)
def custom_members(monkeypatch):
    for name, make in (("features", features), ("nodes", nodes)):
        monkeypatch.setitem(MEMBERS, name, Member(name, paper="", make=make, sizes={"tiny": {}}, size="tiny"))


def learn(member, task, steps, batch=16, lr=3e-3, model=None, data=None):
    run = Run(steps=steps, batch=batch, evaluate=0, save=0, device="cpu")
    optim = Optim(lr=lr, warmup=min(10, steps // 4))
    return train(
        Recipe(member=member, size="tiny", task=task, data=data, model=model or {}, run=run, optim=optim)
    ).metrics


# Chance level: one of nine plays, three centres, four shapes, four groups.
@pytest.mark.spec(49, 63, 64, 71)
@pytest.mark.parametrize(
    "member, kind, steps, batch, at_least",
    [
        ("byte-classifier", "text", 60, 16, 0.25),
        ("features", "sets", 80, 32, 0.8),
        ("vit", "images", 100, 32, 0.6),
        ("nodes", "graph", 60, 40, 0.7),
    ],
)
def test_classes_are_learned(member, kind, steps, batch, at_least):
    metrics = learn(member, Classify(kind=kind, vocabulary=2000), steps, batch, lr=5e-3)
    assert metrics["accuracy"] > at_least
    assert metrics["split"] == "valid"


@pytest.mark.spec(66)
def test_masked_words_are_learned():
    """The perplexity falls from 1,000 equally likely words to less than half."""
    metrics = learn("bert", Masked(vocabulary=1000), 50, model={"context": 32, "dropout": 0.0})
    assert metrics["masked_perplexity"] < 500
    assert metrics["masked_accuracy"] > 0.03
    assert 0.3 < metrics["next_sentence_accuracy"] < 0.7


@pytest.fixture
def little(tmp_path):
    (tmp_path / "little.txt").write_text(shakespeare()[:120_000])
    return str(tmp_path / "little.txt")


def test_masked_words_are_learned_from_single_runs(little):
    metrics = learn("bert", Masked(vocabulary=500, next_sentence=False), 50, data=little, model={"context": 32})
    assert metrics["masked_perplexity"] < 350
    assert "next_sentence_accuracy" not in metrics


@pytest.mark.spec(62)
def test_translation_is_learned():
    metrics = learn("transformer", Translate(context=24, valid=0.01, beam=2), 160, 24, lr=5e-3, model={"dropout": 0.0})
    assert metrics["perplexity"] < 2
    assert metrics["bleu"] > 40
    assert "version:" in metrics["bleu_signature"]


@pytest.mark.spec(56, 59)
def test_language_is_learned():
    """The entropy of Shakespeare's letter frequencies is 4.9 bits."""
    metrics = learn("byte-language", Language(valid=0.005), 60, lr=1e-2, model={"context": 32})
    assert metrics["bits_per_byte"] < 4.5


@pytest.mark.parametrize("kind, bits", [("characters", 4.5), ("bpe", 4.2)])
def test_language_is_learned_from_other_tokens(kind, bits, little):
    """A uniform guess needs log2 of the vocabulary per token: more than 5.5 bits per byte."""
    task = Language(tokenizer=kind, vocabulary=400, valid=0.05)
    metrics = learn("byte-language", task, 60, lr=1e-2, data=little, model={"context": 32})
    assert metrics["bits_per_byte"] < bits


@pytest.mark.spec(98, 99, 100, 101)
@pytest.mark.parametrize(
    "task, model",
    [
        (Image(levels=4, size=7), {"pattern": "local2d(7, 1, 1, 2, 2)"}),
        (Image(levels=4, size=7), {"logistics": 10, "pattern": "local(14, 14)"}),
        (Image(levels=4, size=4, shrink=2), {}),
    ],
)
def test_images_are_learned(task, model):
    """The entropy of the frequencies of the levels is 0.9 bits."""
    metrics = learn("image-transformer", task, 80, lr=4e-3, model=model | {"dropout": 0.0})
    assert metrics["bits_per_dimension"] < 0.75


def test_training_is_deterministic(little):
    metrics = [learn("bert", Masked(vocabulary=400), 4, 4, data=little, model={"context": 32}) for _ in range(2)]
    assert metrics[0] == metrics[1]
