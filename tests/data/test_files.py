"""Files are decompressed once and written atomically, and invalid text raises."""

from __future__ import annotations

import gzip
import lzma
import resource
import zipfile

import numpy as np
import pytest

from everyformer.data import files

TEXT = "Über allen Gipfeln\nist Ruh\n".encode() * 100


def compressed_file(folder, suffix):
    path = folder / f"poem.txt{suffix}"
    if suffix.lower() == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("poem.txt", TEXT)
    else:
        path.write_bytes({"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[suffix.lower()](TEXT))
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zip", ".GZ", ".XZ", ".Zip"])
def test_compressed_files_are_memory_mapped(tmp_path, suffix):
    raw = files.memory_map(compressed_file(tmp_path, suffix))
    assert isinstance(raw, np.memmap)
    assert raw.tobytes() == TEXT


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zip"])
def test_a_truncated_file_raises_and_leaves_no_file_in_the_cache(tmp_path, suffix, cache_folder):
    path = compressed_file(tmp_path, suffix)
    path.write_bytes(path.read_bytes()[:-30])
    before = set(cache_folder.iterdir())
    with pytest.raises(ValueError, match=r"cannot decompress .*poem\.txt.*damaged"):
        files.memory_map(path)
    assert set(cache_folder.iterdir()) == before


def test_a_changed_file_is_decompressed_again(tmp_path):
    path = compressed_file(tmp_path, ".gz")
    files.memory_map(path)
    path.write_bytes(gzip.compress(b"other"))
    assert files.memory_map(path).tobytes() == b"other"


def test_an_interrupted_write_keeps_the_old_file(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"old")
    with pytest.raises(RuntimeError), files.atomic_write(target) as file:
        file.write(b"half of the n")
        raise RuntimeError
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


def test_only_a_byte_order_mark_at_the_start_is_dropped(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffa\n\ufeffb".encode())
    assert files.read_text(tmp_path / "a.txt") == "a\n\ufeffb"
    assert files.memory_map(tmp_path / "a.txt").tobytes() == "\ufeffa\n\ufeffb".encode()
    assert files.decode_utf8("\ufeffb".encode(), "a.txt", 4) == "\ufeffb"


@pytest.mark.parametrize(
    "raw, byte",
    [(b"abc\xff\xfe", 3), (b"ab\0cd", 2), (TEXT + b"\x80", len(TEXT)), (b"\xef\xbb\xbfa\xff", 4)],
)
def test_invalid_utf8_raises_with_the_offset(tmp_path, raw, byte):
    path = tmp_path / "data.bin"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=rf"data\.bin is not text in UTF-8: byte {byte} .*task\.tokenizer=bytes"):
        files.read_text(path)


def test_hidden_files_are_skipped_and_an_unreadable_folder_raises(tmp_path, monkeypatch):
    (tmp_path / ".hidden").mkdir()
    for name in ("text.txt", ".text.txt", ".hidden/text.txt"):
        (tmp_path / name).write_text("text")
    assert files.list_files(tmp_path) == [tmp_path / "text.txt"]

    def locked(folder):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.scandir", locked)
    with pytest.raises(ValueError, match=r"cannot read .* \(Permission denied\); make it readable"):
        files.list_files(tmp_path)


def test_the_fingerprint_depends_on_every_byte():
    raw = np.arange(3_000_000, dtype=np.uint32).view(np.uint8)
    other = raw.copy()
    other[-1] ^= 1
    assert files.fingerprint(raw) == files.fingerprint(raw.copy()) != files.fingerprint(other)
    assert files.fingerprint(raw) != files.fingerprint(raw[:-1])


def test_a_missing_path_raises():
    with pytest.raises(
        ValueError, match="copy is a generated problem, which only the task answer reads; leave --task out"
    ):
        files.existing_path("copy")
    with pytest.raises(ValueError, match=r"no file or folder /no/such; give a path, .*enwik8.*multi30k"):
        files.existing_path("/no/such")


def test_a_full_disk_names_the_folder_and_the_remedy_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with (
            pytest.raises(
                ValueError, match=r"cannot write to \S+ \(File too large\); free some space there, or set EVERY"
            ),
            files.atomic_write(tmp_path / "file") as file,
        ):
            file.write(b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []
