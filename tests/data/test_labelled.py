"""Labelled examples are read from every format and checked; fingerprints depend on the splits."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from everyformer.data.graphs import open_graph
from everyformer.data.images import open_unlabelled_images
from everyformer.data.labelled import hold_out, open_labelled
from everyformer.data.pairs import open_pairs
from everyformer.data.text import open_text

ROWS = [("good, fine", "yes"), ('so "so', "maybe"), ("bad", "no"), ("awful", "no"), ("great", "yes")] * 4


def labelled(data, kind="text", column=None, label="label", valid=0.1):
    return open_labelled(None if data is None else str(data), kind, column, label, valid)


def all_examples(data):
    """All inputs with the names of their classes, over all splits."""
    pairs = [pair for inputs, label_N in data.splits.values() for pair in zip(inputs, label_N, strict=True)]
    return sorted((str(one), data.classes[label]) for one, label in pairs)


def write(folder, form, monkeypatch):
    """Writes the rows in a format and returns the argument `data` that opens them."""
    if form.lower() in ("jsonl", "jsonl.gz", "-"):
        content = "\n".join(json.dumps({"text": text, "label": label}) for text, label in ROWS).encode()
        if form == "-":
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
            return "-"
        (folder / f"rows.{form}").write_bytes(gzip.compress(content) if form.lower().endswith("gz") else content)
    elif form.lower() == "csv":
        with (folder / f"rows.{form}").open("w", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *ROWS])
    elif form.lower() == "tsv":
        lines = ["\t".join(row) for row in (("text", "label"), *ROWS)]
        (folder / f"rows.{form}").write_text("\n".join(lines))
    elif form == "json":
        (folder / "rows.json").write_text(json.dumps([{"text": text, "label": label} for text, label in ROWS]))
    elif form == "parquet":
        parquet.write_table(
            pyarrow.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]}),
            folder / "rows.parquet",
        )
    else:
        for number, (text, label) in enumerate(ROWS):
            path = folder / "train" / label if form == "splits" else folder / label
            path.mkdir(parents=True, exist_ok=True)
            (path / f"{number}.txt").write_text(text)
        return folder
    return folder / f"rows.{form}"


@pytest.mark.parametrize(
    "opened",
    [
        lambda valid: open_text(None, (1 - valid, valid)),
        lambda valid: open_pairs(None, "en", "de", valid),
        lambda valid: open_labelled("rows.csv", "text", None, "label", valid),
        lambda valid: open_graph("graph.json", valid),
        lambda valid: open_unlabelled_images("images", valid),
    ],
    ids=["text", "pairs", "labelled", "graph", "images"],
)
def test_the_fingerprint_depends_on_what_is_held_out(tmp_path, monkeypatch, opened):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "csv", monkeypatch)
    graph = {"features": [[1, 0]] * 20, "edges": [[0, 1]], "labels": [0, 1] * 10, "train": list(range(20))}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    (tmp_path / "images").mkdir()
    for number in range(20):
        Image.new("L", (4, 4), number).save(tmp_path / "images" / f"{number}.png")
    assert opened(0.1).fingerprint == opened(0.1).fingerprint != opened(0.5).fingerprint


@pytest.mark.parametrize(
    "form",
    ["jsonl", "jsonl.gz", "-", "csv", "tsv", "json", "parquet", "folder", "splits", "JSONL", "Jsonl.GZ", "CSV", "TSV"],
)
def test_every_format_gives_the_same_examples(tmp_path, monkeypatch, form):
    dataset = labelled(write(tmp_path, form, monkeypatch))
    assert dataset.classes == ("maybe", "no", "yes")
    assert all_examples(dataset) == sorted(ROWS)
    assert {split: len(label_N) for split, (_, label_N) in dataset.splits.items()} == {"train": 18, "valid": 2}


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "folder"])
def test_a_byte_order_mark_is_dropped(tmp_path, monkeypatch, form):
    data = write(tmp_path, form, monkeypatch)
    for path in data.rglob("*.txt") if form == "folder" else [data]:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert all_examples(labelled(data)) == sorted(ROWS)


def test_a_byte_order_mark_of_standard_input_is_dropped(tmp_path, monkeypatch):
    content = b"\xef\xbb\xbf" + write(tmp_path, "jsonl", monkeypatch).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert all_examples(labelled("-")) == sorted(ROWS)


def test_a_quoted_cell_of_csv_may_have_line_ends(tmp_path):
    (tmp_path / "a.csv").write_text('text,label\n"so ""so""\nlines",yes\nbad,no\n')
    assert all_examples(labelled(tmp_path / "a.csv")) == [("bad", "no"), ('so "so"\nlines', "yes")]


def test_files_named_after_splits_are_those_splits(tmp_path):
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}", "label": {n}}}\n' for n in (10, 9)))
    dataset = labelled(tmp_path)
    assert dataset.classes == ("9", "10")  # integers are sorted as numbers
    assert {split: (list(x), y.tolist()) for split, (x, y) in dataset.splits.items()} == {
        "train": (["train"] * 2, [1, 0]),
        "valid": (["dev"] * 2, [1, 0]),
        "test": (["test"] * 2, [1, 0]),
    }


def test_the_held_out_indices_are_deterministic_and_spread():
    train, held_out = hold_out(1000, 0.1)
    assert sorted([*train, *held_out]) == list(range(1000))
    assert len(held_out) == 100
    assert np.array_equal(hold_out(1000, 0.1)[1], held_out)
    assert abs(held_out.mean() - 500) < 100


def test_columns_can_be_named(tmp_path):
    (tmp_path / "a.csv").write_text("review,stars\nfine,5\nbad,1\n")
    assert all_examples(labelled(tmp_path / "a.csv", column="review", label="stars")) == [("bad", "1"), ("fine", "5")]
    with pytest.raises(ValueError, match=r"no column 'text' \(it has review, stars\).*task\.column"):
        labelled(tmp_path / "a.csv", label="stars")
    with pytest.raises(ValueError, match=r"no column 'label' \(it has review, stars\).*task\.label"):
        labelled(tmp_path / "a.csv", column="review")


def test_sets_are_read_as_arrays_of_vectors(tmp_path):
    rows = [{"set": [[1, 2], [3, 4], [5, 6]], "label": "a"}, {"set": [[7, 8]], "label": "b"}] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = labelled(tmp_path / "a.jsonl", kind="sets")
    assert {one.shape for one in dataset.splits["train"][0]} | {dataset.splits["valid"][0][0].shape} == {(3, 2), (1, 2)}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", "", "has 0 examples for train; give at least 2"),
        ("a.jsonl", '{"text": "one line", "label": 1}', "has 1 examples for train; give at least 2"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "y", "label": 1}',
            "are of 1 class; give examples of at least",
        ),
        ("a.jsonl", '{"text": "x"}', "no column 'label'"),
        ("a.jsonl", '{"text": "x", "label": ""}', "'label' on line 1 of .* is ''; give a word"),
        ("a.jsonl", '{"text": "x", "label": null}', "'label' on line 1 of .* is null; fill it"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n\n{"text": null, "label": 1}',
            "'text' on line 3 of .* is null; fill it",
        ),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": 5, "label": 1}',
            "'text' on line 2 of .* is of type int; give a string",
        ),
        ("a.csv", "text,label\nx,1\ny,\n", "'label' on line 3 of .* is ''; give a word"),
        (
            "a.csv",
            "text;label\nx;1\n",
            "line 2 of .* has no column 'text' .*separate cells with a comma, not with a semicolon",
        ),
        ("a.csv", "text\tlabel\nx\t1\n", "has no column 'text' .*separate cells with a comma, not with a tab"),
        ("a.csv", "text;label\nx, y;1\n", "has 2 columns, but the header has 1; separate cells with a comma"),
        ("a.tsv", "text,label\nx,1\n", "has no column 'text' .*separate cells with a tab, not with a comma"),
        ("a.jsonl", '{"text;label": "x"}', "has no column 'text' .*did you mean text;label"),
        ("a.jsonl", '{"text": "x", "label": 1}\nnot json', "line 2 of .* is not JSON"),
        ("a.jsonl", "[1, 2]", "line 1 of .* is a list; give one JSON object per line"),
        ("a.csv", "text,label\nx,1\ny\n", "line 3 of .* has 1 columns, but the header has 2"),
        ("a.csv", 'text,label\n"x,1\n', "cannot be parsed: .*check its quotes"),
        ("a.txt", "just text", "has no labels; give .jsonl or .csv"),
        ("a.jsonl", b"\xff\xfe{}", "is not text in UTF-8: byte 0"),
    ],
)
def test_invalid_records_raise(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        labelled(tmp_path / name)


@pytest.mark.parametrize("value", ['"x"', "[]", "[1, 2]", "[[1], [2, 3]]", "[[1, 2, 3]]", "[[1, null]]", "[[1, NaN]]"])
def test_invalid_sets_raise(tmp_path, value):
    (tmp_path / "a.jsonl").write_text(f'{{"set": [[1, 2]], "label": 1}}\n{{"set": {value}, "label": 0}}')
    with pytest.raises(ValueError, match=r"'set' on line 2 of .* (is not a set|has NaN or infinite numbers)"):
        labelled(tmp_path / "a.jsonl", kind="sets")


def test_a_class_that_is_not_in_train_raises(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "x", "label": "a"}\n{"text": "y", "label": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "z", "label": "c"}\n')
    with pytest.raises(ValueError, match=r"the class 'c' of .* is in test but not in train"):
        labelled(tmp_path)


@pytest.mark.parametrize("files", [["test.jsonl"], ["notes.txt"]])
def test_a_folder_without_training_examples_raises(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text('{"text": "z", "label": "c"}\n')
    with pytest.raises(ValueError, match="has no training examples"):
        labelled(tmp_path)
