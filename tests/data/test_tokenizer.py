"""Tokenizers give the text back, count its bytes, and are learned the same every time."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from everyformer.data import named
from everyformer.data import tokenizer as tokenizers
from everyformer.data.made import shakespeare
from everyformer.data.named import Form
from everyformer.data.tokenizer import SPECIAL, Characters, learn, make

POEM = shakespeare()[:60_000]
ODD = "naïve café — ‘quotes’ 日本語 🙂\n\n\ttabs  and   spaces\r\n"


def learned(kind, text=POEM, vocabulary=600):
    return (
        learn(kind, lambda: [text], vocabulary) if kind in ("bpe", "wordpiece") else make(kind, lambda: [text], 0, "")
    )


@pytest.fixture(scope="module", params=["bytes", "characters", "bpe"])
def reversible(request):
    return learned(request.param, POEM + ODD)


@pytest.mark.spec(59, 67)
@pytest.mark.parametrize("text", [POEM[:5000], ODD, "", "x"])
def test_text_comes_back_and_its_bytes_are_counted(reversible, text):
    ids = reversible.encode(text.encode())
    assert reversible.decode(ids.tolist()) == text
    assert int(reversible.sizes[ids].sum()) == len(text.encode())
    assert len(reversible.sizes) == reversible.vocabulary


@pytest.mark.spec(66, 67)
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_learning_is_deterministic(kind):
    """The trainer numbers pieces in the order of a hash table, which differs each time."""
    found = [learned(kind) for _ in range(4)]
    assert len({tokenizer.key for tokenizer in found}) == 1
    assert len({tokenizer.inner.to_str() for tokenizer in found}) == 1


@pytest.mark.spec(66)
def test_wordpiece_is_berts():
    """Words without case and accents, pieces within words marked ##, unknown characters [UNK]."""
    tokenizer = learn("wordpiece", lambda: ["walk walking walked talk talking talked " * 50 + POEM], 900)
    assert [tokenizer.special(name) for name in SPECIAL] == [0, 1, 2, 3, 4]
    names = [tokenizer.inner.id_to_token(number) for number in tokenizer.encode("WALKING, Wálking".encode())]
    assert names == ["walking", ",", "walking"] or names[:2] == ["walk", "##ing"]
    assert tokenizer.encode("日".encode()).tolist() == [1]
    assert tokenizer.sizes is None
    letters = tokenizer.encode(b"zzqx")
    assert len(letters) > 1 and all(
        tokenizer.inner.id_to_token(number).startswith("##") for number in letters[1:].tolist()
    )


def test_the_alphabet_of_wordpiece_is_limited(monkeypatch):
    monkeypatch.setattr(tokenizers, "ALPHABET", 3)
    tokenizer = learn("wordpiece", lambda: ["aab aab abc " * 20 + "aad"], 100)
    assert tokenizer.encode(b"aad").tolist() == [1]
    assert 1 not in tokenizer.encode(b"aabc").tolist()


@pytest.mark.parametrize("kind", ["characters", "bpe", "wordpiece"])
def test_a_tokenizer_comes_back_from_a_folder(kind, tmp_path):
    tokenizer = learned(kind)
    tokenizer.save(tmp_path)
    again = tokenizers.make("bytes", list, 1, "", tmp_path)  # what is there goes before what is asked for
    assert again.key == tokenizer.key
    assert again.encode(POEM[:999].encode()).tolist() == tokenizer.encode(POEM[:999].encode()).tolist()


def test_all_at_once_is_one_by_one(reversible):
    texts = POEM.split("\n")[:50]
    for ids, text in zip(reversible.encode_all(texts), texts, strict=True):
        assert ids.tolist() == reversible.encode(text.encode()).tolist()


@pytest.mark.spec(67)
def test_gpt2s_files_are_read_and_verified(tmp_path, monkeypatch):
    """Two files as OpenAI publishes them: the numbers of tokens, and pairs in the order in which they join."""
    letters = {name: number for number, name in enumerate(["a", "b", "Ġ", "ab", "Ġab"])}
    (tmp_path / "encoder.json").write_text(json.dumps(letters))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\na b\nĠ ab\n")
    with pytest.raises(ValueError, match=r"encoder\.json is not encoder\.json of gpt2_bpe"):
        tokenizers.gpt2(str(tmp_path))
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}
    monkeypatch.setitem(named.NAMED, "gpt2_bpe", (Form(sums, "https://home/"),))
    tokenizer = tokenizers.gpt2(str(tmp_path))
    assert tokenizer.encode(b"ab aba").tolist() == [3, 4, 0]
    assert tokenizer.sizes.tolist() == [1, 1, 1, 2, 3]
    assert tokenizer.special("[CLS]") is None


def test_gpt2s_files_must_be_there(tmp_path):
    with pytest.raises(ValueError, match=r"does not have the files of gpt2_bpe: put there .*vocab\.bpe"):
        tokenizers.gpt2(str(tmp_path))
    with pytest.raises(ValueError, match=r"task\.tokenizer_files=/nowhere is not a folder"):
        tokenizers.gpt2("/nowhere")


def test_a_character_that_was_not_learned_is_named():
    with pytest.raises(
        ValueError, match=r"the character 'ß' is not in the text learned from; use task\.tokenizer=bytes"
    ):
        Characters("abc").encode("aß".encode())


@pytest.mark.parametrize("kind, vocabulary", [("bpe", 261), ("wordpiece", 5)])
def test_a_vocabulary_too_small_to_learn_is_refused(kind, vocabulary):
    with pytest.raises(ValueError, match=rf"task\.vocabulary={vocabulary} leaves no room to learn {kind}"):
        learned(kind, vocabulary=vocabulary)


@pytest.mark.parametrize("kind", ["characters", "bpe", "wordpiece"])
def test_what_a_run_learned_is_not_learned_anew(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    asked = (kind, lambda: ["some words"], 300, "mark", tmp_path)
    assert make(*asked).kind == kind  # a saved model's, which may never have had one
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no \w+.json, which says what its tokens mean; bring the file back"):
        make(*asked)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizers.load(tmp_path)
    assert np.array_equal(tokenizers.Bytes().encode(b"ab"), [97, 98])


def test_what_was_learned_from_these_texts_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path))
    first = make("bpe", lambda: [POEM], 300, "poem")
    assert make("bpe", lambda: pytest.fail("learned again"), 300, "poem").key == first.key
    assert make("bpe", lambda: [POEM], 310, "poem").vocabulary == 310
    assert make("bpe", lambda: ["other " * 99], 300, "other").key != first.key
