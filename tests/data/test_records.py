"""The header of a table is recognised, quotes in TSV are text, and token ids are read from every format."""

from __future__ import annotations

import json

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from everyformer.data.labelled import open_labelled
from everyformer.data.records import is_records, open_records, read_records
from everyformer.data.text import open_text
from everyformer.data.tokenizer import TokenIds, load


def labelled(path, numbers=False, column=None, label="label"):
    return open_labelled(str(path), "text", column, label, 0.25, numbers)


def examples(data):
    pairs = [pair for inputs, label_N in data.splits.values() for pair in zip(inputs, label_N, strict=True)]
    return sorted((text, data.classes[label] if data.classes else label) for text, label in pairs)


ROWS = [("fine", "pos"), ("bad", "neg"), ("good", "pos"), ("awful", "neg")]


@pytest.mark.parametrize("form", ["csv", "tsv"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["text first", "label first"])
def test_a_table_without_a_header_keeps_its_first_line_and_says_so(tmp_path, form, order):
    """The label is the column with fewer different cells."""
    separator = "," if form == "csv" else "\t"
    lines = [separator.join((row[order[0]], row[order[1]])) for row in ROWS]
    (tmp_path / f"a.{form}").write_text("\n".join(lines))
    data = labelled(tmp_path / f"a.{form}")
    assert examples(data) == sorted(ROWS)
    assert f"column {order.index(0) + 1} is the input and column {order.index(1) + 1} the label" in data.notes[0]


def test_numbers_of_a_table_without_a_header_are_the_labels(tmp_path):
    (tmp_path / "a.tsv").write_text("1.5\tx\n2.5\ty\n3.5\tx\n4.5\tz\n")
    data = labelled(tmp_path / "a.tsv", numbers=True)
    assert examples(data) == sorted([("x", 1.5), ("y", 2.5), ("x", 3.5), ("z", 4.5)])


@pytest.mark.parametrize(
    "first, rest, has_header",
    [
        ("review,stars", "fine,5\nbad,1", True),  # a word above numbers
        ("text,label", "1,2\n3,4", True),  # a name that is looked for
        ("Text,Class", "x,y\nz,w", True),
        ("fine,5", "bad,1\nso so,3", False),  # a number
        ("fine,pos", "bad,neg\ngood,pos", False),  # a cell that occurs again
        ("one,two", "three,four\nfive,six", True),  # nothing shows what it is
    ],
)
def test_a_header_is_told_from_an_example(tmp_path, first, rest, has_header):
    from everyformer.data.records import names_any

    (tmp_path / "a.csv").write_text(f"{first}\n{rest}\n")
    table = open_records(tmp_path / "a.csv", names_any("text", "label"))
    assert table.has_header == has_header
    assert table.columns == (tuple(first.split(",")) if has_header else ("1", "2"))
    assert len(list(table.records)) == 3 - has_header


def test_columns_without_a_header_have_numbers_as_names(tmp_path):
    (tmp_path / "a.csv").write_text("7,fine,pos\n8,bad,neg\n9,good,pos\n9,awful,neg\n")
    with pytest.raises(ValueError, match=r"has no header and 3 columns; name the input with task\.column=1"):
        labelled(tmp_path / "a.csv")
    data = labelled(tmp_path / "a.csv", column="2", label="3")
    assert examples(data) == sorted(ROWS)
    (tmp_path / "c.csv").write_text("one,two\nthree,four\n")  # nothing but the settings shows what the first line is
    assert examples(labelled(tmp_path / "c.csv", column="2", label="1")) == [("four", "three"), ("two", "one")]
    (tmp_path / "b.tsv").write_text("again\nother\nagain\n")
    assert bytes(open_text(str(tmp_path / "b.tsv"), (0.5, 0.5)).splits["train"]) == b"again\nother\n"
    with pytest.raises(ValueError, match=r"has no header and 3 columns; name the text with task\.column=1"):
        open_text(str(tmp_path / "a.csv"))


def test_the_shards_of_a_split_are_read_together(tmp_path):
    for name, rows in {"train-00000-of-00002": ROWS[:2], "train-00001-of-00002": ROWS[2:], "test": ROWS[:1]}.items():
        texts, labels = zip(*rows, strict=True)
        table = pyarrow.table({"text": list(texts), "label": list(labels)})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    data = labelled(tmp_path)
    assert {split: len(label_N) for split, (_, label_N) in data.splits.items()} == {"train": 3, "valid": 1, "test": 1}


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.parquet", b"PAR1 broken", r"a\.parquet cannot be read as Parquet .*write it again"),
        ("a.json", b"[1, 2", r"a\.json is not JSON"),
        ("a.json", b'[{"text": "x", "label": 1}, "y"]', "item 2 of .* is a str; give one JSON object"),
        ("a.npy", b"broken", r"a\.npy cannot be read as an array"),
        ("a.jsonl", b'{"text": [1, 2]}\n{"text": "x"}', "'text' on line 2 of .* is not a list of token ids"),
    ],
)
def test_damaged_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        open_text(str(tmp_path / name)) if name != "a.json" else labelled(tmp_path / name)


def test_json_is_records_only_if_it_is_a_list(tmp_path):
    (tmp_path / "list.json").write_text(' \n[{"text": "x"}]')
    (tmp_path / "graph.json").write_text('{"edges": []}')
    assert is_records(tmp_path / "list.json") and not is_records(tmp_path / "graph.json")
    assert [record.cells for record in read_records(tmp_path / "list.json")] == [{"text": "x"}]


@pytest.mark.parametrize("form", ["npy", "rows.npy", "json", "lists.json", "jsonl", "parquet"])
def test_token_ids_are_read_from_every_format(tmp_path, form):
    id_N, path = np.arange(40) % 7 + 300, tmp_path / f"ids.{form}"
    rows = id_N.reshape(4, 10).tolist()
    if form.endswith("npy"):
        np.save(path, np.array(rows) if form == "rows.npy" else id_N)
    elif form == "parquet":
        parquet.write_table(pyarrow.table({"text": rows}), path)
    else:
        tree = {"json": id_N.tolist(), "lists.json": rows, "jsonl": rows}[form]
        path.write_text("\n".join(json.dumps({"text": row}) for row in rows) if form == "jsonl" else json.dumps(tree))
    text = open_text(str(path), (0.5, 0.5))
    assert text.is_token_ids
    assert [*text.splits["train"].tolist(), *text.splits["valid"].tolist()] == id_N.tolist()
    assert len(text.starts["train"]) == (1 if form in ("npy", "json") else 2)
    with pytest.raises(ValueError, match="has token ids; only the tasks language, classify and regress read them"):
        next(text.chunks("train"))


def test_ids_beyond_those_of_training_are_refused(tmp_path):
    TokenIds(5).save(tmp_path)
    tokenizer = load(tmp_path)
    assert tokenizer.encode(b"0 4 2").tolist() == [0, 4, 2] and tokenizer.decode([0, 4]) == "0 4 "
    with pytest.raises(ValueError, match="the token ids 1 to 5 are not all below 5"):
        tokenizer.encode(b"1 5")
    with pytest.raises(ValueError, match=r"'hello' has no token ids; give numbers"):
        tokenizer.encode(b"hello")
