"""Text to learn from: a file, a folder, records, standard input, a named set, or the embedded Shakespeare.

Text is kept as bytes. A plain file is mapped, not read; packed and joined ones are written once into the cache folder
and mapped from there, so a corpus may be larger than memory. Splits are those that the names of the files tell (train.txt,
valid.txt, test.txt); without them the first part is for training and the rest for validation.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everyformer.data.files import (
    Raw,
    cache_folder,
    decoded,
    digest,
    existing,
    files_in,
    fingerprint,
    identity,
    mapped,
    split_of,
    whole,
)
from everyformer.data.named import find, name_of
from everyformer.data.records import is_records, texts
from everyformer.data.reviews import reviews

__all__ = ["Text", "cache_folder", "open_text"]

PIECE = 1 << 16  # bytes that are decoded at a time
LOOK = 1 << 14  # how far a good place to cut is looked for
ONE = np.zeros(1, dtype=np.int64)  # where the documents of a text begin that is one document
SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\n\r\f\v", dtype=np.uint8))


@dataclass(frozen=True)
class Text:
    """Bytes by split ("train", "valid", perhaps "test"), where documents begin in them, and a fingerprint of all."""

    name: str
    splits: dict[str, Raw]
    starts: dict[str, NDArray[np.int64]]
    fingerprint: str

    def pieces(self, split: str, start: int = 0, end: int | None = None, size: int | None = None) -> Iterator[str]:
        """The text from `start` to `end` in pieces of about `size` bytes.

        They are cut where no tokenizer joins what is on both sides, as far as there is such a place. A character cut in two
        by the ends of the split is left out.
        """
        raw, size = self.splits[split], PIECE if size is None else size
        end = _before(raw, len(raw) if end is None else end)
        start = _after(raw, start)
        while start < end:
            stop = end if end - start <= size else _cut(raw[:end], start + size, or_end=True)
            yield decoded(raw[start:stop].tobytes(), self.name, start)
            start = stop


def open_text(data: str | None, shares: tuple[float, ...] = (0.9, 0.1), column: str | None = None) -> Text:
    """The text that `data` names. `column` is that of records (JSON lines, CSV)."""
    name = name_of(data)
    if name == "enwik8":
        raw = mapped(find(name, data)["enwik8"])
        million = 1_000_000
        own = {"train": raw[: 90 * million], "valid": raw[90 * million : 95 * million], "test": raw[95 * million :]}
        return _text(name, {split: (part, ONE) for split, part in own.items()}, shares)
    if name == "imdb":
        kept = find(name, data)
        key, found = digest(*map(identity, kept.values())), reviews(kept)
        parts = {split: _joined(f"{key} {split}", (_bytes(text) for text, _ in found[split])) for split in found}
        return _text(name, parts, shares)
    if name is not None:
        raise ValueError(f"{name} is not a text; give a file or a folder of text, or enwik8 or imdb")
    if data is None:
        with resources.as_file(resources.files("everyformer.data") / "embedded" / "shakespeare.txt.xz") as file:
            raw = mapped(file)
        return _text("the embedded Shakespeare", {"train": (raw, ONE)}, shares)
    if data == "-":
        raw = _standard_input()
        return _text("standard input", {"train": (raw, ONE)}, shares)
    path = existing(data)
    if path.is_file():
        return _text(str(path), {"train": _opened([path], column)}, shares)
    files = files_in(path)
    by_split: dict[str, list[Path]] = {}
    for one in files:
        by_split.setdefault(split_of(one) or "", []).append(one)
    if "train" not in by_split or "" in by_split:
        by_split = {"train": files}
    return _text(str(path), {split: _opened(some, column) for split, some in by_split.items()}, shares)


def _opened(files: list[Path], column: str | None) -> tuple[Raw, NDArray[np.int64]]:
    """The text of some files, each (or each of its records) a document."""
    if len(files) == 1 and not is_records(files[0]):
        raw = mapped(files[0])
        return raw, ONE

    def documents() -> Iterator[Raw]:
        for file in files:
            if is_records(file):
                yield from map(_bytes, texts(file, column))
            else:
                yield mapped(file)

    return _joined(digest(column, *map(identity, files)), documents())


def _bytes(text: str) -> Raw:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _joined(key: str, documents: Iterable[Raw]) -> tuple[Raw, NDArray[np.int64]]:
    """Documents one after the other with a line end between them, kept in the cache folder; and where each begins."""
    target = cache_folder() / f"{digest('joined', key)}.text"
    if not target.exists():
        starts: list[int] = []
        with whole(target) as file:
            for document in documents:
                if len(document):
                    starts.append(file.tell())
                    file.write(document.data)
                    file.write(b"\n")
            with whole(target.with_suffix(".starts")) as other:  # first: where the text is, its starts are
                np.save(other, np.array(starts, dtype=np.int64))
    return mapped(target), np.load(target.with_suffix(".starts"))


def _standard_input() -> Raw:
    """What comes in, kept in a file without a name for as long as it is used."""
    with tempfile.TemporaryFile(dir=cache_folder()) as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        file.flush()
        return np.memmap(file, dtype=np.uint8, mode="r") if file.tell() else np.empty(0, np.uint8)


def _text(name: str, parts: dict[str, tuple[Raw, NDArray[np.int64]]], shares: tuple[float, ...]) -> Text:
    for raw, _ in parts.values():
        if len(raw) == 0:
            more = "; a run that began from it needs the same text again" if name == "standard input" else ""
            raise ValueError(f"{name} is empty; give some text{more}")
    marks = digest(*(f"{split} {fingerprint(raw)}" for split, (raw, _) in parts.items()))
    if "valid" not in parts:
        raw, starts = parts.pop("train")
        ends = [0, *(_cut(raw, round(len(raw) * sum(shares[: n + 1]))) for n in range(len(shares) - 1)), len(raw)]
        names = ("train", "valid", "test")[: len(shares)]
        own = {split: (raw[a:b], _within(starts, a, b)) for split, (a, b) in zip(names, pairwise(ends), strict=True)}
        parts = own | parts
    splits = {split: raw for split, (raw, _) in parts.items()}
    return Text(name, splits, {split: starts for split, (_, starts) in parts.items()}, marks)


def _within(starts: NDArray[np.int64], a: int, b: int) -> NDArray[np.int64]:
    """The starts in a part of a text; the part's own beginning is one."""
    found = starts[(starts > a) & (starts < b)] - a
    return np.concatenate(([0], found)).astype(np.int64)


