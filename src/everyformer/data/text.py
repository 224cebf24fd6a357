"""Opens text: a file, a folder, records, token ids, standard input, a named data set, or the embedded Shakespeare.

Text is stored as bytes. A plain file is memory-mapped; compressed and concatenated ones are written once to the cache folder and
mapped from there, so a corpus may be larger than memory. Files named train.txt, valid.txt and test.txt are those splits; without
them the beginning of the text is the training split and the rest is for validation.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from everyformer.data.datasets import dataset_files, dataset_name
from everyformer.data.files import (
    ByteArray,
    atomic_write,
    cache_folder,
    decode_utf8,
    digest,
    existing_path,
    file_identity,
    fingerprint,
    list_files,
    memory_map,
    split_from_name,
)
from everyformer.data.imdb import read_reviews
from everyformer.data.records import is_records, read_column
from everyformer.data.token_ids import has_token_ids, read_token_ids

__all__ = ["Text", "cache_folder", "open_text"]

CHUNK = 1 << 16  # bytes that are decoded at a time
SEARCH = 1 << 14  # bytes in which a line end is looked for to split at
SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\n\r\f\v", dtype=np.uint8))
Files = list[tuple[int, str]]  # offset (negative if the split starts inside the file) and name of each file


@dataclass(frozen=True)
class Text:
    """The bytes of each split ("train", "valid", perhaps "test"), and where documents and files start in them.

    The fingerprint covers the bytes and the split boundaries; cached encodings are stored under it.
    """

    name: str
    splits: dict[str, ByteArray]
    starts: dict[str, NDArray[np.int64]]
    fingerprint: str
    files: dict[str, Files]
    fingerprints: dict[str, str] = field(default_factory=dict)  # of each split

    @property
    def is_token_ids(self) -> bool:
        """Whether the data are token ids instead of the bytes of a text."""
        return any(raw.dtype != np.uint8 for raw in self.splits.values())

    def chunks(self, split: str, start: int = 0, end: int | None = None, size: int | None = None) -> Iterator[str]:
        """Yields the text from `start` to `end` in chunks of about `size` bytes.

        Chunks end after a line end, where no tokenizer merges what is on both sides, if there is one nearby. A character that the
        boundary of the split cuts in two is left out.
        """
        if self.is_token_ids:
            raise ValueError(f"{self.name} has token ids; only the tasks language, classify and regress read them")
        raw, size = self.splits[split], CHUNK if size is None else size
        end = _last_character_end(raw, len(raw) if end is None else end)
        start = _next_character(raw, start)
        while start < end:
            stop = end if end - start <= size else _split_point(raw[:end], start + size, or_end=True)
            yield "".join(self._decode(split, start, stop))
            start = stop

    def _decode(self, split: str, start: int, stop: int) -> Iterator[str]:
        """Decodes a chunk file by file: each file may start with a byte order mark, and an error names the file."""
        raw, files = self.splits[split], self.files[split]
        first = bisect_right(files, start, key=itemgetter(0)) - 1
        last = bisect_right(files, stop - 1, key=itemgetter(0))
        ends = [*(offset for offset, _ in files[first + 1 : last]), stop]
        for (offset, name), end in zip(files[first:last], ends, strict=True):
            yield decode_utf8(raw[start:end].tobytes(), name, start - offset)
            start = end


@dataclass(frozen=True)
class Section:
    """A text before it is split, or one split of it."""

    raw: ByteArray
    starts: NDArray[np.int64]  # of documents
    files: Files

    def slice(self, a: int, b: int) -> Section:
        """Returns the bytes a to b; they start a new document."""
        starts = self.starts[(self.starts > a) & (self.starts < b)] - a
        files = [(offset - a, name) for offset, name in self.files if offset < b]
        return Section(self.raw[a:b], np.concatenate(([0], starts)).astype(np.int64), files)


def open_text(data: str | None, fractions: tuple[float, ...] = (0.9, 0.1), column: str | None = None) -> Text:
    """Opens the text that `data` names: a path, "-", the name of a data set, or None for the embedded Shakespeare.

    `fractions` are the sizes of the splits where the data have none; `column` is the column of records (JSON lines, CSV).
    """
    name = dataset_name(data)
    if name == "enwik8":
        dump, million = _single_document(memory_map(dataset_files(name, data)["enwik8"]), name), 1_000_000
        bounds = {"train": (0, 90), "valid": (90, 95), "test": (95, 100)}
        sections = {split: dump.slice(a * million, b * million) for split, (a, b) in bounds.items()}
        return _split(name, sections, fractions)
    if name == "imdb":
        files = dataset_files(name, data)
        key, reviews = digest(*map(file_identity, files.values())), read_reviews(files)
        sections = {
            split: _concatenate(f"{key} {split}", [(name, (_to_bytes(text) for text, _ in rows))])
            for split, rows in reviews.items()
        }
        return _split(name, sections, fractions)
    if name is not None:
        raise ValueError(f"{name} is not a text; give a text file, a folder of text files, enwik8 or imdb")
    if data is None:
        with resources.as_file(resources.files("everyformer.data") / "embedded" / "shakespeare.txt.xz") as file:
            raw = memory_map(file)
        name = "the embedded Shakespeare"
        return _split(name, {"train": _single_document(raw, name)}, fractions)
    if data == "-":
        name = "standard input"
        return _split(name, {"train": _single_document(_read_standard_input(), name)}, fractions)
    return _open_path(existing_path(data), fractions, column)


def _open_path(path: Path, fractions: tuple[float, ...], column: str | None) -> Text:
    if path.is_file():
        return _split(str(path), {"train": _read_files([path], column)}, fractions)
    files = list_files(path)
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(split_from_name(file) or "", []).append(file)
    if "train" not in by_split or "" in by_split:
        by_split = {"train": files}
    return _split(str(path), {split: _read_files(some, column) for split, some in by_split.items()}, fractions)


def _single_document(raw: ByteArray, name: str) -> Section:
    return Section(raw, np.zeros(1, dtype=np.int64), [(0, name)])


def _read_files(files: list[Path], column: str | None) -> Section:
    """Returns the text of the files, or their token ids; each file, or each record of a file, is a document."""
    if has_token_ids(files[0], column):
        ids = [document for file in files for document in read_token_ids(file, column)]
        starts = np.cumsum([0, *map(len, ids[:-1])], dtype=np.int64)
        return Section(np.concatenate(ids), starts, [(0, str(files[0]))])
    if len(files) == 1 and not is_records(files[0]):
        return _single_document(memory_map(files[0]), str(files[0]))

    def documents(file: Path) -> Iterator[ByteArray]:
        if is_records(file):
            yield from map(_to_bytes, read_column(file, column))
        else:
            yield memory_map(file)

    return _concatenate(digest(column, *map(file_identity, files)), [(str(file), documents(file)) for file in files])


def _to_bytes(text: str) -> ByteArray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _concatenate(key: str, files: list[tuple[str, Iterable[ByteArray]]]) -> Section:
    """Writes the documents of the files to the cache folder, each followed by a line end."""
    target = cache_folder() / f"{digest('joined files', key)}.text"
    if not target.exists():
        starts: list[int] = []
        offsets: list[int] = []
        with atomic_write(target) as file:
            for _, documents in files:
                offsets.append(file.tell())
                for document in documents:
                    if len(document):
                        starts.append(file.tell())
                        file.write(document.data)
                        file.write(b"\n")
            for suffix, numbers in ((".starts", starts), (".files", offsets)):  # written before the text is renamed
                with atomic_write(target.with_suffix(suffix)) as other:
                    np.save(other, np.array(numbers, dtype=np.int64))
    offset_N = np.load(target.with_suffix(".files")).tolist()
    names = [name for name, _ in files]
    return Section(memory_map(target), np.load(target.with_suffix(".starts")), list(zip(offset_N, names, strict=True)))


def _read_standard_input() -> ByteArray:
    """Copies standard input into an anonymous file, which exists for as long as it is mapped."""
    with tempfile.TemporaryFile(dir=cache_folder()) as file:
        shutil.copyfileobj(sys.stdin.buffer, file, 1 << 20)
        file.flush()
        return np.memmap(file, dtype=np.uint8, mode="r") if file.tell() else np.empty(0, np.uint8)


def _split(name: str, sections: dict[str, Section], fractions: tuple[float, ...]) -> Text:
    """Splits the training section by `fractions` if there is no validation section."""
    for section in sections.values():
        if len(section.raw) == 0:
            more = "; a run that was trained on it needs the same text again" if name == "standard input" else ""
            raise ValueError(f"{name} is empty; give some text{more}")
    if "valid" not in sections:
        train = sections.pop("train")
        raw, count = train.raw, len(fractions)
        inner = (_split_point(raw, round(len(raw) * sum(fractions[: n + 1]))) for n in range(count - 1))
        bounds = pairwise([0, *inner, len(raw)])
        names = ("train", "valid", "test")[:count]
        sections = {split: train.slice(a, b) for split, (a, b) in zip(names, bounds, strict=True)} | sections
    fingerprints = {split: f"{fingerprint(one.raw)} {fingerprint(one.starts)}" for split, one in sections.items()}
    return Text(
        name,
        {split: section.raw for split, section in sections.items()},
        {split: section.starts for split, section in sections.items()},
        digest(*(f"{split} {one}" for split, one in fingerprints.items())),
        {split: section.files for split, section in sections.items()},
        {split: digest(one) for split, one in fingerprints.items()},
    )


def _split_point(raw: ByteArray, at: int, or_end: bool = False) -> int:
    """Returns an offset at or soon after `at` to split text at: after a single line end, else any line end, else any character.

    With `or_end` the end of the text, if it is near, is preferred to all but a single line end.
    """
    if at >= len(raw):
        return len(raw)
    if raw.dtype != np.uint8:  # token ids have no lines
        return at
    near = np.asarray(raw[max(0, at - 2) : at + SEARCH])
    skipped = at - max(0, at - 2)
    line_end = near[1:-1] == 10
    single = line_end & ~SPACE[near[:-2]] & ~SPACE[near[2:]]
    for candidate in (single, line_end):
        offsets = np.flatnonzero(candidate) + 2  # after the line end
        offsets = offsets[offsets >= skipped]
        if len(offsets):
            return at - skipped + int(offsets[0])
        if or_end and at + SEARCH >= len(raw):
            return len(raw)
    return _next_character(raw, at)


def _next_character(raw: ByteArray, at: int) -> int:
    """Returns the first offset from `at` on where a character starts, if one does within four bytes; else `at`."""
    return next((n for n in range(at, min(at + 4, len(raw))) if raw[n] & 0xC0 != 0x80), at)


def _last_character_end(raw: ByteArray, end: int) -> int:
    """Returns the end of the last whole character before `end`."""
    for n in range(end - 1, max(end - 5, -1), -1):
        if raw[n] & 0xC0 != 0x80:  # the first byte of the last character
            lead = int(raw[n])
            length = 1 if lead < 0xC0 else 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return n if n + length > end else end
    return end
