"""Where text comes from, how it is split, and how it is cut into pieces."""

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


def whole(text, splits=("train", "valid")):
    return b"".join(text.splits[split].tobytes() for split in splits)


def test_the_embedded_text_is_shakespeare():
    text = open_text(None)
    assert sum(map(len, text.splits.values())) == 1_115_394
    assert whole(text).startswith(b"First Citizen:\nBefore we proceed any further")
    assert abs(len(text.splits["valid"]) / 1_115_394 - 0.1) < 0.001


def test_a_file_a_packed_file_and_standard_input_give_the_same(tmp_path, monkeypatch):
    content = "Zeile für Zeile\n".encode() * 500
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "a.txt.xz").write_bytes(lzma.compress(content))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    found = [open_text(data) for data in (str(tmp_path / "a.txt"), str(tmp_path / "a.txt.xz"), "-")]
    assert {whole(text) for text in found} == {content}
    assert len({text.fingerprint for text in found}) == 1


def test_a_split_ends_with_a_line(tmp_path):
    (tmp_path / "a.txt").write_text("äöü nine letters\n" * 1000)
    text = open_text(str(tmp_path / "a.txt"))
    assert text.splits["train"].tobytes().endswith(b"letters\n")
    assert text.splits["valid"].tobytes().startswith("ä".encode())


@pytest.mark.parametrize("shares", [(0.9, 0.1), (0.8, 0.1, 0.1)])
def test_splits_are_all_of_the_text_in_order(tmp_path, shares):
    content = np.random.RandomState(0).randint(0, 256, 5000, dtype=np.uint8).tobytes()
    (tmp_path / "a.bin").write_bytes(content)
    text = open_text(str(tmp_path / "a.bin"), shares)
    assert whole(text, ("train", "valid", "test")[: len(shares)]) == content


def test_a_folder_is_its_files_in_order_each_a_document(tmp_path):
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
def test_records_give_their_text(tmp_path, name):
    rows = ["one, with a comma", 'two with a "quote"', "three\nlines"]
    if name.lower().endswith("jsonl"):
        content = "\n".join(json.dumps({"text": row, "id": 7}) for row in rows)
    else:
        content = "id,text\n" + "".join('7,"{}"\n'.format(row.replace('"', '""')) for row in rows)
    (tmp_path / name).write_text(content)
    text = open_text(str(tmp_path / name), (1 - 1e-9, 1e-9))
    assert text.splits["train"].tobytes().decode() == "".join(f"{row}\n" for row in rows)
    assert len(text.starts["train"]) == 3
    with pytest.raises(ValueError, match=r"no 'body' \(it has .*task\.column"):
        open_text(str(tmp_path / name), column="body")


def test_the_fingerprint_knows_the_splits(tmp_path):
    for name in ("train", "valid"):
        (tmp_path / f"{name}.txt").write_text(name)
    before = open_text(str(tmp_path)).fingerprint
    (tmp_path / "valid.txt").write_text("valid?")
    assert open_text(str(tmp_path)).fingerprint != before


@pytest.mark.parametrize("size", [2, 9, 1000])
def test_every_file_may_begin_with_a_byte_order_mark(tmp_path, size):
    for name, content in {
        "a.txt": "\ufeffone",
        "b.txt": "",
        "c.txt": "\ufefftwo\n\ufeffthree",
        "d.txt": "four",
    }.items():
        (tmp_path / name).write_text(content)
    text = open_text(str(tmp_path), (1 - 1e-9, 1e-9))
    assert whole(text, ["train"]).decode() == "\ufeffone\n\ufefftwo\n\ufeffthree\nfour\n"  # bytes are left as they are
    assert "".join(text.pieces("train", size=size)) == "one\ntwo\n\ufeffthree\nfour\n"


def test_a_split_that_begins_within_a_file_has_no_byte_order_mark(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffone\n" * 10)
    text = open_text(str(tmp_path / "a.txt"), (0.5, 0.5))
    assert "".join(text.pieces("train")) == "one\n" + "\ufeffone\n" * 4
    assert "".join(text.pieces("valid")) == "\ufeffone\n" * 5


@pytest.mark.parametrize("bad, byte", [(b"\x89PNG\0\0", 4), (b"\x80", 0), (b"caf\xe9", 3), (b"cut \xc3", 4)])
def test_the_file_of_a_folder_that_is_not_text_is_named(tmp_path, bad, byte):
    for name, content in {"a.txt": b"first", "b.jsonl": b'{"text": "second"}', "c.bin": bad, "d.txt": b"last"}.items():
        (tmp_path / name).write_bytes(content)
    for _ in range(2):  # the second time from the cache folder
        text = open_text(str(tmp_path), (1 - 1e-9, 1e-9))
        with pytest.raises(ValueError, match=rf"c\.bin is not text in UTF-8: byte {byte} is {bad[byte]};"):
            list(text.pieces("train"))


def test_the_place_in_a_later_split_is_that_in_the_file(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"line\n" * 100 + b"\xff\nline\n")
    with pytest.raises(ValueError, match=r"a\.txt is not text in UTF-8: byte 500 is 255"):
        list(open_text(str(tmp_path / "a.txt")).pieces("valid"))


@pytest.mark.parametrize("cell, message", [("null", "is null; fill it"), ("5", "is a int; give text")])
def test_a_record_without_text_is_named_by_its_line(tmp_path, cell, message):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "x"}}\n\n{{"text": {cell}, "label": 1}}\n')
    with pytest.raises(ValueError, match=rf"'text' on line 3 of .*a\.jsonl {message}"):
        open_text(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("size", [7, 50, 333])
def test_pieces_are_the_whole_text(size, tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "LOOK", 20)  # so that there is not always a good place
    content = ("Ein Wort,\n\n  noch äins … \nund\tmehr" * 40) + "x" * 900
    (tmp_path / "a.txt").write_text(content)
    text = open_text(str(tmp_path / "a.txt"), (1 - 1e-9, 1e-9))
    pieces = list(text.pieces("train", size=size))
    assert "".join(pieces) == content
    assert len(pieces) > 3


def test_pieces_are_cut_after_single_line_ends(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("ab\n\ncd\n  ef\ngh\n" * 50)
    text = open_text(str(tmp_path / "a.txt"))
    pieces = list(text.pieces("train", size=20))
    assert all(piece.endswith(("ef\n", "gh\n")) for piece in pieces)
    assert all(piece.startswith(("gh", "ab")) for piece in pieces)


def test_a_character_cut_by_a_split_is_left_out(monkeypatch):
    raw = np.frombuffer("aüb".encode(), dtype=np.uint8)
    text = texts.Text("x", {"left": raw[:2], "right": raw[2:]}, {}, "", {"left": [(0, "x")], "right": [(-2, "x")]})
    assert list(text.pieces("left")) == ["a"]
    assert list(text.pieces("right")) == ["b"]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", r"a\.txt is empty; give some text"),
        (b"PNG\r\n\x1a\n\0\0\0\rIHDR" * 10, r"is not text in UTF-8: byte .*task\.tokenizer=bytes"),
        (b"\xff\xfe\x00" * 50, r"is not text in UTF-8"),
    ],
)
def test_bad_text_is_refused(tmp_path, content, message):
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(open_text(str(tmp_path / "a.txt")).pieces("train"))


@pytest.mark.parametrize(
    "data, message", [("mnist", "mnist is not a text"), ("/nowhere", "no file or folder /nowhere")]
)
def test_what_is_no_text_is_named(data, message):
    with pytest.raises(ValueError, match=message):
        open_text(data)


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no files; give one with data in it"):
        open_text(str(tmp_path))