def _cut(raw: Raw, at: int, or_end: bool = False) -> int:
    """A place near and not before `at` where text can be cut: after a single line end, any line end, or any character.

    With `or_end` the end of the text, if it is near, goes before all but the first.
    """
    if at >= len(raw):
        return len(raw)
    near = np.asarray(raw[max(0, at - 2) : at + LOOK])
    skipped = at - max(0, at - 2)
    line = near[1:-1] == 10
    single = line & ~SPACE[near[:-2]] & ~SPACE[near[2:]]
    for good in (single, line):
        places = np.flatnonzero(good) + 2  # after the line end
        places = places[places >= skipped]
        if len(places):
            return at - skipped + int(places[0])
        if or_end and at + LOOK >= len(raw):
            return len(raw)
    return _after(raw, at)


def _after(raw: Raw, at: int) -> int:
    """The first place from `at` on where a character begins, if one does within four bytes."""
    return next((n for n in range(at, min(at + 4, len(raw))) if raw[n] & 0xC0 != 0x80), at)


def _before(raw: Raw, end: int) -> int:
    """The end of the last whole character before `end`."""
    for n in range(end - 1, max(end - 5, -1), -1):
        if raw[n] & 0xC0 != 0x80:  # the last character begins here
            lead = int(raw[n])
            length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return n if n + length > end else end
    return end
