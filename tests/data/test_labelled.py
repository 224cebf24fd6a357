"""Labelled examples, images, graphs and pairs, from small files of each form; and what is refused."""

from __future__ import annotations

import csv
import gzip
import io
import json
import struct
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from everyformer.data import made
from everyformer.data.graphs import open_graph
from everyformer.data.images import open_images, open_pictures
from everyformer.data.labelled import hold_out, open_labelled
from everyformer.data.pairs import open_pairs
from everyformer.data.text import open_text

ROWS = [("good, fine", "yes"), ("so so\nlines", "maybe"), ("bad", "no"), ("awful", "no"), ("great", "yes")] * 4


def labelled(data, kind="text", column=None, label="label", valid=0.1):
    return open_labelled(None if data is None else str(data), kind, column, label, valid)


def everything(found):
    """All inputs with the names of their classes, over all splits."""
    pairs = [pair for inputs, label_N in found.splits.values() for pair in zip(inputs, label_N, strict=True)]
    return sorted((str(one), found.classes[label]) for one, label in pairs)


def write(folder, form, monkeypatch):
    """The rows in one of the forms in which people have them; what to give as data comes back."""
    if form.lower() in ("jsonl", "jsonl.gz", "-"):
        content = "\n".join(json.dumps({"text": text, "label": label}) for text, label in ROWS).encode()
        if form == "-":
            monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
            return "-"
        (folder / f"rows.{form}").write_bytes(gzip.compress(content) if form.lower().endswith("gz") else content)
    elif form.lower() in ("csv", "tsv"):
        with (folder / f"rows.{form}").open("w", newline="") as file:
            writer = csv.writer(file, delimiter="," if form.lower() == "csv" else "\t")
            writer.writerows([("text", "label"), *ROWS])
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
        lambda valid: open_pictures("pictures", valid),
    ],
    ids=["text", "pairs", "labelled", "graph", "pictures"],
)
def test_the_fingerprint_knows_what_is_held_out(tmp_path, monkeypatch, opened):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "csv", monkeypatch)
    graph = {"features": [[1, 0]] * 20, "edges": [[0, 1]], "labels": [0, 1] * 10, "train": list(range(20))}
    (tmp_path / "graph.json").write_text(json.dumps(graph))
    (tmp_path / "pictures").mkdir()
    for number in range(20):
        Image.new("L", (4, 4), number).save(tmp_path / "pictures" / f"{number}.png")
    assert opened(0.1).fingerprint == opened(0.1).fingerprint != opened(0.5).fingerprint


def test_the_fingerprint_of_a_graph_knows_its_own_splits(tmp_path):
    graph = {"features": [[1, 0]] * 6, "edges": [[0, 1]], "labels": [0, 1] * 3}
    found = set()
    for kept in (3, 4):
        given = graph | {"train": list(range(kept)), "val": list(range(kept, 6))}
        (tmp_path / "graph.json").write_text(json.dumps(given))
        found.add(open_graph(str(tmp_path / "graph.json"), 0.5).fingerprint)
    assert len(found) == 2


@pytest.mark.parametrize(
    "form", ["jsonl", "jsonl.gz", "-", "csv", "tsv", "folder", "splits", "JSONL", "Jsonl.GZ", "CSV", "TSV"]
)
def test_every_form_holds_the_same_examples(tmp_path, monkeypatch, form):
    found = labelled(write(tmp_path, form, monkeypatch))
    assert found.classes == ("maybe", "no", "yes")
    assert everything(found) == sorted(ROWS)
    assert {split: len(label_N) for split, (_, label_N) in found.splits.items()} == {"train": 18, "valid": 2}


@pytest.mark.parametrize("form", ["jsonl", "csv", "tsv", "folder"])
def test_a_byte_order_mark_is_not_part_of_the_examples(tmp_path, monkeypatch, form):
    data = write(tmp_path, form, monkeypatch)
    for path in data.rglob("*.txt") if form == "folder" else [data]:
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert everything(labelled(data)) == sorted(ROWS)


def test_standard_input_may_begin_with_a_byte_order_mark(tmp_path, monkeypatch):
    content = b"\xef\xbb\xbf" + write(tmp_path, "jsonl", monkeypatch).read_bytes()
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    assert everything(labelled("-")) == sorted(ROWS)


