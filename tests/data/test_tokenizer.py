"""Tokenizers restore the text, count its bytes, and are trained deterministically."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from everyformer.data import tokenizer as tokenizers
from everyformer.data.synthetic import shakespeare
from everyformer.data.tokenizer import SPECIAL, CharacterTokenizer, load_or_train, train

POEM = shakespeare()[:60_000]
ODD = "naïve café — ‘quotes’ 日本語 🙂\n\n\ttabs  and   spaces\r\n"


def trained(kind, text=POEM, vocabulary=600):
    return (
        train(kind, lambda: [text], vocabulary)
        if kind in ("bpe", "wordpiece")
        else load_or_train(kind, lambda: [text], 0, "")
    )


@pytest.fixture(scope="module", params=["bytes", "characters", "bpe"])
def reversible(request):
    return trained(request.param, POEM + ODD)


@pytest.mark.spec(59, 67)
@pytest.mark.parametrize("text", [POEM[:5000], ODD, "", "x"])
def test_decoding_restores_the_text_and_bytes_per_token_add_up(reversible, text):
    ids = reversible.encode(text.encode())
    assert reversible.decode(ids.tolist()) == text
    assert int(reversible.bytes_per_token[ids].sum()) == len(text.encode())
    assert len(reversible.bytes_per_token) == reversible.vocabulary


@pytest.mark.spec(66, 67)
@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_training_is_deterministic(kind):
    """The library's trainer numbers pieces in the order of a hash table, which differs each time."""
    tokenizers = [trained(kind) for _ in range(4)]
    assert len({tokenizer.key for tokenizer in tokenizers}) == 1
    assert len({tokenizer.inner.to_str() for tokenizer in tokenizers}) == 1


@pytest.mark.spec(66)
def test_wordpiece_tokenizes_as_bert():
    """Words are lowercased and lose accents, pieces inside words start with ##, unknown characters are [UNK]."""
    tokenizer = train("wordpiece", lambda: ["walk walking walked talk talking talked " * 50 + POEM], 900)
    assert [tokenizer.special_id(name) for name in SPECIAL] == [0, 1, 2, 3, 4]
    names = [tokenizer.inner.id_to_token(number) for number in tokenizer.encode("WALKING, Wálking".encode())]
    assert names == ["walking", ",", "walking"] or names[:2] == ["walk", "##ing"]
    assert tokenizer.encode("日".encode()).tolist() == [1]
    assert tokenizer.bytes_per_token is None
    letters = tokenizer.encode(b"zzqx")
    assert len(letters) > 1 and all(
        tokenizer.inner.id_to_token(number).startswith("##") for number in letters[1:].tolist()
    )


def test_the_wordpiece_alphabet_is_limited(monkeypatch):
    monkeypatch.setattr(tokenizers, "MAX_ALPHABET", 3)
    tokenizer = train("wordpiece", lambda: ["aab aab abc " * 20 + "aad"], 100)
    assert tokenizer.encode(b"aad").tolist() == [1]
    assert 1 not in tokenizer.encode(b"aabc").tolist()


@pytest.mark.parametrize("kind", ["characters", "bpe", "wordpiece"])
def test_a_saved_tokenizer_is_loaded_from_its_folder(kind, tmp_path):
    tokenizer = trained(kind)
    tokenizer.save(tmp_path)
    loaded = tokenizers.load_or_train(
        "bytes", list, 1, "", tmp_path
    )  # the saved tokenizer has precedence over the kind
    assert loaded.key == tokenizer.key
    assert loaded.encode(POEM[:999].encode()).tolist() == tokenizer.encode(POEM[:999].encode()).tolist()


def test_encode_all_equals_encode(reversible):
    texts = POEM.split("\n")[:50]
    for ids, text in zip(reversible.encode_all(texts), texts, strict=True):
        assert ids.tolist() == reversible.encode(text.encode()).tolist()


SENTENCE = 'The people of the world have been in this place for over 20 years, and they don\'t know what the name is.\n\n"What?" he said.'
PUBLISHED = [
    464, 661, 286, 262, 995, 423, 587, 287, 428, 1295, 329, 625, 1160, 812, 11, 290, 484, 836, 470, 760, 644, 262, 1438, 318, 13,
    198, 198, 1, 2061, 1701, 339, 531, 13,
]  # the ids of OpenAI's encoder  # fmt: skip


@pytest.mark.spec(67)
def test_gpt2_files_encode_as_published(gpt2_files):
    """The first 2,000 merges of OpenAI's vocab.bpe, with their ids: a text whose tokens are all among them has its published ids."""
    tokenizer = tokenizers.load_gpt2(str(gpt2_files))
    assert tokenizer.encode(SENTENCE.encode()).tolist() == PUBLISHED
    assert tokenizer.decode(PUBLISHED) == SENTENCE
    assert tokenizer.bytes_per_token[PUBLISHED].sum() == len(SENTENCE.encode())
    odd = "naïve – 日本\t\r\n  x"  # every text can be encoded: bytes are tokens too
    assert tokenizer.decode(tokenizer.encode(odd.encode()).tolist()) == odd
    assert tokenizer.special_id("[CLS]") is None


def test_gpt2_files_are_verified():
    with pytest.raises(ValueError, match=r"encoder\.json is not encoder\.json of gpt2_bpe"):
        tokenizers.load_gpt2(str(Path(__file__).parent / "gpt2_excerpt"))


def test_missing_gpt2_files_raise(tmp_path):
    with pytest.raises(ValueError, match=r"does not have the files of gpt2_bpe; put .*vocab\.bpe.* there"):
        tokenizers.load_gpt2(str(tmp_path))
    with pytest.raises(ValueError, match=r"task\.tokenizer_files=/nowhere is not a folder"):
        tokenizers.load_gpt2("/nowhere")


def test_an_unknown_character_raises():
    with pytest.raises(ValueError, match=r"the character 'ß' is not in the training text; use task\.tokenizer=bytes"):
        CharacterTokenizer("abc").encode("aß".encode())


@pytest.mark.parametrize("kind, vocabulary", [("bpe", 261), ("wordpiece", 5)])
def test_a_vocabulary_that_is_too_small_raises(kind, vocabulary):
    with pytest.raises(ValueError, match=rf"task\.vocabulary={vocabulary} is too small for {kind}"):
        trained(kind, vocabulary=vocabulary)


@pytest.mark.parametrize("kind", ["characters", "bpe", "wordpiece"])
def test_a_missing_tokenizer_of_a_run_raises(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    arguments = (kind, lambda: ["some words"], 300, "fingerprint", tmp_path)
    assert load_or_train(*arguments).kind == kind  # not a run's folder: a saved model may have no tokenizer
    (tmp_path / "recipe.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"has no \w+.json, the tokenizer that the run was trained with; restore the file"
    ):
        load_or_train(*arguments)


def test_a_damaged_tokenizer_raises(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is not a tokenizer"):
        tokenizers.load(tmp_path)
    assert np.array_equal(tokenizers.ByteTokenizer().encode(b"ab"), [97, 98])


def test_a_trained_tokenizer_is_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path))
    first = load_or_train("bpe", lambda: [POEM], 300, "poem")
    assert load_or_train("bpe", lambda: pytest.fail("trained again"), 300, "poem").key == first.key
    assert load_or_train("bpe", lambda: [POEM], 310, "poem").vocabulary == 310
    assert load_or_train("bpe", lambda: ["other " * 99], 300, "other").key != first.key
