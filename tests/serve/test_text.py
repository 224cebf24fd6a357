"""Text that comes in pieces is the text that comes at once."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from everyformer.data.subwords import HuggingFaceTokenizer
from everyformer.data.tokenizer import ByteTokenizer, TokenIds
from everyformer.serve.text import TextStream, token_text

WORDS = st.text("ab<|>é\N{GRINNING FACE} \n", max_size=24)


def streamed(text: str, stops: tuple[str, ...], prompt: str = "p") -> tuple[list[str], TextStream]:
    stream = TextStream(ByteTokenizer(), list(prompt.encode()), stops)
    pieces = []
    for token in text.encode():
        pieces.append(stream.push(token))
        if stream.stopped:
            return pieces, stream
    return [*pieces, stream.finish()], stream


@given(WORDS, st.lists(st.text("ab<|é", min_size=1, max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_the_pieces_are_the_text_before_the_first_stop_string_that_is_complete(text, stops):
    pieces, stream = streamed(text, tuple(stops))
    complete = next((end for end in range(len(text) + 1) if any(text[:end].endswith(one) for one in stops)), None)
    found = [at for one in stops if (at := text[:complete].find(one)) >= 0]
    expected = text[: min(found, default=None)]
    assert "".join(pieces) == expected and stream.length == len(expected)
    assert stream.stopped == (complete is not None)


@given(st.lists(st.integers(0, 255), max_size=24))
@settings(max_examples=100, deadline=None)
def test_bytes_that_are_no_text_are_released_too(ids):
    stream = TextStream(ByteTokenizer(), [65])
    pieces = [stream.push(token) for token in ids]
    text = "".join([*pieces, stream.finish()])
    assert text == ByteTokenizer().decode(ids)


def subwords(decoder: str) -> HuggingFaceTokenizer:
    """A small BPE tokenizer over bytes, as GPT-2's, or over words that begin with a mark, as Llama's."""
    inner = Tokenizer(models.BPE(byte_fallback=decoder == "marks", unk_token=None if decoder == "bytes" else "<0x00>"))
    if decoder == "bytes":
        inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        special, alphabet = [], pre_tokenizers.ByteLevel.alphabet()
    else:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        inner.decoder = decoders.Sequence(steps)
        special, alphabet = [f"<0x{byte:02X}>" for byte in range(256)], ["▁"]
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=[], show_progress=False)
    inner.train_from_iterator(["a b <ab> |é| ab ab < b"] * 3, trainer)
    if special:
        tree = json.loads(inner.to_str())
        vocabulary = dict.fromkeys([*special, *tree["model"]["vocab"]])
        tree["model"]["vocab"] = {name: index for index, name in enumerate(vocabulary)}
        inner = Tokenizer.from_str(json.dumps(tree))
    return HuggingFaceTokenizer(inner)


@pytest.mark.parametrize("decoder", ["bytes", "marks"])
def test_the_pieces_of_subwords_are_the_decoded_text(decoder):
    tokenizer = subwords(decoder)

    @given(WORDS.filter(bool), WORDS)
    @example("\N{GRINNING FACE}\n\N{GRINNING FACE}", "\n")  # the last 8 tokens begin inside the first face
    @settings(max_examples=100, deadline=None)
    def check(before, after):
        prompt, whole = (tokenizer.encode(text.encode()).tolist() for text in (before, before + after))
        if whole[: len(prompt)] != prompt:  # a token goes over the boundary
            return
        stream = TextStream(tokenizer, prompt)
        pieces = [stream.push(token) for token in whole[len(prompt) :]]
        assert tokenizer.decode(prompt) + "".join([*pieces, stream.finish()]) == tokenizer.decode(whole)

    check()


def test_a_token_that_is_a_part_of_a_character_is_named_by_its_byte():
    assert token_text(ByteTokenizer(), 65) == "A" and token_text(ByteTokenizer(), 0xC3) == "bytes:\\xc3"
    assert token_text(TokenIds(9), 3) == "3 "
