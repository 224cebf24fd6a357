"""Text to learn from: a file, a folder, records, standard input, a named set, or the embedded Shakespeare.

Text is kept as bytes. A plain file is mapped, not read; packed and joined ones are written once into the cache folder
and mapped from there, so a corpus may be larger than memory. Splits are those that the names of the files tell (train.txt,
valid.txt, test.txt); without them the first part is for training and the rest for validation.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import pairwise
from operator import itemgetter
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
SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\n\r\f\v", dtype=np.uint8))
Files = list[tuple[int, str]]  # where each file begins, before 0 in a part that begins within it; and its name


@dataclass(frozen=True)
class Text:
    """Bytes by split ("train", "valid", perhaps "test"), where documents and files begin in them.

    The fingerprint is of all of it, the cuts between the splits too: what is made of a text is kept under it.
    """

    name: str
    splits: dict[str, Raw]
    starts: dict[str, NDArray[np.int64]]
    fingerprint: str
    files: dict[str, Files]

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
            yield "".join(self._decoded(split, start, stop))
            start = stop

    def _decoded(self, split: str, start: int, stop: int) -> Iterator[str]:
        """A piece file by file: what is not text is in one of them, and each may begin with a byte order mark."""
        raw, files = self.splits[split], self.files[split]
        first = bisect_right(files, start, key=itemgetter(0)) - 1
        last = bisect_right(files, stop - 1, key=itemgetter(0))
        ends = [*(begin for begin, _ in files[first + 1 : last]), stop]
        for (begin, name), end in zip(files[first:last], ends, strict=True):
            yield decoded(raw[start:end].tobytes(), name, start - begin)
            start = end


@dataclass(frozen=True)
class Part:
    """A text that is not yet split, or one split of it."""

    raw: Raw
    starts: NDArray[np.int64]  # of documents
    files: Files

    def within(self, a: int, b: int) -> Part:
        """A part of the part; its own beginning is a document's."""
        starts = self.starts[(self.starts > a) & (self.starts < b)] - a
        files = [(begin - a, name) for begin, name in self.files if begin < b]
        return Part(self.raw[a:b], np.concatenate(([0], starts)).astype(np.int64), files)


def open_text(data: str | None, shares: tuple[float, ...] = (0.9, 0.1), column: str | None = None) -> Text:
    """The text that `data` names. `column` is that of records (JSON lines, CSV)."""
    name = name_of(data)
    if name == "enwik8":
        dump, million = _one(mapped(find(name, data)["enwik8"]), name), 1_000_000
        own = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
        return _text(name, {split: dump.within(a * million, b * million) for split, (a, b) in own.items()}, shares)
    if name == "imdb":
        kept = find(name, data)
        key, found = digest(*map(identity, kept.values())), reviews(kept)
        parts = {
            split: _joined(f"{key} {split}", [(name, (_bytes(text) for text, _ in found[split]))]) for split in found
        }
        return _text(name, parts, shares)
    if name is not None:
        raise ValueError(f"{name} is not a text; give a file or a folder of text, or enwik8 or imdb")
    if data is None:
        with resources.as_file(resources.files("everyformer.data") / "embedded" / "shakespeare.txt.xz") as file:
            raw = mapped(file)
        name = "the embedded Shakespeare"
        return _text(name, {"train": _one(raw, name)}, shares)
    if data == "-":
        name = "standard input"
        return _text(name, {"train": _one(_standard_input(), name)}, shares)
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


def _one(raw: Raw, name: str) -> Part:
    """A text that is one document."""
    return Part(raw, np.zeros(1, dtype=np.int64), [(0, name)])


def _opened(files: list[Path], column: str | None) -> Part:
    """The text of some files, each (or each of its records) a document."""
    if len(files) == 1 and not is_records(files[0]):
        return _one(mapped(files[0]), str(files[0]))

    def documents(file: Path) -> Iterator[Raw]:
        if is_records(file):
            yield from map(_bytes, texts(file, column))
        else:
            yield mapped(file)

    return _joined(digest(column, *map(identity, files)), [(str(file), documents(file)) for file in files])


def _bytes(text: str) -> Raw:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _joined(key: str, files: list[tuple[str, Iterable[Raw]]]) -> Part:
    """The documents of files one after the other with a line end between them, kept in the cache folder."""
    target = cache_folder() / f"{digest('joined files', key)}.text"
    if not target.exists():
        starts: list[int] = []
        begins: list[int] = []
        with whole(target) as file:
            for _, documents in files:
                begins.append(file.tell())
                for document in documents:
                    if len(document):
                        starts.append(file.tell())
                        file.write(document.data)
                        file.write(b"\n")
            for suffix, places in ((".starts", starts), (".files", begins)):  # first: where the text is, these are
                with whole(target.with_suffix(suffix)) as other:
                    np.save(other, np.array(places, dtype=np.int64))
    begin_N = np.load(target.with_suffix(".files")).tolist()
    names = [name for name, _ in files]
    return Part(mapped(target), np.load(target.with_suffix(".starts")), list(zip(begin_N, names, strict=True)))


def _standard_input() -> Raw:
    """What comes in, kept in a file without a name for as long as it is used."""
    with tempfile.TemporaryFile(dir=cache_folder()) as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        file.flush()
        return np.memmap(file, dtype=np.uint8, mode="r") if file.tell() else np.empty(0, np.uint8)


def _text(name: str, parts: dict[str, Part], shares: tuple[float, ...]) -> Text:
    for part in parts.values():
        if len(part.raw) == 0:
            more = "; a run that began from it needs the same text again" if name == "standard input" else ""
            raise ValueError(f"{name} is empty; give some text{more}")
    if "valid" not in parts:
        train = parts.pop("train")
        raw = train.raw
        ends = [0, *(_cut(raw, round(len(raw) * sum(shares[: n + 1]))) for n in range(len(shares) - 1)), len(raw)]
        names = ("train", "valid", "test")[: len(shares)]
        parts = {split: train.within(a, b) for split, (a, b) in zip(names, pairwise(ends), strict=True)} | parts
    return Text(
        name,
        {split: part.raw for split, part in parts.items()},
        {split: part.starts for split, part in parts.items()},
        digest(*(f"{split} {fingerprint(part.raw)} {fingerprint(part.starts)}" for split, part in parts.items())),
        {split: part.files for split, part in parts.items()},
    )


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
