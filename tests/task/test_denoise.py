"""Span corruption: windows and spans as the paper's code makes them, the loss, evaluation, and filling blanks."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import everyformer
from everyformer.data.synthetic import shakespeare
from everyformer.data.tokenizer import SPECIAL, CharacterTokenizer
from everyformer.task import Denoise, Translate
from everyformer.task.corruption import MARKS, SpanMarks, corrupt, counts, partition
from everyformer.task.denoise import DenoiseData, DenoiseInference
from everyformer.train.loop import train
from everyformer.train.recipe import Optim, Recipe, Run
from tests.spec import denoise as spec

NAMES = [*SPECIAL, *MARKS]
LETTERS = SpanMarks(CharacterTokenizer("abcdefghij", NAMES), "here")


def runs(mask: list[bool]) -> list[tuple[bool, int]]:
    """The values of a mask and the lengths of their runs."""
    cuts = [0, *(i for i in range(1, len(mask)) if mask[i] != mask[i - 1]), len(mask)]
    return [(mask[start], end - start) for start, end in pairwise(cuts)]


@pytest.mark.parametrize("length, share, span", [(2, 0.15, 3.0), (10, 0.5, 1.0), (100, 0.15, 3.0), (64, 0.9, 8.0)])
def test_a_window_is_corrupted_as_the_papers_equations_say(length, share, span):
    """The mask is read off the target; then source and target are those of the definition."""
    token_T = np.arange(1000, 1000 + length)
    for seed in range(5):
        source, target = corrupt(token_T, LETTERS, share, span, torch.Generator().manual_seed(seed))
        missing = set(target.tolist()) - set(LETTERS.spans) - {LETTERS.end}
        mask = [token in missing for token in token_T.tolist()]
        assert source.tolist() == spec.inputs(token_T.tolist(), mask, LETTERS.spans, LETTERS.end)
        assert target.tolist() == spec.targets(token_T.tolist(), mask, LETTERS.spans, LETTERS.end)
        lengths = runs(mask)
        assert mask == spec.noise_mask([n for m, n in lengths if not m], [n for m, n in lengths if m])
        assert sum(mask) == spec.number_of_noise_tokens(length, share)
        assert len(lengths) == 2 * min(spec.number_of_spans(sum(mask), span), length - sum(mask))
        assert counts(length, share, span) == (sum(mask), len(lengths) // 2)


def test_all_ways_to_divide_a_span_are_equally_likely():
    generator = torch.Generator().manual_seed(0)
    found = Counter(tuple(partition(6, 3, generator)) for _ in range(2000))
    assert len(found) == 10 and all(sum(parts) == 6 and min(parts) >= 1 for parts in found)
    assert all(140 < times < 260 for times in found.values())  # 200 each; 4.5 standard deviations


@pytest.fixture
def little(tmp_path):
    (tmp_path / "little.txt").write_text(shakespeare()[:60_000])
    return str(tmp_path / "little.txt")


@pytest.fixture
def data(little):
    return Denoise(vocabulary=400, context=24, valid=0.1).open(little)


def small(data: DenoiseData, **changes: Any) -> Any:
    torch.manual_seed(0)
    return everyformer.member("t5", "tiny", vocabulary=data.tokenizer.vocabulary, dropout=0.0, **changes)


def test_batches_are_a_function_of_seed_and_step(data):
    data.fit(small(data))
    one, two = data.batch(3, 4, seed=1), data.batch(3, 4, seed=1)
    assert all(torch.equal(x, two[name]) for name, x in one.tensors.items())
    assert not torch.equal(one["target_BT"], data.batch(4, 4, seed=1)["target_BT"])
    assert not torch.equal(one["target_BT"], data.batch(3, 4, seed=2)["target_BT"])
    missing, spans = counts(24, 0.15, 3.0)
    assert one["source_BS"].shape == (4, 24 - missing + spans + 1) and one["target_BT"].shape == (
        4,
        missing + spans + 1,
    )
    assert torch.equal(one["input_BT"][:, 1:], one["target_BT"][:, :-1])
    assert one["input_BT"][:, 0].unique().tolist() == [data.marks.start]


def test_source_and_target_together_are_the_text(data):
    data.fit(small(data))
    batch = data.batch(0, 3, seed=0)
    text = shakespeare()[:60_000]
    inference = DenoiseInference(data)
    for source, target in zip(batch["source_BS"].tolist(), batch["target_BT"].tolist(), strict=True):
        spans = inference.spans(target)
        ids = [token for one in source[:-1] for token in spans.get(one, [one])]
        assert len(ids) == 24 and data.tokenizer.decode(ids) in text


def test_the_loss_is_the_sum_over_all_tokens_of_the_target(data):
    fitted, network = data.fit(small(data)), small(data).build().eval()
    batch = data.batch(0, 3, seed=0)
    logits = network(batch["source_BS"], batch["input_BT"]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), batch["target_BT"].flatten(), reduction="sum")
    torch.testing.assert_close(fitted.objective.loss(network, batch, "auto"), expected)
    assert data.count(batch) == batch["target_BT"].numel()


def test_an_evaluation_scores_the_same_spans_each_time_and_every_window_once(data):
    fitted, network = data.fit(small(data)), small(data).build().eval()
    first, again = (fitted.objective.evaluate(network, "valid", None, "auto") for _ in range(2))
    assert first == again and first["windows"] == len(data.splits["valid"]) // 24
    assert first["targets"] == first["targets_in_split"] == first["windows"] * fitted.objective.targets_per_example
    some = fitted.objective.evaluate(network, "valid", 3, "auto")
    assert some["windows"] == 3 and some["targets_in_split"] == first["targets"]


def test_blanks_are_filled_in_order_and_the_text_around_them_stays(data, monkeypatch):
    """The encoder reads a mark in the place of each blank; the decoder's spans come in their places, wherever it wrote them."""
    network, inference = small(data).build().eval(), DenoiseInference(data)
    source = inference.source("To be, or ___ to be, that is the <extra_id_7>.")
    marks = data.marks.spans
    assert [token for token in source if token in marks] == marks[:2] and source[-1] == data.marks.end
    written = [
        marks[1],
        *data.tokenizer.encode(b" question"),
        marks[0],
        *data.tokenizer.encode(b" not"),
        data.marks.end,
        7,
    ]
    monkeypatch.setattr(inference, "targets", lambda *given, **options: [[int(one) for one in written]])
    text = inference.generate_text(network, "To be, or ___ to be, that is the ___.")
    assert text == "To be, or not to be, that is the question."
    assert inference.predict(network, ["a ___"]).values.tolist() == ["a not"]


