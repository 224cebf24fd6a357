"""Language: windows of the text, and bits per byte by the number of bytes of the text."""

from __future__ import annotations

import hashlib
import json
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from everyformer import build
from everyformer.data import datasets
from everyformer.data.datasets import FileSet
from everyformer.data.synthetic import shakespeare
from everyformer.network.output_head import Language as LanguageHead
from everyformer.task.language import Language
from everyformer.value import from_json, to_json

POEM = shakespeare()[:30_000].replace("king", "kïng")


@pytest.fixture
def poem(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    return str(tmp_path / "poem.txt")


def opened(data, context=16, **fields):
    task_data = Language(context=context, **fields).open(data)
    return task_data.fit(build("gpt2", "tiny", vocabulary=task_data.tokenizer.vocabulary).value)


def published(folder, monkeypatch):
    """Files in the format of GPT-2's tokenizer: one token per byte, and no merges."""
    data = Language(tokenizer="bpe", vocabulary=300).open(str(folder / "poem.txt"))
    names = {name: number for name, number in data.tokenizer.inner.get_vocab().items() if len(name) == 1}
    order = {name: index for index, name in enumerate(sorted(names))}
    (folder / "encoder.json").write_text(json.dumps(order))
    (folder / "vocab.bpe").write_text("#version: 0.2\n")
    sums = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("encoder.json", "vocab.bpe")}
    monkeypatch.setitem(datasets.DATASETS, "gpt2_bpe", (FileSet(sums),))
    return {"tokenizer": "gpt2", "tokenizer_files": str(folder)}


def test_windows_have_the_context_of_their_step(poem):
    data = opened(poem, context_schedule=((10, 12), (0, 4), (20, 16))).data
    for step, context in ((0, 4), (9, 4), (10, 12), (19, 12), (20, 16), (99, 16)):
        assert data.context_at(step) == context and data.context == 16
        batch = data.batch(step, 3, seed=0)
        assert batch["token_BT"].shape == (3, context + 1) and data.count(batch) == 3 * context
    whole = opened(poem).data.batch(50, 3, seed=0)
    assert torch.equal(data.batch(50, 3, seed=0)["token_BT"], whole["token_BT"])


@pytest.mark.parametrize(
    "fields, reason",
    [
        (
            {"context_schedule": ((5, 32),)},
            "has a context of 32, but task.context is 16; raise task.context, or lower it",
        ),
        ({"context_schedule": ((0, 4),), "prefix": 6}, "a prefix of 6 leaves no target in a context of 4"),
        (
            {"context_schedule": ((0, 2),), "extra_targets": 2},
            "a context of 2 has no target 2 tokens after the next one",
        ),
    ],
)
def test_a_schedule_with_windows_that_cannot_be_is_refused(poem, fields, reason):
    data = Language(context=16, **fields).open(poem)
    with pytest.raises(ValueError, match=reason):
        data.fit(data.adapt(build("gpt2", "tiny", vocabulary=256).value))


def test_a_schedule_of_segments_is_refused(poem):
    data = Language(context=16, context_schedule=((0, 4),)).open(poem)
    with pytest.raises(
        ValueError, match="the segments of a model with a segment memory continue each other; leave it out"
    ):
        data.fit(build("transformer-xl", "tiny", vocabulary=256).value)


