"""Files of data: unpacked once into the cache folder, mapped instead of read, written whole or not at all.

The cache folder holds nothing that cannot be made again: it may be deleted at any time.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

Raw = NDArray[np.uint8]

PACKED = (".gz", ".xz", ".zip")
SPLITS = {"train": "train", "valid": "valid", "val": "valid", "dev": "valid", "test": "test"}  # by a file's name


def cache_folder() -> Path:
    """Where unpacked and encoded data are kept: $EVERYFORMER_CACHE, or ~/.cache/everyformer."""
    folder = Path(os.environ.get("EVERYFORMER_CACHE") or Path.home() / ".cache" / "everyformer")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot make the cache folder {folder} ({error.strerror}); set EVERYFORMER_CACHE to a folder to write to"
        ) from None
    return folder


@contextmanager
def whole(target: Path) -> Iterator[IO[bytes]]:
    """A file to write, under another name until it is complete: what is there under `target` is whole."""
    with tempfile.NamedTemporaryFile(dir=target.parent, prefix="part-", delete=False) as part:
        try:
            yield part
        except BaseException:
            Path(part.name).unlink()
            raise
    Path(part.name).rename(target)


def digest(*facts: object) -> str:
    """A name for what follows from these facts."""
    return hashlib.sha256("\0".join(map(str, facts)).encode()).hexdigest()[:24]


def identity(path: Path) -> str:
    """What changes when a file does: its place, size and time."""
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def plain_name(path: Path) -> str:
    """The file's name without .gz, .xz or .zip."""
    return path.stem if path.suffix.lower() in PACKED else path.name


def split_of(path: Path) -> str | None:
    """The split that a file's or folder's name tells: train.txt, val.jsonl.gz, test/."""
    return SPLITS.get(plain_name(path).split(".")[0])


def unpacked(path: Path) -> Path:
    """The file itself; of a packed one its content, unpacked once into the cache folder."""
    if path.suffix.lower() not in PACKED:
        return path
    target = cache_folder() / f"{digest('unpacked', identity(path))}-{path.stem}"
    if not target.exists():
        try:
            with _opened(path) as packed, whole(target) as file:
                shutil.copyfileobj(packed, file, 1 << 20)
        except (OSError, lzma.LZMAError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"cannot unpack {path}: {error}; it is damaged or not a {path.suffix} file") from None
    return target


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    suffix = path.suffix.lower()
    if suffix != ".zip":
        with gzip.open(path) if suffix == ".gz" else lzma.open(path) as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise ValueError(f"{path} holds {len(names)} files; unpack it and give the folder")
        with archive.open(names[0]) as member:
            yield member


def mapped(path: Path) -> Raw:
    """The bytes of a file, unpacked if need be, without reading them all into memory."""
    try:
        path = unpacked(path)
        return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give a file that can be read") from None


def read_text(path: Path) -> str:
    """All of a file that is small enough for memory, as text."""
    return decoded(mapped(path).tobytes(), str(path))


def decoded(raw: bytes, name: str, start: int = 0) -> str:
    """Bytes from `start` on as text, without the byte order mark that a file may begin with.

    What is not text is refused, with the place where that shows.
    """
    zero = raw.find(b"\0")
    try:
        if zero < 0:
            text = raw.decode("utf-8")
            return text if start else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        zero = error.start
    raise ValueError(
        f"{name} is not text in UTF-8: byte {start + zero} is {raw[zero]}; convert it to UTF-8 (binary data can be learned "
        "only by the language task, with task.tokenizer=bytes)"
    )


def fingerprint(data: NDArray[Any]) -> str:
    """A checksum of all bytes; of the length and 4,096 spread pieces where there are more than 4 GiB."""
    raw = data.view(np.uint8)
    found = hashlib.sha256(str(len(raw)).encode())
    piece = 1 << 20
    starts: Iterable[int] = range(0, len(raw), piece)
    if len(raw) > 1 << 32:
        starts = np.linspace(0, len(raw) - piece, 4096).astype(int).tolist()
    for start in starts:
        found.update(raw[start : start + piece].tobytes())
    return found.hexdigest()


def checksum(path: Path) -> str:
    """The sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def written(path: Path) -> Any:
    """The JSON that a run wrote into a file of its folder; None where there is no file."""
    try:
        return json.loads(path.read_text()) if path.is_file() else None
    except ValueError as error:
        raise ValueError(f"{path} is broken ({error}); bring the file back that train wrote") from None


def files_in(folder: Path) -> list[Path]:
    """The files of a folder and of those in it, in order, hidden ones left out."""

    def refuse(error: OSError) -> None:  # else what is below it would be left out in silence
        raise ValueError(f"cannot read {error.filename} ({error.strerror}); make it readable, or give another folder")

    found: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [one for name in names if not name.startswith(".") and (one := Path(place, name)).is_file()]
    if not found:
        raise ValueError(f"the folder {folder} has no files; give one with data in it")
    return sorted(found)


def existing(data: str) -> Path:
    """The path that a user gave, if there is something."""
    path = Path(data).expanduser()
    if not path.exists():
        from everyformer.data.made import ALGORITHMS
        from everyformer.data.named import NAMED, VOCABULARY

        if data in ALGORITHMS:
            raise ValueError(
                f"{data} is made of pairs, for an encoder and a decoder; choose transformer, or universal-transformer with "
                "--size tiny-pair"
            )
        raise ValueError(
            f"there is no file or folder {path}; give a path, - for standard input, nothing for the embedded set, or a named "
            f"set: {', '.join(sorted({*NAMED, *ALGORITHMS} - {VOCABULARY}))}"
        )
    return path