def test_texts_are_filled_alike_alone_and_in_a_batch(data):
    network, inference = small(data).build().eval(), DenoiseInference(data)
    texts = ["To be, or ___ to be", "___", "Now is the ___ of our ___ made glorious summer"]
    assert inference.fill(network, texts, 12) == [inference.fill(network, [text], 12)[0] for text in texts]


def test_a_text_without_a_blank_and_too_many_spans_are_refused(data):
    inference = DenoiseInference(data)
    with pytest.raises(ValueError, match="has no blank to fill; write ___ where text is missing"):
        inference.source("nothing")
    with pytest.raises(ValueError, match=r"loses 125 spans, but the tokenizer has 100 marks; lower task\.context"):
        long = Denoise(vocabulary=400, context=2500).open(None)
        long.fit(small(data))
    with pytest.raises(ValueError, match="denoise needs an encoder and a decoder; choose the member t5"):
        data.fit(everyformer.member("gpt2", "tiny"))


def learn(task: Any, data: str | None, steps: int, init_from: str | None = None, out: Any = None) -> Any:
    run = Run(steps=steps, batch=16, evaluate=0, save=0, device="cpu")
    optim, model = Optim(lr=4e-3, warmup=10), {"dropout": 0.0}
    recipe = Recipe(
        member="t5", size="tiny", task=task, data=data, model=model, run=run, optim=optim, init_from=init_from
    )
    return train(recipe, out)


def test_missing_words_are_learned_and_a_translator_starts_from_the_weights(tmp_path):
    """The text counts in a circle, so every missing letter follows from its neighbours; chance is one in eight. A run of translate
    takes the tokenizer and the weights over."""
    (tmp_path / "circle.txt").write_text("abcdefgh" * 1500)
    run = learn(Denoise("characters", context=16), str(tmp_path / "circle.txt"), 100, out=tmp_path / "run")
    assert run.metrics["span_accuracy"] > 0.4
    text = run.generate("abc___fghabcdefgh")
    assert text.startswith("abc") and text.endswith("fghabcdefgh")
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("source\ttarget\n" + "abc\tcba\nbcd\tdcb\nab\tba\nfg\tgf\n" * 10)
    task = Translate("source", "target", tokenizer="characters", valid=0.2)
    assert learn(task, str(pairs), 1, init_from=str(tmp_path / "run")).step == 1