def test_splits_of_their_own_are_kept(tmp_path):
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}", "label": {n}}}\n' for n in (10, 9)))
    found = labelled(tmp_path)
    assert found.classes == ("9", "10")  # whole numbers are ordered as such
    assert {split: (list(x), y.tolist()) for split, (x, y) in found.splits.items()} == {
        "train": (["train"] * 2, [1, 0]),
        "valid": (["dev"] * 2, [1, 0]),
        "test": (["test"] * 2, [1, 0]),
    }


def test_validation_is_held_out_once_and_for_all():
    kept, held = hold_out(1000, 0.1)
    assert sorted([*kept, *held]) == list(range(1000))
    assert len(held) == 100
    assert np.array_equal(hold_out(1000, 0.1)[1], held)
    assert abs(held.mean() - 500) < 100  # spread over the whole


def test_columns_have_names_of_their_own(tmp_path):
    (tmp_path / "a.csv").write_text("review,stars\nfine,5\nbad,1\n")
    assert everything(labelled(tmp_path / "a.csv", column="review", label="stars")) == [("bad", "1"), ("fine", "5")]
    with pytest.raises(ValueError, match=r"no 'text' \(it has review, stars\).*task\.column"):
        labelled(tmp_path / "a.csv", label="stars")
    with pytest.raises(ValueError, match=r"no 'label' \(it has review, stars\).*task\.label"):
        labelled(tmp_path / "a.csv", column="review")


def test_sets_are_arrays_of_vectors(tmp_path):
    rows = [{"set": [[1, 2], [3, 4], [5, 6]], "label": "a"}, {"set": [[7, 8]], "label": "b"}] * 2
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = labelled(tmp_path / "a.jsonl", kind="sets")
    assert {one.shape for one in found.splits["train"][0]} | {found.splits["valid"][0][0].shape} == {(3, 2), (1, 2)}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", "", "has 0 examples for train; give at least 2"),
        ("a.jsonl", '{"text": "one line", "label": 1}', "has 1 examples for train; give at least 2"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n{"text": "y", "label": 1}',
            "of 1 class; give examples of at least two",
        ),
        ("a.jsonl", '{"text": "x"}', "no 'label'"),
        ("a.jsonl", '{"text": "x", "label": ""}', "'label' on line 1 of .* is ''; give a word"),
        ("a.jsonl", '{"text": "x", "label": null}', "'label' on line 1 of .* is null; fill it"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1}\n\n{"text": null, "label": 1}',
            "'text' on line 3 of .* is null; fill it",
        ),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": 5, "label": 1}', "'text' on line 2 of .* is a int; give text"),
        ("a.csv", "text,label\nx,1\ny,\n", "'label' on line 3 of .* is ''; give a word"),
        ("a.csv", "text;label\nx;1\n", "line 2 of .* has no 'text' .*must be a comma, not a semicolon"),
        ("a.csv", "text\tlabel\nx\t1\n", "has no 'text' .*must be a comma, not a tab"),
        ("a.csv", "text;label\nx, y;1\n", "has 2 columns, its header 1; the separator must be a comma"),
        ("a.tsv", "text,label\nx,1\n", "has no 'text' .*must be a tab, not a comma"),
        ("a.jsonl", '{"text;label": "x"}', "has no 'text' .*did you mean text;label"),
        ("a.jsonl", '{"text": "x", "label": 1}\nnot json', "line 2 of .* is not JSON"),
        ("a.jsonl", "[1, 2]", "line 1 of .* is a list; give one JSON object a line"),
        ("a.csv", "text,label\nx,1\ny\n", "line 3 of .* has 1 columns, its header 2"),
        ("a.csv", 'text,label\n"x,1\n', "cannot be read: .*check its quotes"),
        ("a.txt", "just text", "does not tell the classes of its examples; give .jsonl or .csv"),
        ("a.jsonl", b"\xff\xfe{}", "is not text in UTF-8: byte 0"),
    ],
)
def test_bad_records_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        labelled(tmp_path / name)


@pytest.mark.parametrize("given", ['"x"', "[]", "[1, 2]", "[[1], [2, 3]]", "[[1, 2, 3]]", "[[1, null]]", "[[1, NaN]]"])
def test_bad_sets_are_refused(tmp_path, given):
    (tmp_path / "a.jsonl").write_text(f'{{"set": [[1, 2]], "label": 1}}\n{{"set": {given}, "label": 0}}')
    with pytest.raises(ValueError, match=r"'set' on line 2 of .* (is not a set|has a number that is not finite)"):
        labelled(tmp_path / "a.jsonl", kind="sets")


