"""Tables of Arrow in every form give the same examples, and a data set that `datasets` saved keeps its splits and class names."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import feather, ipc, parquet

from everyformer.data.inputs import read_inputs
from everyformer.data.labelled import open_labelled
from everyformer.data.pairs import open_pairs
from everyformer.data.records import is_records, read_records
from everyformer.data.text import open_text
from everyformer.task.classify import Classify, Regress, kind_of
from everyformer.train import Recipe, load, train
from tests.task.members import features

ROWS: list[dict[str, Any]] = [{"text": f"film {n}", "label": n % 2} for n in range(8)]
NAMES = ["neg", "pos"]
FEATURES = {"text": {"dtype": "string", "_type": "Value"}, "label": {"names": NAMES, "_type": "ClassLabel"}}


def table(rows, described=True):
    metadata = {"huggingface": json.dumps({"info": {"features": FEATURES}})} if described else None
    schema = pyarrow.schema([("text", pyarrow.string()), ("label", pyarrow.int64())], metadata=metadata)
    return pyarrow.Table.from_pylist(rows, schema=schema)


def write(path, rows, described=True):
    data = table(rows, described)
    if path.suffix == ".parquet":
        parquet.write_table(data, path)
    elif path.suffix == ".feather":
        feather.write_feather(data, path, compression="lz4")
    else:
        kind = ipc.new_file if path.stem == "file" else ipc.new_stream
        with kind(path, data.schema) as writer:
            writer.write_table(data, max_chunksize=3)


def save_to_disk(folder, splits):
    """As `datasets` does: dataset_dict.json, and of each split the Arrow streams that state.json names."""
    if set(splits) != {""}:
        folder.mkdir(parents=True)
        (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    for split, rows in splits.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        names = [f"data-{n:05}-of-00002.arrow" for n in range(2)]
        for n, name in enumerate(names):
            write(folder / split / name, rows[n * len(rows) // 2 : (n + 1) * len(rows) // 2])
        state = {"_data_files": [{"filename": name} for name in names], "_split": split or "train"}
        (folder / split / "state.json").write_text(json.dumps(state))
        (folder / split / "dataset_info.json").write_text(json.dumps({"features": FEATURES}))
        write(folder / split / "cache-1234.arrow", ROWS[:1])  # of an earlier map(): no part of the data set


@pytest.mark.parametrize("name", ["a.parquet", "file.arrow", "stream.arrow", "a.feather"])
@pytest.mark.parametrize("described", [True, False])
def test_every_form_has_the_same_records(tmp_path, name, described):
    write(tmp_path / name, ROWS, described)
    expected = [row | {"label": NAMES[row["label"]]} for row in ROWS] if described else ROWS
    assert is_records(tmp_path / name) and [one.cells for one in read_records(tmp_path / name)] == expected


def test_a_saved_data_set_of_several_splits_keeps_them_and_the_names_of_its_classes(tmp_path):
    save_to_disk(tmp_path / "set", {"train": ROWS[:4], "validation": ROWS[4:6], "test": ROWS[6:], "unsupervised": ROWS})
    data = open_labelled(str(tmp_path / "set"), "text", None, "label", 0.25)
    assert data.classes == ("neg", "pos")
    assert {split: list(texts) for split, (texts, _) in data.splits.items()} == {
        "train": [f"film {n}" for n in range(4)], "valid": ["film 4", "film 5"], "test": ["film 6", "film 7"]
    }  # fmt: skip
    text = open_text(str(tmp_path / "set"))
    assert bytes(text.splits["valid"]) == b"film 4\nfilm 5\n" and len(text.starts["train"]) == 4
    assert kind_of(str(tmp_path / "set"), None) == "text"


def test_a_saved_data_set_of_one_split_is_training_data(tmp_path):
    save_to_disk(tmp_path / "set", {"": ROWS})
    data = open_labelled(str(tmp_path / "set"), "text", None, "label", 0.25)
    assert {split: len(label_N) for split, (_, label_N) in data.splits.items()} == {"train": 6, "valid": 2}
    (tmp_path / "set" / "state.json").write_text("[]")
    with pytest.raises(ValueError, match=r"state\.json is not what datasets\.save_to_disk writes"):
        open_text(str(tmp_path / "set"))


def test_a_saved_data_set_is_predicted(tmp_path):
    save_to_disk(tmp_path / "saved", {"train": ROWS[:4], "test": ROWS[4:]})
    inputs = read_inputs(str(tmp_path / "saved"), "text", ("text",))
    assert inputs.total == 8 and {(cells["label"], text) for cells, text in inputs.rows} == {
        (NAMES[row["label"]], row["text"]) for row in ROWS
    }
    assert [text for _, text in read_inputs(str(tmp_path / "saved/test"), "text", ("text",)).rows] == [
        row["text"] for row in ROWS[4:]
    ]


@pytest.mark.parametrize("nested", [False, True])
def test_a_saved_data_set_of_pairs_is_read(tmp_path, nested):
    for split, words in {"train": "abc", "test": "xy"}.items():
        rows = [{"en": word, "de": word.upper()} for word in words]
        (tmp_path / split).mkdir()
        data = pyarrow.Table.from_pylist([{"translation": row} for row in rows] if nested else rows)
        with ipc.new_stream(tmp_path / split / "data-00000-of-00001.arrow", data.schema) as writer:
            writer.write_table(data)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (tmp_path / split / "state.json").write_text(json.dumps(state))
    (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    pairs = open_pairs(str(tmp_path), "en", "de", 0.34)
    assert pairs.splits["test"] == (["x", "y"], ["X", "Y"])
    assert {split: len(sides[0]) for split, sides in pairs.splits.items()} == {"train": 2, "valid": 1, "test": 2}
    read = read_inputs(str(tmp_path / "test"), "text", ("en",)).rows
    assert list(read) == [({"en": "x", "de": "X"}, "x"), ({"en": "y", "de": "Y"}, "y")]


def test_an_image_inside_a_record_is_refused_in_a_sentence(tmp_path):
    rows = [{"image": {"bytes": b"\x89PNG" * 1000, "path": "1.png"}}]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="is of type dict; save the images as files") as refused:
        read_inputs(str(tmp_path / "a.parquet"), "images", ("image",))
    assert len(str(refused.value)) < 300


def test_an_unknown_label_is_null(tmp_path):
    write(tmp_path / "a.arrow", [*ROWS, {"text": "x", "label": -1}])
    with pytest.raises(ValueError, match=r"'label' on row 9 of .* is null"):
        open_labelled(str(tmp_path / "a.arrow"), "text", None, "label", 0.25)


@pytest.mark.parametrize("name", ["a.arrow", "a.feather"])
def test_a_damaged_file_is_named(tmp_path, name):
    write(tmp_path / name, ROWS)
    whole = (tmp_path / name).read_bytes()
    for content in (b"", b"broken", whole[: len(whole) // 2]):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} cannot be read as Arrow .*write it again"):
            list(read_records(tmp_path / name))


@pytest.mark.parametrize("numbers", [False, True], ids=["classify", "regress"])
def test_arrays_of_features_are_learned_and_predicted(tmp_path, numbers):
    rng = np.random.default_rng(0)
    feature_NF = rng.normal(size=(40, 3))
    label_N = feature_NF[:, 0] if numbers else np.where(feature_NF[:, 0] > 0, "up", "down")
    for split in ("train", "test"):
        (tmp_path / "arrays" / split).mkdir(parents=True)
        np.save(tmp_path / "arrays" / split / "features.npy", feature_NF)
        np.save(tmp_path / "arrays" / split / "labels.npy", label_N)
    task = Regress() if numbers else Classify()
    data = task.open(str(tmp_path / "arrays"))
    assert {split: data.rows[split] for split in ("train", "valid", "test")} == {"train": 36, "valid": 4, "test": 40}
    assert np.array_equal(data.labelled.splits["test"][0][3], feature_NF[3:4].astype(np.float32))


def test_a_run_on_arrays_of_features_predicts_new_ones(tmp_path):
    feature_NF = np.random.default_rng(0).normal(size=(40, 3))
    np.save(tmp_path / "features.npy", feature_NF)
    np.save(tmp_path / "labels.npy", (feature_NF[:, 0] > 0).astype(int))
    settings = ("run.steps=2", "run.batch=8", "run.evaluate=0", "run.device=cpu")
    train(Recipe.of(features(inputs=3), *settings, data=tmp_path), tmp_path / "run")
    model = load(tmp_path / "run")
    rows = list(model.task.inference.read_inputs(str(tmp_path / "features.npy")).rows)
    assert len(rows) == 40 and len(model.predict([x_TF for _, x_TF in rows]).values) == 40


@pytest.mark.parametrize(
    ("features", "labels", "message"),
    [
        (np.zeros((3, 2)), np.zeros(2), r"labels\.npy has the shape \(2,\), but .* has 3 examples"),
        (np.zeros(3), np.zeros(3), r"features\.npy has float64 of the shape \(3,\); give numbers, as rows N x F"),
        (np.full((3, 2), np.nan), np.zeros(3), r"features\.npy has NaN or infinite numbers"),
        (np.zeros((3, 2)), None, r"there is no .*labels\.npy"),
    ],
)
def test_wrong_arrays_are_named(tmp_path, features, labels, message):
    np.save(tmp_path / "features.npy", features)
    if labels is not None:
        np.save(tmp_path / "labels.npy", labels)
    with pytest.raises(ValueError, match=message):
        Classify().open(str(tmp_path))
