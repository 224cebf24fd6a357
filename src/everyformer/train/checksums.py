"""Checksums of the files that decide the result of a run: `SHA256SUMS` in its folder and in each of its checkpoints.

The format is that of `sha256sum`, so `sha256sum -c SHA256SUMS` in the folder checks it too. A name has two lines while its file
is being replaced; then either content is accepted.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from everyformer.data.files import checksum

FILE = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")

Checksums = Mapping[str, tuple[str, ...]]  # by the name of the file


def read_checksums(folder: Path) -> dict[str, tuple[str, ...]]:
    """Returns the checksums of a folder. Raises ValueError if they are missing or damaged."""
    path = folder / FILE
    names = " ".join(sorted(one.name for one in folder.iterdir() if one.suffix in (".json", ".safetensors")))
    remedy = f"restore it, or, if you trust the other files, write it again there: sha256sum {names} > {FILE}"
    if not path.is_file():
        raise ValueError(f"{folder} has no {FILE}, so its files cannot be checked; {remedy}")
    sums: dict[str, tuple[str, ...]] = {}
    for line in path.read_bytes().decode("utf-8", "replace").split("\n")[:-1]:
        match = LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"{path} was changed after it was written: it has the line {line!r}; {remedy}")
        sums[match[2]] = (*sums.get(match[2], ()), match[1])
    if not sums:
        raise ValueError(f"{path} is empty; {remedy}")
    return sums


def write_checksums(folder: Path, sums: Checksums) -> None:
    lines = [f"{digest}  {name}\n" for name, digests in sorted(sums.items()) for digest in digests]
    write_file(folder / FILE, "".join(lines).encode())


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Write a file and its checksum. At any moment the folder has the old or the new content, and a checksum of it."""
    sums = read_checksums(folder)
    digest = hashlib.sha256(content).hexdigest()
    write_checksums(folder, sums | {name: (*sums.get(name, ()), digest)})
    write_file(folder / name, content)
    write_checksums(folder, sums | {name: (digest,)})


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically and durably."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def damaged(folder: Path, sums: Checksums) -> Iterator[tuple[str, str]]:
    """Yields each file that does not have its checksum, and what happened to it."""
    for name, digests in sums.items():
        if not (folder / name).is_file():
            yield name, f"{folder / name} is missing"
        elif checksum(folder / name) not in digests:
            yield name, f"{folder / name} was changed after it was written"