def test_a_class_only_in_the_test_set_is_named(tmp_path):
    (tmp_path / "train.jsonl").write_text('{"text": "x", "label": "a"}\n{"text": "y", "label": "b"}\n')
    (tmp_path / "test.jsonl").write_text('{"text": "z", "label": "c"}\n')
    with pytest.raises(ValueError, match=r"the class 'c' of .* is in test but not in train"):
        labelled(tmp_path)


@pytest.mark.parametrize("files", [["test.jsonl"], ["notes.txt"]])
def test_a_folder_without_training_examples_is_named(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text('{"text": "z", "label": "c"}\n')
    with pytest.raises(ValueError, match="has no training examples"):
        labelled(tmp_path)


# images


def idx(array):
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def idx_files(folder, images=12, labels=12):
    image_NYX = np.arange(images * 20, dtype=np.uint8).reshape(images, 4, 5)
    for split in ("train", "t10k"):
        (folder / f"{split}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(image_NYX)))
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(idx(np.arange(labels, dtype=np.uint8) % 3))
    return image_NYX


def test_idx_files_are_read(tmp_path):
    image_NYX = idx_files(tmp_path)
    found = open_images(str(tmp_path), 0.25)
    test, label_N = found.splits["test"]
    assert np.array_equal(test, image_NYX[:, None])
    assert label_N.tolist() == [n % 3 for n in range(12)]
    assert found.classes == ("0", "1", "2")
    assert (len(found.splits["train"][1]), len(found.splits["valid"][1])) == (9, 3)


@pytest.mark.parametrize("mode, channels", [("L", 1), ("RGB", 3), ("1", 1)])
def test_a_folder_of_images_is_read(tmp_path, mode, channels):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(4):
            colour = 255 if name == "dog" else 0
            image = Image.new(mode, (6, 4), colour if mode != "RGB" else (colour, number, 7))
            image.save(tmp_path / name / f"{number}.png")
    found = open_images(str(tmp_path), 0.25)
    images, label_N = found.splits["train"]
    image_NCYX = np.asarray(images)
    assert image_NCYX.shape == (6, channels, 4, 6)
    assert found.classes == ("cat", "dog")
    assert np.array_equal(image_NCYX[:, 0].mean((1, 2)), label_N * 255)


def test_bad_images_are_refused(tmp_path):
    for name, size in {"cat": (6, 4), "dog": (6, 5)}.items():
        (tmp_path / name).mkdir()
        Image.new("L", size).save(tmp_path / name / "1.png")
    with pytest.raises(ValueError, match=r"dog/1\.png has 6 x 5 points, others 6 x 4; resize"):
        open_images(str(tmp_path), 0.1)
    (tmp_path / "dog" / "1.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"dog/1\.png cannot be read as an image"):
        open_images(str(tmp_path), 0.1)


def test_bad_idx_files_are_refused(tmp_path):
    idx_files(tmp_path, labels=11)
    with pytest.raises(ValueError, match=r"12 images, 11 labels for .*; give as many"):
        open_images(str(tmp_path), 0.1)
    path = tmp_path / "train-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="train-labels-idx1-ubyte is not a whole idx file"):
        open_images(str(tmp_path), 0.1)


# graphs

GRAPH = {
    "num_features": 4,
    "features": [[0, 1], [1], [2, 3], [3]],
    "labels": [0, 0, 1, 1],
    "edges": [[0, 1], [2, 3]],
    "train": [0, 2],
    "val": [1],
    "test": [3],
}


def graph(folder, **changes):
    tree = {name: value for name, value in (GRAPH | changes).items() if value is not None}
    (folder / "graph.json").write_text(json.dumps(tree))
    return open_graph(str(folder / "graph.json"), 0.5)


@pytest.mark.spec(71)
def test_edges_go_both_ways_and_to_the_node_itself(tmp_path):
    found = graph(tmp_path)
    assert found.edge_NN.tolist() == [
        [True, True, False, False],
        [True, True, False, False],
        [False, False, True, True],
        [False, False, True, True],
    ]
    assert found.feature_NF.tolist() == [[0.5, 0.5, 0, 0], [0, 1, 0, 0], [0, 0, 0.5, 0.5], [0, 0, 0, 1]]
    assert {split: node_N.tolist() for split, node_N in found.splits.items()} == {
        "train": [0, 2],
        "valid": [1],
        "test": [3],
    }


def test_features_may_be_numbers(tmp_path):
    found = graph(tmp_path, num_features=None, features=[[1, -2.5], [0, 1], [3, 3], [0, 0]])
    assert found.feature_NF.tolist() == [[1, -2.5], [0, 1], [3, 3], [0, 0]]


def test_a_graph_without_validation_nodes_holds_some_out(tmp_path):
    found = graph(tmp_path, val=None, test=None, train=[0, 1, 2, 3])
    assert sorted([*found.splits["train"], *found.splits["valid"]]) == [0, 1, 2, 3]
    assert len(found.splits["valid"]) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"labels": None}, "has no labels; a graph needs"),
        ({"labels": [0, 1]}, "has 4 nodes and 2 labels"),
        ({"edges": [[0, 4]]}, "edges of .* must be whole numbers from 0 to 3"),
        ({"edges": [[0, 1, 2]]}, "edges of .* give pairs"),
        ({"train": [-1, 2]}, "train of .* must be whole numbers from 0 to 3"),
        ({"train": [0]}, "has 1 nodes for training"),
        ({"features": [[0], [9], [1], [1]]}, "features of .* must be whole numbers from 0 to 3"),
        ({"num_features": None}, "features of .* are not rows of as many"),
        ({"labels": [[1, 0], [1, 0], [0, 1], [0, 1]]}, r"the label of node 0 of .* is \[1, 0\]; give the word or"),
        ({"labels": [0, 1, None, 1]}, "the label of node 2 of .* is None; give"),
        ({"labels": [0, 1, float("nan"), 1]}, "the label of node 2 of .* is nan; give"),
        ({"labels": "abba"}, "labels of .* is 'abba'; give a list"),
        ({"labels": [7, 7, 7, 7]}, "has only the class 7; give nodes of at least two"),
        ({"features": 5}, "features of .* is 5; give a list"),
        ({"features": [0, 1, 2, 3]}, r"features of .* has the shape \(\); give a list of whole numbers"),
        ({"num_features": "5"}, "num_features of .* is '5'; give a whole number from 1 on"),
        ({"num_features": 0}, "num_features of .* is 0; give a whole number from 1 on"),
        ({"edges": [[0, 1.5]]}, "edges of .* must be whole numbers from 0 to 3"),
        ({"edges": [[0, 10**400]]}, "edges of .* must be whole numbers from 0 to 3"),
        ({"train": 3}, r"train of .* has the shape \(\); give a list"),
        ({"train": [[0], [2]]}, r"train of .* has the shape \(2, 1\); give a list"),
        ({"val": []}, "val of .* has no nodes; give some, or leave it out"),
        ({"test": []}, "test of .* has no nodes; give some, or leave it out"),
        ({"val": [1, 2]}, "node 2 of .* is in train and again in val; leave it in one place"),
        ({"test": [3, 1]}, "node 1 of .* is in val and again in test; leave it in one place"),
        ({"train": [0, 2, 0]}, "node 0 of .* is in train and again in train; leave it in one place"),
    ],
)
def test_bad_graphs_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        graph(tmp_path, **changes)