@pytest.mark.spec(59)
@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe", "gpt2"])
def test_bits_per_byte_count_the_bytes_of_the_text(poem, kind, tmp_path, monkeypatch):
    """A uniform model of V tokens needs log2 V bits per token, whatever a token is."""
    fields = published(tmp_path, monkeypatch) if kind == "gpt2" else {"tokenizer": kind, "vocabulary": 400}
    task = opened(poem, **fields)
    network = build("gpt2", "tiny", vocabulary=task.data.tokenizer.vocabulary)
    with torch.no_grad():
        network.embed.table.weight.zero_()  # tied: all logits are 0
    ids = task.data.splits["valid"]
    whole = task.objective.evaluate(network, "valid", None, "auto")
    first = len(task.data.tokenizer.decode(ids[:1].tolist()).encode())
    size = len(task.data.text.splits["valid"]) - first
    bits = math.log2(task.data.tokenizer.vocabulary)
    assert whole["bits_per_byte"] == pytest.approx((len(ids) - 1) * bits / size)
    assert whole["perplexity"] == pytest.approx(task.data.tokenizer.vocabulary)
    part = task.objective.evaluate(network, "valid", 3, "auto")
    regular = (len(ids) - 1 - 16) // 8  # windows of 16 tokens, of which the last 8 are new
    ends = [16 + 8 * (1 + window * regular // 6) for window in range(6)]
    pieces = [task.data.tokenizer.decode(ids[end - 7 : end + 1].tolist()) for end in ends]
    assert (part["targets"], part["targets_in_split"]) == (48, len(ids) - 1)
    assert part["bits_per_byte"] == pytest.approx(48 * bits / len("".join(pieces).encode()))


@pytest.mark.spec(56)
def test_batches_are_windows_at_random_positions(poem):
    task = opened(poem)
    text = task.data.splits["train"]
    offsets = set()
    for step in range(30):
        for row in task.data.batch(step, 32, 0)["token_BT"].numpy():
            window = np.lib.stride_tricks.sliding_window_view(text, 17)
            starts = np.flatnonzero((window[:, :4] == row[:4]).all(1))
            assert any(np.array_equal(text[n : n + 17], row) for n in starts)
            offsets.add(int(starts[0]) % 17)
    assert len(offsets) == 17


def test_batches_are_a_function_of_seed_and_step(poem):
    one, other = opened(poem, tokenizer="bpe", vocabulary=300), opened(poem, tokenizer="bpe", vocabulary=300)
    assert torch.equal(one.data.batch(5, 4, 1)["token_BT"], other.data.batch(5, 4, 1)["token_BT"])
    assert not torch.equal(one.data.batch(5, 4, 1)["token_BT"], one.data.batch(6, 4, 1)["token_BT"])
    assert not torch.equal(one.data.batch(5, 4, 1)["token_BT"], one.data.batch(5, 4, 2)["token_BT"])


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_the_tokenizer_of_a_run_is_used_again(poem, tmp_path, kind):
    """Training on the other data would give another tokenizer."""
    task = opened(poem, tokenizer=kind, vocabulary=300)
    task.data.save(tmp_path)
    (tmp_path / "other.txt").write_text(POEM[5000:9000])
    again = Language(tokenizer=kind, vocabulary=300).open(str(tmp_path / "other.txt"), tmp_path)
    assert again.tokenizer.key == task.data.tokenizer.key


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
        opened(str(tmp_path / "a.txt"), **fields).data.examples()


def test_binary_data_are_read_as_bytes(tmp_path):
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 4)
    assert opened(str(tmp_path / "a.bin")).data.batch(0, 2, 0)["token_BT"].shape == (2, 17)


def test_a_vocabulary_larger_than_the_models_is_refused(poem):
    data = Language(tokenizer="bpe", vocabulary=300).open(poem)
    with pytest.raises(ValueError, match=r"has 300 tokens, but the model has 256; set model\.vocabulary to 300"):
        data.fit(build("gpt2", "tiny").value)


def test_a_language_head_with_fewer_logits_than_tokens_is_refused(poem):
    value = build("gpt2", "tiny").value
    data = Language().open(poem)
    for few in (2, 255, 256, 300):
        narrow = replace(value, outputs=(LanguageHead(tied=False, vocabulary=few),))
        with pytest.raises(ValueError, match=rf"has logits for {few}; leave its") if few < 256 else nullcontext():
            data.fit(narrow)


def test_a_model_that_separates_documents_is_refused(poem):
    with pytest.raises(ValueError, match=r"same_document.* marks no documents; .* leave model\.episodes out"):
        Language().open(poem).fit(build("gtrxl", "tiny", episodes=True).value)


def test_unsuitable_models_are_refused(poem):
    data = Language().open(poem)
    with pytest.raises(ValueError, match="needs an output head Language, the model has Masked, Classify"):
        data.fit(build("bert", "tiny").value)
    with pytest.raises(ValueError, match="language needs a model of one sequence"):
        data.fit(build("transformer", "tiny").value)
    with pytest.raises(ValueError, match="has no split 'test'; it has train, valid"):
        opened(poem).objective.evaluate(build("gpt2", "tiny"), "test", None, "auto")


def test_lossy_tokenizers_are_refused():
    with pytest.raises(ValueError, match=r"language\.tokenizer is 'wordpiece'"):
        Language(tokenizer="wordpiece")


def test_tasks_round_trip_through_json():
    from everyformer.task.task import Task

    for name in ("language", "masked", "classify", "translate"):
        value = from_json(f'{{"type": "{name}"}}', Task)
        assert from_json(to_json(value), Task) == value


@pytest.fixture
def generator(poem):
    task = opened(poem, tokenizer="bpe", vocabulary=300)
    torch.manual_seed(0)
    return task, build("gpt2", "tiny", vocabulary=task.data.tokenizer.vocabulary)


def test_the_example_prompt_has_only_characters_of_the_text(tmp_path):
    (tmp_path / "greek.txt").write_text("μῆνιν ἄειδε θεὰ Πηληϊάδεω Ἀχιλῆος\n" * 60)
    assert opened(tmp_path / "greek.txt").inference.example == "--prompt 'Once'"
    assert opened(tmp_path / "greek.txt", tokenizer="characters").inference.example == "--prompt 'μῆνιν'"


def test_generated_text_begins_with_the_prompt_and_follows_from_the_seed(generator):
    task, network = generator
    texts = [
        task.inference.generate_text(network, "Before we", 10, temperature=1.0, seed=seed, top_k=None)
        for seed in (1, 1, 2)
    ]
    assert all(text.startswith("Before we") for text in texts)
    assert texts[0] == texts[1] != texts[2]


def test_a_beam_search_ends_at_the_end_of_the_line(generator, monkeypatch):
    task, network = generator
    options_given: dict[str, Any] = {}

    def search(network, inputs, **options):
        options_given.update(options, inputs=inputs)
        return [task.data.tokenizer.encode(b" go").tolist()]

    monkeypatch.setattr("everyformer.task.language_inference.beam_search", search)
    assert task.inference.generate_text(network, "Before we", 10, beam=2) == "Before we go"
    newline = task.data.tokenizer.encode(b"\n").tolist()
    assert options_given == {
        "inputs": [task.data.tokenizer.encode(b"Before we").tolist()],
        "end": newline[0],
        "max_tokens": 10,
        "beam": 2,
    }


def test_a_stream_yields_the_generated_text(generator):
    task, network = generator
    choices = {"temperature": 1.0, "seed": 3}
    for prompt in ("Before", "kïng"):
        pieces = list(task.inference.stream(network, prompt, 60, **choices))
        assert prompt + "".join(pieces) == task.inference.generate_text(network, prompt, 60, **choices)
        assert len(pieces) > 20


def test_a_character_is_yielded_when_all_its_tokens_are_there(monkeypatch, poem):
    """The two bytes of one character are two tokens."""
    task = opened(poem)
    parts = [[byte] for byte in "aïb".encode()]
    monkeypatch.setattr("everyformer.task.language_inference.stream", lambda *_, **__: iter(parts))
    assert list(task.inference.stream(build("gpt2", "tiny"), "x", 4)) == ["a", "ï", "b"]
