"""Encoding chunk by chunk equals encoding the whole text at once, and never holds the text in memory."""

from __future__ import annotations

import numpy as np
import pytest

from everyformer.data import encode
from everyformer.data import text as texts
from everyformer.data.encode import encode_sentences, encode_split
from everyformer.data.files import digest
from everyformer.data.synthetic import shakespeare
from everyformer.data.text import open_text
from everyformer.data.tokenizer import load_or_train, train, train_characters

POEM = shakespeare()[:40_000]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    return open_text(str(tmp_path / "poem.txt"), (1 - 1e-9, 1e-9))


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
@pytest.mark.parametrize("chunk, batch", [(100, 3), (5000, 2), (1 << 16, 256)])
def test_an_encoded_split_equals_the_encoding_of_the_whole_text(text, monkeypatch, tmp_path, kind, chunk, batch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(texts, "CHUNK", chunk)
    monkeypatch.setattr(encode, "CHUNKS_PER_BATCH", batch)
    tokenizer = load_or_train(kind, lambda: [POEM], 500, "poem")
    ids = encode_split(text, "train", tokenizer)
    assert isinstance(ids, np.memmap)
    assert ids.dtype.itemsize <= 2
    assert ids.tolist() == tokenizer.encode(POEM.encode()).tolist()


def test_only_one_batch_of_chunks_is_encoded_at_a_time(text, monkeypatch, tmp_path):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(texts, "CHUNK", 200)
    monkeypatch.setattr(encode, "CHUNKS_PER_BATCH", 4)
    tokenizer = train_characters(lambda: [POEM])
    inner, lengths = tokenizer.encode_all, []

    def spy(chunks):
        lengths.append(sum(map(len, chunks)))
        return inner(chunks)

    tokenizer.encode_all = spy
    encode_split(text, "train", tokenizer)
    assert max(lengths) < 4 * (200 + 200)  # the next line end is a few lines away
    assert len(lengths) > 20
    lengths.clear()
    encode_split(text, "train", tokenizer)
    assert not lengths  # the second call reads the cache


def test_an_interrupted_encoding_leaves_no_file(text, monkeypatch, tmp_path):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(texts, "CHUNK", 200)
    monkeypatch.setattr(encode, "CHUNKS_PER_BATCH", 4)
    tokenizer = train_characters(lambda: [POEM])
    inner, calls = tokenizer.encode_all, []

    def fails(chunks):
        calls.append(chunks)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return inner(chunks)

    tokenizer.encode_all = fails
    with pytest.raises(KeyboardInterrupt):
        encode_split(text, "train", tokenizer)
    assert list((tmp_path / "own").iterdir()) == []
    tokenizer.encode_all = inner
    assert len(encode_split(text, "train", tokenizer)) == len(POEM)


def test_the_cache_key_depends_on_the_tokenizer(text, cache_folder):
    one, other = train("bpe", lambda: [POEM], 300), train("bpe", lambda: [POEM], 400)
    assert len(encode_split(text, "train", one)) > len(encode_split(text, "train", other))
    assert digest("a", "b") != digest("ab") != digest("b", "a")


@pytest.mark.parametrize("read", [encode_split, lambda *arguments: encode_sentences(*arguments).token_N])
def test_the_cache_key_depends_on_the_split_boundaries(tmp_path, read):
    """Otherwise a run that holds out more would be evaluated on text that it was trained on."""
    (tmp_path / "poem.txt").write_text(POEM)
    lengths = {}
    for fraction in (0.1, 0.5):
        text = open_text(str(tmp_path / "poem.txt"), (1 - fraction, fraction))
        tokenizer = load_or_train("bpe", lambda text=text: text.chunks("train"), 300, text.fingerprint)
        lengths[fraction] = len(read(text, "valid", tokenizer))
        assert tokenizer.key == train("bpe", lambda text=text: text.chunks("train"), 300).key
    assert lengths[0.5] > 4 * lengths[0.1]


def test_the_cache_key_depends_on_the_document_boundaries(tmp_path):
    for number in range(3):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / f"{number}.txt").write_text("One. Two.")
    (tmp_path / "one.txt").write_text("One. Two.\n" * 3)
    one, many = (open_text(str(tmp_path / name), (1 - 1e-9, 1e-9)) for name in ("one.txt", "many"))
    tokenizer = train_characters(lambda: one.chunks("train"))
    assert one.splits["train"].tobytes() == many.splits["train"].tobytes()
    assert encode_sentences(one, "train", tokenizer).first_D.tolist() == [0, 6]
    assert encode_sentences(many, "train", tokenizer).first_D.tolist() == [0, 2, 4, 6]


def test_sentences_are_split_within_documents(tmp_path):
    (tmp_path / "a.txt").write_text("One two. Three!\nfour five\n\nsix? (Yes.) seven\n")
    (tmp_path / "b.txt").write_text("\n\nEight nine")
    text = open_text(str(tmp_path), (1 - 1e-9, 1e-9))
    tokenizer = train_characters(lambda: text.chunks("train"))
    sentences = encode_sentences(text, "train", tokenizer)
    read = [
        tokenizer.decode(sentences.token_N[a:b].tolist())
        for a, b in zip(sentences.start_S, sentences.start_S[1:], strict=False)
    ]
    assert read == ["One two.", "Three!", "four five", "six?", "(Yes.", "seven", "Eight nine"]
    assert sentences.first_D.tolist() == [0, 6, 7]
    assert [sentences.document_of(n) for n in range(7)] == [(0, 6)] * 6 + [(6, 7)]
    assert encode_sentences(text, "train", tokenizer, blank=True).first_D.tolist() == [0, 3, 6, 7]


def test_a_run_of_sentences_fits_the_token_limit():
    sentences = encode.Sentences(np.arange(20), np.array([0, 5, 8, 8 + 7, 20]), np.array([0, 3, 4]))
    assert [sentences.end_within(0, room) for room in (1, 5, 7, 8, 14, 15, 99)] == [1, 1, 1, 2, 2, 3, 3]
    assert sentences.end_within(0, 1, at_least=2) == 2
    assert sentences.end_within(3, 99) == 4
