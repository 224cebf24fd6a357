"""Text that comes in pieces is the text that comes at once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_a_token_that_is_a_part_of_a_character_is_named_by_its_byte():
    assert token_text(ByteTokenizer(), 65) == "A" and token_text(ByteTokenizer(), 0xC3) == "bytes:\\xc3"
    assert token_text(TokenIds(9), 3) == "3 "
