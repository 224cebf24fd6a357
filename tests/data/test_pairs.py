"""Sentence pairs are read from every format and checked."""

from __future__ import annotations

import io
import json
import sys
from types import SimpleNamespace

import pytest

from everyformer.data.pairs import open_pairs

SIDES = (["one", "two", "three", "four"], ["eins", "zwei", "drei", "vier"])


def pair_file(folder, form):
    if form == "folder":
        for name, lines in (("train.en", SIDES[0]), ("train.de", SIDES[1]), ("val.en", ["five"]), ("val.de", ["fünf"])):
            (folder / name).write_text("\n".join(lines) + "\n")
        return folder
    pairs = list(zip(*SIDES, strict=True))
    content = {
        "tsv": "\n".join("\t".join(pair) for pair in pairs),
        "jsonl": "\n".join(json.dumps({"en": one, "de": other}) for one, other in pairs),
        "csv": "en,de\n" + "\n".join(",".join(pair) for pair in pairs),
    }[form]
    (folder / f"pairs.{form}").write_text(content)
    return folder / f"pairs.{form}"


ENCODINGS = {
    "plain": lambda raw: raw,
    "windows": lambda raw: raw.replace(b"\n", b"\r\n"),
    "byte order mark": lambda raw: b"\xef\xbb\xbf" + raw,
}


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("form", ["folder", "tsv", "jsonl", "csv"])
def test_every_format_gives_the_same_pairs(tmp_path, form, encoding):
    data = pair_file(tmp_path, form)
    for path in data.iterdir() if form == "folder" else [data]:
        path.write_bytes(ENCODINGS[encoding](path.read_bytes()))
    pairs = open_pairs(str(data), "en", "de", 0.25)
    if form == "folder":
        assert pairs.splits == {"train": SIDES, "valid": (["five"], ["fünf"])}
    else:
        every = [pair for sides in pairs.splits.values() for pair in zip(*sides, strict=True)]
        assert sorted(every) == sorted(zip(*SIDES, strict=True))
        assert len(pairs.splits["valid"][0]) == 1


@pytest.mark.parametrize("form", ["tsv", "jsonl", "csv"])
def test_the_case_of_an_extension_does_not_matter(tmp_path, form):
    data = pair_file(tmp_path, form)
    pairs = open_pairs(str(data), "en", "de", 0.25)
    assert open_pairs(str(data.rename(tmp_path / f"PAIRS.{form.upper()}")), "en", "de", 0.25).splits == pairs.splits


@pytest.mark.parametrize("data", ["a.tsv", "-"])
def test_blank_lines_between_pairs_are_skipped(tmp_path, monkeypatch, data):
    content = b"\xef\xbb\xbfone\teins\r\n\r\n\t\r\n\xef\xbb\xbftwo\tzwei\r\n\r\n"
    (tmp_path / "a.tsv").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    pairs = open_pairs(str(tmp_path / data) if data != "-" else data, "en", "de", 0.5)
    every = [pair for sides in pairs.splits.values() for pair in zip(*sides, strict=True)]
    assert sorted(every) == [("one", "eins"), ("\ufefftwo", "zwei")]


def test_source_and_target_can_be_swapped(tmp_path):
    pairs = open_pairs(str(pair_file(tmp_path, "folder")), "de", "en", 0.25)
    assert pairs.splits["train"] == (SIDES[1], SIDES[0])
    embedded = open_pairs(None, "en", "de", 0.1).splits["valid"]
    assert open_pairs(None, "de", "en", 0.1).splits["valid"] == (embedded[1], embedded[0])


@pytest.mark.parametrize(
    "files, message",
    [
        (
            {"train.en": "a\nb\nc", "train.de": "x\ny"},
            r"train\.en of .* has 3 lines, but train\.de has 2; line n of one",
        ),
        ({"train.en": "a\nb"}, r"has no train\.en and train\.de \(it has train\.en\)"),
        ({"train.en": "a", "train.de": "x"}, "has 1 training pair; give at least 2"),
        ({"train.en": "a\n\nc", "train.de": "x\ny\nz"}, "pair 2 of train of .* has an empty side"),
        ({"train.en": b"\xff\xff", "train.de": "x"}, r"train\.en is not text in UTF-8"),
    ],
)
def test_invalid_pairs_raise(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        open_pairs(str(tmp_path), "en", "de", 0.1)


def test_a_line_without_a_tab_raises(tmp_path):
    (tmp_path / "a.tsv").write_text("one\teins\n\ntwo zwei\n")
    with pytest.raises(ValueError, match=r"line 3 of .* has 1 columns, but the first line has 2; separate"):
        open_pairs(str(tmp_path / "a.tsv"), "en", "de", 0.1)


@pytest.mark.parametrize("header", ["en,de", "English,German", "source,target", "de,en"])
@pytest.mark.parametrize("form", ["csv", "tsv"])
def test_a_header_of_pairs_is_recognised(tmp_path, form, header):
    rows = [header, *(",".join(pair) for pair in zip(*SIDES, strict=True))]
    text = "\n".join(rows).replace(",", "," if form == "csv" else "\t")
    (tmp_path / f"a.{form}").write_text(text)
    pairs = open_pairs(str(tmp_path / f"a.{form}"), "en", "de", 0.25)
    sides = SIDES if header != "de,en" else SIDES[::-1]
    every = [pair for split in pairs.splits.values() for pair in zip(*split, strict=True)]
    assert sorted(every) == sorted(zip(*sides, strict=True))
    assert bool(pairs.notes) == (header in ("English,German", "source,target"))


def test_pairs_without_a_header_are_all_read_and_csv_says_so(tmp_path):
    (tmp_path / "a.csv").write_text("\n".join(",".join(pair) for pair in zip(*SIDES, strict=True)))
    pairs = open_pairs(str(tmp_path / "a.csv"), "en", "de", 0.25)
    assert sorted([*pairs.splits["train"][0], *pairs.splits["valid"][0]]) == sorted(SIDES[0])
    assert "has no header, so its first line is a pair" in pairs.notes[0]


def test_quotes_in_tsv_are_text(tmp_path):
    (tmp_path / "a.tsv").write_text('"one\teins\ntwo"\t"zwei"\n')
    pairs = open_pairs(str(tmp_path / "a.tsv"), "en", "de", 0.5)
    every = [pair for split in pairs.splits.values() for pair in zip(*split, strict=True)]
    assert sorted(every) == [('"one', "eins"), ('two"', '"zwei"')]
