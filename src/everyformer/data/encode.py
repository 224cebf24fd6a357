"""Encodes a text into token ids, chunk by chunk, into memory-mapped files of the cache folder.

The whole text is never in memory, so a corpus may be larger than that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import atomic_write, cache_folder, digest
from everyformer.data.text import Text
from everyformer.data.tokenizer import Ids, Tokenizer

T = TypeVar("T")
COUNTED = 1 << 22  # tokens whose bytes are summed at a time
CHUNKS_PER_BATCH = 256  # chunks, or a sixteenth of the sentences, that are encoded in one call of the tokenizer
SENTENCE_END = re.compile(r"(?<=[.!?])['\")\]]*\s+")


def encode_split(text: Text, split: str, tokenizer: Tokenizer) -> Ids:
    """Returns the token ids of a split. With the byte tokenizer, and of data that are token ids, these are the data themselves."""
    if tokenizer.key in ("bytes", "ids"):
        return text.splits[split]
    dtype = _dtype(tokenizer)
    target = cache_folder() / f"{digest('tokens', text.fingerprint, split, tokenizer.key)}.tokens"
    if not target.exists():
        with atomic_write(target) as file:
            for chunks in batched(text.chunks(split), CHUNKS_PER_BATCH):
                for ids in tokenizer.encode_all(chunks):
                    file.write(ids.astype(dtype).tobytes())
    return _memory_map(target, dtype)


def token_offsets(token_N: Ids, bytes_per_token: NDArray[Any], start_D: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index of the first token at or after each byte offset; `start_D` is sorted."""
    found, size = np.zeros(len(start_D), np.int64), 0  # bytes of the tokens so far
    for start in range(0, len(token_N), COUNTED):
        end_N = size + np.cumsum(bytes_per_token[np.asarray(token_N[start : start + COUNTED])], dtype=np.int64)
        later_D = start_D > size  # the first token of these offsets comes later
        found[later_D] = start + np.searchsorted(end_N, start_D[later_D]) + 1
        size = int(end_N[-1])
    return np.unique(found[found < len(token_N)])


@dataclass(frozen=True)
class Sentences:
    """The N tokens of S sentences in D documents, concatenated."""

    token_N: Ids
    start_S: NDArray[np.int64]  # index of each sentence's first token, and N at the end
    first_D: NDArray[np.int64]  # index of each document's first sentence, and S at the end

    def __len__(self) -> int:
        return len(self.start_S) - 1

    def document_of(self, sentence: int) -> tuple[int, int]:
        """Returns the first sentence of the document that holds `sentence`, and the one after its last."""
        document = int(np.searchsorted(self.first_D, sentence, side="right"))
        return int(self.first_D[document - 1]), int(self.first_D[document])

    def end_within(self, sentence: int, max_tokens: int, at_least: int = 1) -> int:
        """Returns the end of the longest run of sentences from `sentence` on, in its document, of at most `max_tokens` tokens.

        The run has at least `at_least` sentences if the document has, even where they are longer.
        """
        end = int(np.searchsorted(self.start_S, self.start_S[sentence] + max_tokens, side="right")) - 1
        return min(max(end, sentence + at_least), self.document_of(sentence)[1])


def encode_sentences(text: Text, split: str, tokenizer: Tokenizer, blank: bool = False) -> Sentences:
    """Returns the encoded sentences of a split. A line is split after . ! and ?; with `blank` a blank line ends a document."""
    key, dtype = digest("sentences", text.fingerprint, split, tokenizer.key, blank), _dtype(tokenizer)
    targets = [cache_folder() / f"{key}.{name}" for name in ("tokens", "starts", "documents")]
    if not all(target.exists() for target in targets):
        with ExitStack() as stack:
            token_file, start_file, first_file = (stack.enter_context(atomic_write(target)) for target in targets)
            tokens = sentences = 0  # written so far
            for batch in batched(_sentences(text, split, blank), CHUNKS_PER_BATCH * 16):
                encoded = tokenizer.encode_all([sentence for sentence, _ in batch])
                for ids, (_, starts_document) in zip(encoded, batch, strict=True):
                    if starts_document:
                        first_file.write(np.int64(sentences).tobytes())
                    if len(ids):
                        start_file.write(np.int64(tokens).tobytes())
                        token_file.write(ids.astype(dtype).tobytes())
                        tokens, sentences = tokens + len(ids), sentences + 1
            start_file.write(np.int64(tokens).tobytes())
            first_file.write(np.int64(sentences).tobytes())
    token_N, start_S, first_D = map(_memory_map, targets, (dtype, "<i8", "<i8"))
    return Sentences(token_N, start_S, np.unique(first_D))


def _sentences(text: Text, split: str, blank: bool) -> Iterator[tuple[str, bool]]:
    """Yields each sentence, and whether it is the first of a document."""
    starts = [*text.starts[split].tolist(), len(text.splits[split])]
    for start, end in pairwise(starts):
        first = True
        for chunk in text.chunks(split, start, end):
            for line in chunk.splitlines():
                if blank and not line.strip():
                    first = True
                for sentence in SENTENCE_END.split(line):
                    if sentence.strip():
                        yield sentence.strip(), first
                        first = False


def batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Yields lists of `size` items; the last may be shorter."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _dtype(tokenizer: Tokenizer) -> str:
    return "<u2" if tokenizer.vocabulary <= 1 << 16 else "<u4"


def _memory_map(path: Path, dtype: str) -> NDArray[Any]:
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
