"""Streams of tokens: equal to encoding the whole text at once, mapped, and made without ever holding it."""

from __future__ import annotations

import numpy as np
import pytest

from everyformer.data import stream
from everyformer.data import text as texts
from everyformer.data.files import digest
from everyformer.data.made import shakespeare
from everyformer.data.stream import sentences, tokens
from everyformer.data.text import open_text
from everyformer.data.tokenizer import characters, learn, make

POEM = shakespeare()[:40_000]


@pytest.fixture
def text(tmp_path):
    (tmp_path / "poem.txt").write_text(POEM)
    return open_text(str(tmp_path / "poem.txt"), (1 - 1e-9, 1e-9))


@pytest.mark.parametrize("kind", ["bytes", "characters", "bpe"])
@pytest.mark.parametrize("piece, together", [(100, 3), (5000, 2), (1 << 16, 256)])
def test_a_stream_is_the_whole_text_encoded(text, monkeypatch, tmp_path, kind, piece, together):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(texts, "PIECE", piece)
    monkeypatch.setattr(stream, "TOGETHER", together)
    tokenizer = make(kind, lambda: [POEM], 500, "poem")
    found = tokens(text, "train", tokenizer)
    assert isinstance(found, np.memmap)
    assert found.dtype.itemsize <= 2
    assert found.tolist() == tokenizer.encode(POEM.encode()).tolist()


def test_no_more_than_a_few_pieces_are_in_memory(text, monkeypatch, tmp_path):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(texts, "PIECE", 200)
    monkeypatch.setattr(stream, "TOGETHER", 4)
    tokenizer = characters(lambda: [POEM])
    inner, largest = tokenizer.encode_all, []

    def spy(some):
        largest.append(sum(map(len, some)))
        return inner(some)

    tokenizer.encode_all = spy
    tokens(text, "train", tokenizer)
    assert max(largest) < 4 * (200 + 200)  # the next good place to cut is a few lines away
    assert len(largest) > 20
    largest.clear()
    tokens(text, "train", tokenizer)
    assert not largest  # the second time it is there


def test_an_interrupted_stream_is_not_taken_for_a_whole_one(text, monkeypatch, tmp_path):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(texts, "PIECE", 200)
    monkeypatch.setattr(stream, "TOGETHER", 4)
    tokenizer = characters(lambda: [POEM])
    inner, calls = tokenizer.encode_all, []

    def fails(some):
        calls.append(some)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return inner(some)

    tokenizer.encode_all = fails
    with pytest.raises(KeyboardInterrupt):
        tokens(text, "train", tokenizer)
    assert list((tmp_path / "own").iterdir()) == []
    tokenizer.encode_all = inner
    assert len(tokens(text, "train", tokenizer)) == len(POEM)


def test_what_is_kept_is_of_this_text_split_and_tokenizer(text, cache_folder):
    one, other = learn("bpe", lambda: [POEM], 300), learn("bpe", lambda: [POEM], 400)
    assert len(tokens(text, "train", one)) > len(tokens(text, "train", other))
    assert digest("a", "b") != digest("ab") != digest("b", "a")


@pytest.mark.parametrize("read", [tokens, lambda *asked: sentences(*asked).token_N])
def test_what_is_kept_is_cut_where_the_text_is(tmp_path, read):
    """Else a model would be judged by what it learned from, where another run held out less."""
    (tmp_path / "poem.txt").write_text(POEM)
    lengths = {}
    for share in (0.1, 0.5):
        text = open_text(str(tmp_path / "poem.txt"), (1 - share, share))
        tokenizer = make("bpe", lambda text=text: text.pieces("train"), 300, text.fingerprint)
        lengths[share] = len(read(text, "valid", tokenizer))
        assert tokenizer.key == learn("bpe", lambda text=text: text.pieces("train"), 300).key
    assert lengths[0.5] > 4 * lengths[0.1]


def test_what_is_kept_has_the_documents_of_this_text(tmp_path):
    for number in range(3):
        (tmp_path / "many").mkdir(exist_ok=True)
        (tmp_path / "many" / f"{number}.txt").write_text("One. Two.")
    (tmp_path / "one.txt").write_text("One. Two.\n" * 3)
    one, many = (open_text(str(tmp_path / name), (1 - 1e-9, 1e-9)) for name in ("one.txt", "many"))
    tokenizer = characters(lambda: one.pieces("train"))
    assert one.splits["train"].tobytes() == many.splits["train"].tobytes()
    assert sentences(one, "train", tokenizer).first_D.tolist() == [0, 6]
    assert sentences(many, "train", tokenizer).first_D.tolist() == [0, 2, 4, 6]


def test_sentences_of_documents(tmp_path):
    (tmp_path / "a.txt").write_text("One two. Three!\nfour five\n\nsix? (Yes.) seven\n")
    (tmp_path / "b.txt").write_text("\n\nEight nine")
    text = open_text(str(tmp_path), (1 - 1e-9, 1e-9))
    tokenizer = characters(lambda: text.pieces("train"))
    found = sentences(text, "train", tokenizer)
    read = [
        tokenizer.decode(found.token_N[a:b].tolist()) for a, b in zip(found.begin_S, found.begin_S[1:], strict=False)
    ]
    assert read == ["One two.", "Three!", "four five", "six?", "(Yes.", "seven", "Eight nine"]
    assert found.first_D.tolist() == [0, 6, 7]
    assert [found.document(n) for n in range(7)] == [(0, 6)] * 6 + [(6, 7)]
    assert sentences(text, "train", tokenizer, blank=True).first_D.tolist() == [0, 3, 6, 7]


def test_a_run_of_sentences_has_room():
    found = stream.Sentences(np.arange(20), np.array([0, 5, 8, 8 + 7, 20]), np.array([0, 3, 4]))
    assert [found.within(0, room) for room in (1, 5, 7, 8, 14, 15, 99)] == [1, 1, 1, 2, 2, 3, 3]
    assert found.within(0, 1, at_least=2) == 2
    assert found.within(3, 99) == 4
