"""Streams of tokens: a text encoded piece by piece into files of the cache folder, and mapped from there.

Nothing here ever holds a whole text in memory, so a corpus may be larger than that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import cache_folder, digest, whole
from everyformer.data.text import Text
from everyformer.data.tokenizer import Ids, Tokenizer

T = TypeVar("T")
TOGETHER = 256  # pieces, or 16 times as many sentences, that are encoded at a time
SENTENCE = re.compile(r"(?<=[.!?])['\")\]]*\s+")


def tokens(text: Text, split: str, tokenizer: Tokenizer) -> Ids:
    """The tokens of a split. Bytes are the text itself."""
    if tokenizer.key == "bytes":
        return text.splits[split]
    kind = _kind(tokenizer)
    target = cache_folder() / f"{digest('tokens', text.fingerprint, split, tokenizer.key)}.tokens"
    if not target.exists():
        with whole(target) as file:
            for pieces in groups(text.pieces(split), TOGETHER):
                for ids in tokenizer.encode_all(pieces):
                    file.write(ids.astype(kind).tobytes())
    return _numbers(target, kind)


@dataclass(frozen=True)
class Sentences:
    """Tokens of sentences one after the other, and of documents: D documents of S sentences of N tokens."""

    token_N: Ids
    begin_S: NDArray[np.int64]  # where each sentence begins among the tokens; one more for the end
    first_D: NDArray[np.int64]  # the number of each document's first sentence; one more for the end

    def __len__(self) -> int:
        return len(self.begin_S) - 1

    def document(self, sentence: int) -> tuple[int, int]:
        """The first sentence of the document of a sentence, and the one after its last."""
        number = int(np.searchsorted(self.first_D, sentence, side="right"))
        return int(self.first_D[number - 1]), int(self.first_D[number])

    def within(self, sentence: int, room: int, at_least: int = 1) -> int:
        """The end of the run of whole sentences from this one on that has at most `room` tokens, or so many sentences."""
        end = int(np.searchsorted(self.begin_S, self.begin_S[sentence] + room, side="right")) - 1
        return min(max(end, sentence + at_least), self.document(sentence)[1])


def sentences(text: Text, split: str, tokenizer: Tokenizer, blank: bool = False) -> Sentences:
    """The sentences of a split: lines, cut where one ends in . ! or ?. With `blank` a blank line ends a document."""
    key, kind = digest("sentences", text.fingerprint, split, tokenizer.key, blank), _kind(tokenizer)
    names = ("tokens", "begins", "firsts")
    targets = [cache_folder() / f"{key}.{name}" for name in names]
    if not all(target.exists() for target in targets):
        with ExitStack() as stack:
            file, begins, firsts = (stack.enter_context(whole(target)) for target in targets)
            place = number = 0
            for some in groups(_sentences(text, split, blank), TOGETHER * 16):
                found = tokenizer.encode_all([sentence for sentence, _ in some])
                for ids, (_, first) in zip(found, some, strict=True):
                    if first:
                        firsts.write(np.int64(number).tobytes())
                    if len(ids):
                        begins.write(np.int64(place).tobytes())
                        file.write(ids.astype(kind).tobytes())
                        place, number = place + len(ids), number + 1
            begins.write(np.int64(place).tobytes())
            firsts.write(np.int64(number).tobytes())
    token_N, begin_S, first_D = (
        _numbers(target, one) for target, one in zip(targets, (kind, "<i8", "<i8"), strict=True)
    )
    return Sentences(token_N, begin_S, np.unique(first_D))


def _sentences(text: Text, split: str, blank: bool) -> Iterator[tuple[str, bool]]:
    """Each sentence, and whether a document begins with it."""
    starts = [*text.starts[split].tolist(), len(text.splits[split])]
    for start, end in pairwise(starts):
        first = True
        for piece in text.pieces(split, start, end):
            for line in piece.splitlines():
                if blank and not line.strip():
                    first = True
                for sentence in SENTENCE.split(line):
                    if sentence.strip():
                        yield sentence.strip(), first
                        first = False


def groups(things: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(things)
    while group := list(islice(rest, size)):
        yield group


def _kind(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"


def _numbers(path: Any, kind: str) -> NDArray[Any]:
    return np.memmap(path, dtype=kind, mode="r") if path.stat().st_size else np.empty(0, kind)
