"""The text of a sequence, piece by piece: whole characters, and nothing from a stop string on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from everyformer.data.tokenizer import Tokenizer

LEAD = 8  # tokens of the prompt that are decoded with the first new ones, which may depend on them
LONGEST = 4  # bytes of a character
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@dataclass
class TextStream:
    """Decodes the new tokens of a prompt.

    `push` returns the text that is complete and holds back what may be the beginning of a stop string. `stopped` is whether one
    was found; the text ends before it.
    """

    tokenizer: Tokenizer
    prompt: Sequence[int]
    stops: Sequence[str] = ()
    held: str = ""
    length: int = 0  # of the text so far, with what is held back
    stopped: bool = False
    ids: list[int] = field(default_factory=list)
    start: int = 0  # of the tokens that are decoded again, as context
    done: int = 0  # tokens whose text was complete
    known: int = 0  # characters of the text from `start` on that were returned

    def __post_init__(self) -> None:
        self.ids = self._lead()
        self.done, self.known = len(self.ids), len(self.tokenizer.decode(self.ids))

    def _lead(self) -> list[int]:
        """Returns the last tokens of the prompt, from the beginning of a character on.

        A tokenizer with tokens for single bytes decodes a row of them together, so that one half of a character spoils the others.
        """
        for length in range(LEAD, LEAD + LONGEST):
            if not self.tokenizer.decode(self.prompt[-length:]).startswith(INCOMPLETE):
                return list(self.prompt[-length:])
        return list(self.prompt[-LEAD:])

    def push(self, token: int) -> str:
        """Returns the text that is now certain."""
        self.ids.append(token)
        return self._release(self._decoded(final=False), final=False)

    def finish(self) -> str:
        """Returns the rest of the text, at the end of the sequence."""
        return "" if self.stopped else self._release(self._decoded(final=True), final=True)

    def _decoded(self, final: bool) -> str:
        """Returns the text that is new and complete. While its end is marks for incomplete bytes, more bytes may change them."""
        text = self.tokenizer.decode(self.ids[self.start :])
        marks = 0 if final else len(text) - len(text.rstrip(INCOMPLETE))
        if marks and len(self.ids) - self.done < LONGEST:
            return ""
        end = len(text) - min(marks, LONGEST - 1)
        new, self.known = text[self.known : end], max(self.known, end)
        if not marks:  # the next token is decoded with these for its context
            self.start, self.done = self.done, len(self.ids)
            self.known = len(self.tokenizer.decode(self.ids[self.start :]))
        return new

    def _release(self, text: str, final: bool) -> str:
        self.length += len(text)
        whole = self.held + text
        found = [at for stop in self.stops if (at := whole.find(stop)) >= 0]
        if found:
            self.stopped, self.held = True, ""
            self.length -= len(whole) - min(found)
            return whole[: min(found)]
        keep = 0 if final else max((_overlap(whole, stop) for stop in self.stops), default=0)
        self.held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest end of the text with which the stop string begins."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-size:])), 0)


def token_text(tokenizer: Tokenizer, token: int) -> str:
    """Returns a token as text; one that is a part of a character by its bytes, as OpenAI's service does."""
    text = tokenizer.decode([token])
    if INCOMPLETE not in text or tokenizer.kind != "bytes":
        return text
    return f"bytes:\\x{token:02x}"
