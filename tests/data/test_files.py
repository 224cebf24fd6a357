"""Files are unpacked once, written whole or not at all, and what is not text is refused."""

from __future__ import annotations

import gzip
import lzma
import zipfile

import numpy as np
import pytest

from everyformer.data import files

TEXT = "Über allen Gipfeln\nist Ruh\n".encode() * 100


def packed(folder, suffix):
    path = folder / f"poem.txt{suffix}"
    if suffix.lower() == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("poem.txt", TEXT)
    else:
        path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix.lower()](TEXT))
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zip", ".GZ", ".XZ", ".Zip"])
def test_the_content_is_mapped_whatever_the_packing(tmp_path, suffix):
    raw = files.mapped(packed(tmp_path, suffix))
    assert isinstance(raw, np.memmap)
    assert raw.tobytes() == TEXT


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zip"])
def test_a_truncated_file_is_refused_and_leaves_nothing(tmp_path, suffix, cache_folder):
    path = packed(tmp_path, suffix)
    path.write_bytes(path.read_bytes()[:-30])
    before = set(cache_folder.iterdir())
    with pytest.raises(ValueError, match=r"cannot unpack .*poem\.txt.*damaged"):
        files.mapped(path)
    assert set(cache_folder.iterdir()) == before


def test_a_file_that_changes_is_unpacked_again(tmp_path):
    path = packed(tmp_path, ".gz")
    files.mapped(path)
    path.write_bytes(gzip.compress(b"other"))
    assert files.mapped(path).tobytes() == b"other"


def test_what_is_interrupted_leaves_the_old_file(tmp_path):
    target = tmp_path / "kept"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), files.whole(target) as file:
        file.write(b"half of the n")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_only_a_byte_order_mark_at_the_beginning_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa\n\ufeffb".encode())
    assert files.read_text(tmp_path / "a.txt") == "a\n\ufeffb"
    assert files.mapped(tmp_path / "a.txt").tobytes() == "\ufeffa\n\ufeffb".encode()
    assert files.decoded("\ufeffb".encode(), "a.txt", 4) == "\ufeffb"


@pytest.mark.parametrize(
    "raw, byte",
    [(b"abc\xff\xfe", 3), (b"ab\0cd", 2), (TEXT + b"\x80", len(TEXT)), (b"\xef\xbb\xbfa\xff", 4)],
)
def test_what_is_not_text_is_refused_with_the_place(tmp_path, raw, byte):
    path = tmp_path / "data.bin"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"data\.bin is not text in UTF-8: byte {byte} .*task\.tokenizer=bytes"):
        files.read_text(path)


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / ".hidden").mkdir()
    for name in ("text.txt", ".text.txt", ".hidden/text.txt"):
        (tmp_path / name).write_text("text")
    assert files.files_in(tmp_path) == [tmp_path / "text.txt"]

    def locked(place):
        raise PermissionError(13, "Permission denied", str(place))

    monkeypatch.setattr("os.scandir", locked)
    with pytest.raises(ValueError, match=r"cannot read .* \(Permission denied\); make it readable"):
        files.files_in(tmp_path)


def test_the_fingerprint_follows_every_byte():
    raw = np.arange(3_000_000, dtype=np.uint32).view(np.uint8)
    other = raw.copy()
    other[-1] ^= 1
    assert files.fingerprint(raw) == files.fingerprint(raw.copy()) != files.fingerprint(other)
    assert files.fingerprint(raw) != files.fingerprint(raw[:-1])


def test_a_path_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"copy is made of pairs, for an encoder and a decoder; choose transformer"):
        files.existing("copy")
    with pytest.raises(ValueError, match=r"no file or folder /no/such; give a path, .*enwik8.*multi30k"):
        files.existing("/no/such")