@pytest.mark.parametrize("key", ["features", "labels", "edges", "train"])
def test_a_null_in_a_graph_is_nothing(tmp_path, key):
    (tmp_path / "graph.json").write_text(json.dumps(GRAPH | {key: None}))
    with pytest.raises(ValueError, match=f"has no {key}; a graph needs"):
        open_graph(str(tmp_path / "graph.json"), 0.5)


def test_a_graph_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "graph.json").write_text("\ufeff" + json.dumps(GRAPH))
    assert open_graph(str(tmp_path / "graph.json"), 0.5).fingerprint == graph(tmp_path).fingerprint


def test_a_graph_does_not_come_from_standard_input():
    with pytest.raises(ValueError, match="a graph cannot come from standard input; give a JSON file"):
        open_graph("-", 0.5)


# pairs

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


WAYS = {
    "plain": lambda raw: raw,
    "windows": lambda raw: raw.replace(b"\n", b"\r\n"),
    "marked": lambda raw: b"\xef\xbb\xbf" + raw,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", ["folder", "tsv", "jsonl", "csv"])
def test_every_form_holds_the_same_pairs(tmp_path, form, way):
    data = pair_file(tmp_path, form)
    for path in data.iterdir() if form == "folder" else [data]:
        path.write_bytes(WAYS[way](path.read_bytes()))
    found = open_pairs(str(data), "en", "de", 0.25)
    if form == "folder":
        assert found.splits == {"train": SIDES, "valid": (["five"], ["fünf"])}
    else:
        every = [pair for sides in found.splits.values() for pair in zip(*sides, strict=True)]
        assert sorted(every) == sorted(zip(*SIDES, strict=True))
        assert len(found.splits["valid"][0]) == 1


@pytest.mark.parametrize("form", ["tsv", "jsonl", "csv"])
def test_the_case_of_an_ending_changes_nothing(tmp_path, form):
    data = pair_file(tmp_path, form)
    found = open_pairs(str(data), "en", "de", 0.25)
    assert open_pairs(str(data.rename(tmp_path / f"PAIRS.{form.upper()}")), "en", "de", 0.25).splits == found.splits


@pytest.mark.parametrize("data", ["a.tsv", "-"])
def test_blank_lines_between_pairs_are_skipped(tmp_path, monkeypatch, data):
    content = b"\xef\xbb\xbfone\teins\r\n\r\n\t\r\n\xef\xbb\xbftwo\tzwei\r\n\r\n"
    (tmp_path / "a.tsv").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    found = open_pairs(str(tmp_path / data) if data != "-" else data, "en", "de", 0.5)
    every = [pair for sides in found.splits.values() for pair in zip(*sides, strict=True)]
    assert sorted(every) == [("one", "eins"), ("\ufefftwo", "zwei")]


def test_the_direction_can_be_turned(tmp_path):
    found = open_pairs(str(pair_file(tmp_path, "folder")), "de", "en", 0.25)
    assert found.splits["train"] == (SIDES[1], SIDES[0])
    embedded = open_pairs(None, "en", "de", 0.1).splits["valid"]
    assert open_pairs(None, "de", "en", 0.1).splits["valid"] == (embedded[1], embedded[0])


@pytest.mark.parametrize(
    "files, message",
    [
        ({"train.en": "a\nb\nc", "train.de": "x\ny"}, r"train\.en of .* has 3 lines, train\.de 2; line n of one"),
        ({"train.en": "a\nb"}, r"has no train\.en and train\.de \(it has train\.en\)"),
        ({"train.en": "a", "train.de": "x"}, "has 1 pair for training; give at least 2"),
        ({"train.en": "a\n\nc", "train.de": "x\ny\nz"}, "pair 2 of train of .* has an empty side"),
        ({"train.en": b"\xff\xff", "train.de": "x"}, r"train\.en is not text in UTF-8"),
    ],
)
def test_bad_pairs_are_refused(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        open_pairs(str(tmp_path), "en", "de", 0.1)


def test_a_line_without_a_tab_is_named(tmp_path):
    (tmp_path / "a.tsv").write_text("one\teins\n\ntwo zwei\n")
    with pytest.raises(ValueError, match=r"line 3 of .* has 1 columns; give source, tab, target"):
        open_pairs(str(tmp_path / "a.tsv"), "en", "de", 0.1)


# the embedded sets


def test_passages_are_from_nine_plays():
    texts, names = made.plays()["train"]
    assert set(names) == set(made.PLAYS)
    found = dict(zip(texts, names, strict=True))
    assert {name for text, name in found.items() if "wherefore art thou Romeo" in text} == {"Romeo and Juliet"}
    assert {name for text, name in found.items() if "My kingdom for a horse" in text.replace("my", "My")} == {
        "Richard III"
    }


def test_generated_sets_are_always_the_same_and_even():
    for make in (made.sets, made.shapes):
        (one, names), (other, _) = make()["train"], make()["train"]
        assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        counts = np.unique(names, return_counts=True)[1]
        assert counts.min() > 0.8 * counts.mean()
    assert made.communities() == made.communities()


def test_sets_are_labelled_by_the_centre_with_the_most_points():
    sets, labels = made.sets()["train"]
    nearest = [np.bincount(one.argmax(1), minlength=3).argmax() for one in sets]
    assert np.mean(np.array(nearest) == labels) > 0.85  # but for points that fell nearer to another centre


def test_sentences_are_german():
    english, german = made.sentences()["train"]
    assert len(set(english)) == 5000
    for one, other in zip(english, german, strict=True):
        verb = next(made.DOES[word] for word in one.split() if word in made.DOES)
        assert other.split()[1 if other.startswith(("heute", "oft")) else 2] == verb
        assert ("twenty-two" in one) == ("zweiundzwanzig" in other)
