"""Reading and writing data files: decompression, memory mapping, atomic writes and checksums.

Decompressed and encoded data are stored in the cache folder. It may be deleted at any time: everything in it is recreated on demand.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import lzma
import os
import re
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

ByteArray = NDArray[np.uint8]

COMPRESSED = (".gz", ".xz", ".zip")
CANNOT_WRITE = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EACCES, errno.EROFS)  # a full or read-only disk
SPLITS = {
    "train": "train",
    "valid": "valid",
    "validation": "valid",
    "val": "valid",
    "dev": "valid",
    "test": "test",
}  # file name -> split
STATE, SPLIT_LIST = "state.json", "dataset_dict.json"  # of a data set that Hugging Face's `datasets` saved to disk


def cache_folder() -> Path:
    """Returns the folder for decompressed and encoded data: $EVERYFORMER_CACHE. Default: ~/.cache/everyformer."""
    folder = Path(os.environ.get("EVERYFORMER_CACHE") or Path.home() / ".cache" / "everyformer")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot create the cache folder {folder} ({error.strerror}); set EVERYFORMER_CACHE to a writable folder"
        ) from None
    return folder


@contextmanager
def atomic_write(target: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file for writing and renames it to `target` when the block ends without an error.

    A file named `target` is therefore always complete. Raises ValueError if the disk is full or the folder is not writable.
    """
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix="part-", delete=False) as part:
            try:
                yield part
                part.flush()
            except BaseException:
                Path(part.name).unlink()
                raise
        Path(part.name).rename(target)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        raise ValueError(
            f"cannot write to {target.parent} ({error.strerror}); free some space there, or set EVERYFORMER_CACHE to another folder"
        ) from error


def digest(*values: object) -> str:
    """Returns a short hash of the values, used as a cache key."""
    return hashlib.sha256("\0".join(map(str, values)).encode()).hexdigest()[:24]


def file_identity(path: Path) -> str:
    """Returns the path, size and modification time of a file; the string changes when the file does."""
    stat = path.stat()
    return f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"


def uncompressed_name(path: Path) -> str:
    """Returns the file's name without .gz, .xz or .zip."""
    return path.stem if path.suffix.lower() in COMPRESSED else path.name


def split_from_name(path: Path) -> str | None:
    """Returns the split that a file or folder is named after (train.txt, val.jsonl.gz, test/, train-00000-of-00002.parquet), or None.

    An Arrow file of a saved data set has the split of its folder, or is training data.
    """
    if path.suffix == ".arrow" and (path.parent / STATE).is_file():
        return SPLITS.get(path.parent.name) if (path.parent.parent / SPLIT_LIST).is_file() else "train"
    return SPLITS.get(re.sub(r"-\d+-of-\d+$", "", uncompressed_name(path).split(".")[0]))


def decompress(path: Path) -> Path:
    """Returns the path of the decompressed content. A compressed file is decompressed once, into the cache folder."""
    if path.suffix.lower() not in COMPRESSED:
        return path
    target = cache_folder() / f"{digest('unpacked', file_identity(path))}-{path.stem}"
    if not target.exists():
        try:
            with _open_compressed(path) as compressed, atomic_write(target) as file:
                shutil.copyfileobj(compressed, file, 1 << 20)
        except (OSError, lzma.LZMAError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(
                f"cannot decompress {path}: {error}; it is damaged or not a {path.suffix} file, so get it again"
            ) from None
    return target


@contextmanager
def _open_compressed(path: Path) -> Iterator[Any]:
    suffix = path.suffix.lower()
    if suffix != ".zip":
        with gzip.open(path) if suffix == ".gz" else lzma.open(path) as file:
            yield file
        return
    with zipfile.ZipFile(path) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/")]
        if len(names) != 1:
            raise ValueError(f"{path} holds {len(names)} files, but must hold one; unpack it and give the folder")
        with archive.open(names[0]) as member:
            yield member


def memory_map(path: Path) -> ByteArray:
    """Returns the bytes of a file, decompressed if necessary, as a memory map."""
    try:
        path = decompress(path)
        return np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}; give a readable file") from None


def read_text(path: Path) -> str:
    """Reads a whole file into memory as UTF-8 text."""
    return decode_utf8(memory_map(path).tobytes(), str(path))


TO_UTF8 = "convert it to UTF-8 (only the language task, with task.tokenizer=bytes, trains on binary data)"


def decode_utf8(raw: bytes, name: str, offset: int = 0, remedy: str = TO_UTF8) -> str:
    """Decodes the bytes that start at `offset` of the file `name`, and drops a byte order mark at offset 0.

    Raises ValueError, with the offset of the first bad byte and the remedy, if they are not UTF-8 or contain a zero byte.
    """
    bad = raw.find(b"\0")
    try:
        if bad < 0:
            text = raw.decode("utf-8")
            return text if offset else text.removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        bad = error.start
    raise ValueError(f"{name} is not text in UTF-8: byte {offset + bad} is {raw[bad]}; {remedy}")


def fingerprint(data: NDArray[Any]) -> str:
    """Returns a checksum of all bytes; above 4 GiB, of the length and of 4,096 evenly spread chunks of 1 MiB."""
    raw = data.view(np.uint8)
    hasher = hashlib.sha256(str(len(raw)).encode())
    size = 1 << 20
    starts: Iterable[int] = range(0, len(raw), size)
    if len(raw) > 1 << 32:
        starts = np.linspace(0, len(raw) - size, 4096).astype(int).tolist()
    for start in starts:
        hasher.update(raw[start : start + size].tobytes())
    return hasher.hexdigest()


def checksum(path: Path) -> str:
    """Returns the sha256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def parse_json(text: str | bytes) -> Any:
    """Returns the content of JSON. Raises ValueError if it is none."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    """Reads a JSON file that a run wrote into its folder. Returns None if there is no such file."""
    try:
        return parse_json(path.read_text()) if path.is_file() else None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); restore the file that train wrote") from None


def list_files(folder: Path) -> list[Path]:
    """Returns the files of a folder and its subfolders, sorted, without hidden ones."""

    def refuse(error: OSError) -> None:  # os.walk ignores errors by default, and would skip the files below
        raise ValueError(f"cannot read {error.filename} ({error.strerror}); make it readable, or give another folder")

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if SPLIT_LIST in names:
            names.remove(SPLIT_LIST)
            if "train" in folders:  # without others, such as imdb's "unsupervised"
                folders[:] = [name for name in folders if name in SPLITS]
        if STATE in names:
            names = _saved_files(Path(parent, STATE))
        files += [file for name in names if not name.startswith(".") and (file := Path(parent, name)).is_file()]
    if not files:
        raise ValueError(f"the folder {folder} has no files; give a folder with data in it")
    return sorted(files)


def _saved_files(state: Path) -> list[str]:
    """Returns the names of the Arrow files of a data set that was saved to disk."""
    try:
        return [Path(file["filename"]).name for file in parse_json(state.read_bytes())["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{state} is not what datasets.save_to_disk writes ({error}); save the data set again"
        ) from None


def existing_path(data: str) -> Path:
    """Returns the path that `data` names. Raises ValueError if nothing exists there."""
    path = Path(data).expanduser()
    if not path.exists():
        from everyformer.data.datasets import DATASETS, GPT2_FILES
        from everyformer.data.problems import PROBLEMS

        if data in PROBLEMS:
            raise ValueError(f"{data} is a generated problem, which only the task answer reads; leave --task out")
        raise ValueError(
            f"there is no file or folder {path}; give a path, - for standard input, nothing for the embedded data, or the name "
            f"of a data set: {', '.join(sorted({*DATASETS, *PROBLEMS} - {GPT2_FILES}))}"
        )
    return path
