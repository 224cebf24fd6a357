"""Text is opened from every source, split, and decoded chunk by chunk."""

from __future__ import annotations

import io
import json
import lzma
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from everyformer.data import text as texts
from everyformer.data.text import open_text


def all_bytes(text, splits=("train", "valid")):
    return b"".join(text.splits[split].tobytes() for split in splits)


def test_the_default_text_is_the_embedded_shakespeare():
    text = open_text(None)
    assert sum(map(len, text.splits.values())) == 1_115_394
    assert all_bytes(text).startswith(b"First Citizen:\nBefore we proceed any further")
    assert abs(len(text.splits["valid"]) / 1_115_394 - 0.1) < 0.001


def test_a_file_a_compressed_file_and_standard_input_give_the_same_text(tmp_path, monkeypatch):
    content = "Zeile für Zeile\n".encode() * 500
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(content))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    opened = [open_text(data) for data in (str(tmp_path / "a.txt"), str(tmp_path / "a.txt.xz"), "-")]
    assert {all_bytes(text) for text in opened} == {content}
    assert len({text.fingerprint for text in opened}) == 1


def test_a_split_ends_after_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("äöü nine letters\n" * 1000)
    text = open_text(str(tmp_path / "a.txt"))
    assert text.splits["train"].tobytes().endswith(b"letters\n")
    assert text.splits["valid"].tobytes().startswith("ä".encode())


@pytest.mark.parametrize("fractions", [(0.9, 0.1), (0.8, 0.1, 0.1)])
def test_splits_cover_the_text_in_order(tmp_path, fractions):
    content = np.random.RandomState(0).randint(0, 256, 5000, dtype=np.uint8).tobytes()
    (tmp_path / "a.bin").write_bytes(content)
    text = open_text(str(tmp_path / "a.bin"), fractions)
    assert all_bytes(text, ("train", "valid", "test")[: len(fractions)]) == content


def test_each_file_of_a_folder_is_a_document(tmp_path):
    for name, content in {
        "b.txt": "second",
        "a.txt": "first",
        "c/d.txt": "third",
        ".hidden": "no",
        "empty.txt": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    text = open_text(str(tmp_path), (1 - 1e-9, 1e-9))
    assert text.splits["train"].tobytes() == b"first\nsecond\nthird\n"
    assert text.starts["train"].tolist() == [0, 6, 13]


def test_files_named_after_splits_are_those_splits(tmp_path):
    for name in ("train", "val", "test"):
        (tmp_path / f"{name}.txt").write_text(f"text for {name}\n")
    text = open_text(str(tmp_path))
    assert {split: raw.tobytes() for split, raw in text.splits.items()} == {
        "train": b"text for train\n",
        "valid": b"text for val\n",
        "test": b"text for test\n",
    }


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "A.JSONL", "A.CSV"])
def test_the_text_of_records_is_joined(tmp_path, name):
    rows = ["one, with a comma", 'two with a "quote"', "three\nlines"]
    if name.lower().endswith("jsonl"):
        content = "\n".join(json.dumps({"text": row, "id": 7}) for row in rows)
    else:
        content = "id,text\n" + "".join('7,"{}"\n'.format(row.replace('"', '""')) for row in rows)
    (tmp_path / name).write_text(content)
    text = open_text(str(tmp_path / name), (1 - 1e-9, 1e-9))
    assert text.splits["train"].tobytes().decode() == "".join(f"{row}\n" for row in rows)
    assert len(text.starts["train"]) == 3
    with pytest.raises(ValueError, match=r"no column 'body' \(it has .*task\.column"):
        open_text(str(tmp_path / name), column="body")


def test_the_fingerprint_depends_on_every_split(tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(name)
    before = open_text(str(tmp_path)).fingerprint
    (tmp_path / "valid.txt").write_text("valid?")
    assert open_text(str(tmp_path)).fingerprint != before


@pytest.mark.parametrize("size", [2, 9, 1000])
def test_the_byte_order_mark_of_every_file_is_dropped(tmp_path, size):
    for name, content in {
        "a.txt": "\ufeffone",
        "b.txt": "",
        "c.txt": "\ufefftwo\n\ufeffthree",
        "d.txt": "four",
    }.items():
        (tmp_path / name).write_text(content)
    text = open_text(str(tmp_path), (1 - 1e-9, 1e-9))
    assert all_bytes(text, ["train"]).decode() == "\ufeffone\n\ufefftwo\n\ufeffthree\nfour\n"  # the bytes are unchanged
    assert "".join(text.chunks("train", size=size)) == "one\ntwo\n\ufeffthree\nfour\n"


def test_a_split_that_starts_inside_a_file_keeps_its_first_character(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n" * 10)
    text = open_text(str(tmp_path / "a.txt"), (0.5, 0.5))
    assert "".join(text.chunks("train")) == "one\n" + "\ufeffone\n" * 4
    assert "".join(text.chunks("valid")) == "\ufeffone\n" * 5


@pytest.mark.parametrize("bad, byte", [(b"\x89PNG\0\0", 4), (b"\x80", 0), (b"caf\xe9", 3), (b"cut \xc3", 4)])
def test_invalid_text_in_a_folder_raises_with_the_file_and_offset(tmp_path, bad, byte):
    for name, content in {"a.txt": b"first", "b.jsonl": b'{"text": "second"}', "c.bin": bad, "d.txt": b"last"}.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):  # the second time the text comes from the cache folder
        text = open_text(str(tmp_path), (1 - 1e-9, 1e-9))
        with pytest.raises(ValueError, match=rf"c\.bin is not text in UTF-8: byte {byte} is {bad[byte]};"):
            list(text.chunks("train"))


def test_the_offset_in_an_error_is_that_in_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 100 + b"\xff\nline\n")
    with pytest.raises(ValueError, match=r"a\.txt is not text in UTF-8: byte 500 is 255"):
        list(open_text(str(tmp_path / "a.txt")).chunks("valid"))


@pytest.mark.parametrize("cell, message", [("null", "is null; fill it"), ("5", "is of type int; give a string")])
def test_a_record_without_text_raises_with_its_line(tmp_path, cell, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n\n{{"text": {cell}, "label": 1}}\n')
    with pytest.raises(ValueError, match=rf"'text' on line 3 of .*a\.jsonl {message}"):
        open_text(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("size", [7, 50, 333])
def test_chunks_join_to_the_whole_text(size, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "SEARCH", 20)  # so that some chunks have no line end near
    content = ("Ein Wort,\n\n  noch äins … \nund\tmehr" * 40) + "x" * 900
    (tmp_path / "a.txt").write_text(content)
    text = open_text(str(tmp_path / "a.txt"), (1 - 1e-9, 1e-9))
    chunks = list(text.chunks("train", size=size))
    assert "".join(chunks) == content
    assert len(chunks) > 3


def test_chunks_end_after_single_line_ends(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("ab\n\ncd\n  ef\ngh\n" * 50)
    text = open_text(str(tmp_path / "a.txt"))
    chunks = list(text.chunks("train", size=20))
    assert all(chunk.endswith(("ef\n", "gh\n")) for chunk in chunks)
    assert all(chunk.startswith(("gh", "ab")) for chunk in chunks)


def test_a_character_that_a_split_cuts_in_two_is_left_out(monkeypatch):
    raw = np.frombuffer("aüb".encode(), dtype=np.uint8)
    text = texts.Text("x", {"left": raw[:2], "right": raw[2:]}, {}, "", {"left": [(0, "x")], "right": [(-2, "x")]})
    assert list(text.chunks("left")) == ["a"]
    assert list(text.chunks("right")) == ["b"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", r"a\.txt is empty; give some text"),
        (b"PNG\r\n\x1a\n\0\0\0\rIHDR" * 10, r"is not text in UTF-8: byte .*task\.tokenizer=bytes"),
        (b"\xff\xfe\x00" * 50, r"is not text in UTF-8"),
    ],
)
def test_empty_and_binary_files_raise(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(open_text(str(tmp_path / "a.txt")).chunks("train"))


@pytest.mark.parametrize(
    "data, message", [("mnist", "mnist is not a text"), ("/nowhere", "no file or folder /nowhere")]
)
def test_data_that_are_not_text_raise(data, message):
    with pytest.raises(ValueError, match=message):
        open_text(data)


def test_an_empty_folder_raises(tmp_path):
    with pytest.raises(ValueError, match="has no files; give a folder with data in it"):
        open_text(str(tmp_path))
