"""Language: windows, and bits per byte by the bytes that the text really has."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest
import torch

from everyformer import build
from everyformer.data import datasets
from everyformer.data.datasets import FileSet
from everyformer.data.synthetic import shakespeare
from everyformer.task.language import Language
from everyformer.value import from_json, to_json

POEM = shakespeare()[:30_000].replace("king", "kïng")


@pytest.fixture
def poem(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    return str(tmp_path / "poem.txt")


def opened(data, context=16, **fields):
    work = Language(**fields).open(data, context)
    work.fit(build("gpt2", "tiny", vocabulary=work.tokenizer.vocabulary).value)
    return work


def published(folder, monkeypatch):
    """Files in GPT-2's form: every byte, and no pairs."""
    work = Language(tokenizer="bpe", vocabulary=300).open(str(folder / "poem.txt"), 16)
    names = {name: number for name, number in work.tokenizer.inner.get_vocab().items() if len(name) == 1}
    order = {name: place for place, name in enumerate(sorted(names))}
    (folder / "encoder.json").write_text(json.dumps(order))
    (folder / "vocab.bpe").write_text("#version: 0.2\n")
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("encoder.json", "vocab.bpe")}
    monkeypatch.setitem(datasets.DATASETS, "gpt2_bpe", (FileSet(sums),))
    return {"tokenizer": "gpt2", "tokenizer_files": str(folder)}


@pytest.mark.spec(59)
@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe", "gpt2"])
def test_bits_per_byte_are_of_the_real_bytes(poem, kind, tmp_path, monkeypatch):
    """A uniform model of V tokens needs log2 V bits a token, whatever a token is."""
    fields = published(tmp_path, monkeypatch) if kind == "gpt2" else {"tokenizer": kind, "vocabulary": 400}
    work = opened(poem, **fields)
    network = build("gpt2", "tiny", vocabulary=work.tokenizer.vocabulary)
    with torch.no_grad():
        network.embed.table.weight.zero_()  # tied: all logits are 0
    ids = work.splits["valid"]
    whole = work.evaluate(network, "valid", None, "auto")
    first = len(work.tokenizer.decode(ids[:1].tolist()).encode())
    size = len(work.text.splits["valid"]) - first
    bits = math.log2(work.tokenizer.vocabulary)
    assert whole["bits_per_byte"] == pytest.approx((len(ids) - 1) * bits / size)
    assert whole["perplexity"] == pytest.approx(work.tokenizer.vocabulary)
    part = work.evaluate(network, "valid", 3, "auto")
    scored = ids[: 3 * 16 + 1]
    text = work.tokenizer.decode(scored.tolist()).encode()
    assert part["targets"] == 48
    assert part["bits_per_byte"] == pytest.approx(48 * bits / (len(text) - first))


@pytest.mark.spec(56)
def test_batches_are_windows_that_begin_anywhere(poem):
    work = opened(poem)
    text = work.splits["train"]
    places = set()
    for step in range(30):
        for row in work.batch(step, 32, 0)["token_BT"].numpy():
            window = np.lib.stride_tricks.sliding_window_view(text, 17)
            found = np.flatnonzero((window[:, :4] == row[:4]).all(1))
            assert any(np.array_equal(text[n : n + 17], row) for n in found)
            places.add(int(found[0]) % 17)
    assert len(places) == 17


def test_batches_follow_from_seed_and_step(poem):
    one, other = opened(poem, tokenizer="bpe", vocabulary=300), opened(poem, tokenizer="bpe", vocabulary=300)
    assert torch.equal(one.batch(5, 4, 1)["token_BT"], other.batch(5, 4, 1)["token_BT"])
    assert not torch.equal(one.batch(5, 4, 1)["token_BT"], one.batch(6, 4, 1)["token_BT"])
    assert not torch.equal(one.batch(5, 4, 1)["token_BT"], one.batch(5, 4, 2)["token_BT"])


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_a_run_goes_on_with_its_tokenizer(poem, tmp_path, kind):
    """Other data would learn another one."""
    work = opened(poem, tokenizer=kind, vocabulary=300)
    work.save(tmp_path)
    (tmp_path / "other.txt").write_text(POEM[5000:9000])
    again = Language(tokenizer=kind, vocabulary=300).open(str(tmp_path / "other.txt"), 16, tmp_path)
    assert again.tokenizer.key == work.tokenizer.key


@pytest.mark.parametrize(
    "content, fields, message",
    [
        ("", {}, "is empty; give some text"),
        ("short line\nand another", {"valid": 0.7}, "a context of 16 is longer than the 11 tokens of"),
        ("one line", {}, "has 1 tokens for valid; give more text"),
        (b"\x89PNG\0\0" * 99, {"tokenizer": "bpe"}, "is not text in UTF-8"),
        (b"\x89PNG\0\0" * 99, {"tokenizer": "characters"}, "is not text in UTF-8"),
        (POEM, {"tokenizer": "bpe", "vocabulary": 10}, r"task\.vocabulary=10 is too small"),
    ],
)
def test_bad_data_are_refused(tmp_path, content, fields, message):
    (tmp_path / "a.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        opened(str(tmp_path / "a.txt"), **fields).examples()


def test_binary_data_can_be_learned_as_bytes(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 4)
    assert opened(str(tmp_path / "a.bin")).batch(0, 2, 0)["token_BT"].shape == (2, 17)


def test_a_vocabulary_that_does_not_fit_is_refused(poem):
    work = Language(tokenizer="bpe", vocabulary=300).open(poem, 16)
    with pytest.raises(ValueError, match=r"has 300 tokens, but the model knows 256; set model\.vocabulary to 300"):
        work.fit(build("gpt2", "tiny").value)


def test_a_model_of_episodes_is_refused_because_a_text_marks_none(poem):
    with pytest.raises(ValueError, match=r"same_document.* marks none; .* leave model\.episodes out"):
        Language().open(poem, 16).fit(build("gtrxl", "tiny", episodes=True).value)


def test_models_that_do_not_fit_are_refused(poem):
    work = Language().open(poem, 16)
    with pytest.raises(ValueError, match="needs a head Language, the model has Masked, Classify"):
        work.fit(build("bert", "tiny").value)
    with pytest.raises(ValueError, match="language needs a model of one sequence"):
        work.fit(build("transformer", "tiny").value)
    with pytest.raises(ValueError, match="has no split 'test'; it has train, valid"):
        work.evaluate(build("gpt2", "tiny"), "test", None, "auto")


def test_only_tokenizers_that_give_the_text_back_are_taken():
    with pytest.raises(ValueError, match=r"language\.tokenizer is 'wordpiece'"):
        Language(tokenizer="wordpiece")


def test_tasks_are_known_to_json():
    from everyformer.task.work import Task

    for name in ("language", "masked", "classify", "translate"):
        value = from_json(f'{{"type": "{name}"}}', Task)
        assert from_json(to_json(value), Task) == value


@pytest.fixture
def writer(poem):
    work = opened(poem, tokenizer="bpe", vocabulary=300)
    torch.manual_seed(0)
    return work, build("gpt2", "tiny", vocabulary=work.tokenizer.vocabulary)


def test_what_to_try_next_is_of_characters_that_are_known(tmp_path):
    (tmp_path / "greek.txt").write_text("μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος\n" * 60)
    assert opened(tmp_path / "greek.txt").hint == "--prompt 'Once'"
    assert opened(tmp_path / "greek.txt", tokenizer="characters").hint == "--prompt 'μῆνιν'"


def test_writing_begins_with_the_prompt(writer):
    work, network = writer
    written = [work.write(network, "Before we", 10, temperature=1.0, seed=seed, top_k=None) for seed in (1, 1, 2)]
    assert all(text.startswith("Before we") for text in written)
    assert written[0] == written[1] != written[2]


def test_a_beam_looks_for_the_end_of_the_line(writer, monkeypatch):
    work, network = writer
    asked: dict[str, Any] = {}

    def search(network, inputs, **options):
        asked.update(options, inputs=inputs)
        return [work.tokenizer.encode(b" go").tolist()]

    monkeypatch.setattr("everyformer.task.language.beam_search", search)
    assert work.write(network, "Before we", 10, beam=2) == "Before we go"
    newline = work.tokenizer.encode(b"\n").tolist()
    assert asked == {
        "inputs": [work.tokenizer.encode(b"Before we").tolist()],
        "end": newline[0],
        "longest": 10,
        "beam": 2,
    }


def test_a_stream_is_what_is_written(writer):
    work, network = writer
    choices = {"temperature": 1.0, "seed": 3}
    for prompt in ("Before", "kïng"):
        pieces = list(work.stream(network, prompt, 60, **choices))
        assert prompt + "".join(pieces) == work.write(network, prompt, 60, **choices)
        assert len(pieces) > 20


def test_a_character_comes_when_it_is_whole(monkeypatch, poem):
    """The two bytes of one character are two tokens."""
    work = opened(poem)
    parts = [[byte] for byte in "aïb".encode()]
    monkeypatch.setattr("everyformer.task.language.stream", lambda *_, **__: iter(parts))
    assert list(work.stream(build("gpt2", "tiny"), "x", 4)) == ["a", "ï", "b"]
