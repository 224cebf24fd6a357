"""`everyformer predict` writes a table of predictions for every kind of input, in the order of the examples."""

from __future__ import annotations

import csv
import io
import json
import shlex
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from everyformer.cli import predict as command
from everyformer.cli.main import main
from everyformer.train import load

FEW = ("run.steps=2", "run.batch=4", "run.evaluate=0", "run.save=0")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a run of each kind, and files to predict."""
    folder = tmp_path_factory.mktemp("runs")
    rows = [("good " * (n % 5 + 1), "pos") if n % 2 else ("bad " * (n % 7 + 1), "neg") for n in range(20)]
    (folder / "rows.csv").write_text("text,label\n" + "\n".join(",".join(row) for row in rows))
    (folder / "pairs.tsv").write_text("\n".join(f"the {n} apples\tdie {n} Äpfel" for n in range(8)))
    for name, color in {"red": (200, 0, 0), "blue": (0, 0, 200)}.items():
        (folder / "photos" / name).mkdir(parents=True)
        for number in range(5):
            Image.new("RGB", (9 + number, 9), color).save(folder / "photos" / name / f"{number}.png")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("EVERYFORMER_CACHE", str(folder / "cache"))
        for words in (
            ["byte-classifier", "--data", "rows.csv", "--out", "text", "task.tokenizer=bytes"],
            ["vit", "--data", "photos", "--out", "images"],
            ["graph-classifier", "--out", "graph"],
            ["transformer", "--data", "pairs.tsv", "--out", "pairs", "task.vocabulary=300", "task.beam=1"],
            ["byte-language", "--data", "rows.csv", "--out", "language"],
        ):
            assert main(["train", *words, "--size", "tiny", *FEW]) == 0
    return folder


@pytest.fixture
def place(runs, monkeypatch):
    monkeypatch.chdir(runs)
    monkeypatch.setenv("EVERYFORMER_CACHE", str(runs / "cache"))
    return runs


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_has_the_cells_the_class_and_its_probabilities(place, monkeypatch):
    """In chunks, and equal to the predictions of each text alone."""
    monkeypatch.setattr(command, "CHUNK", 3)
    texts = ["good", "bad, very bad", 'so "so"', "a much longer text than the others " * 3, "", "bad", "good good"]
    with open("new.csv", "w", newline="") as file:
        csv.writer(file).writerows([("id", "text"), *enumerate(texts)])
    assert main(["predict", "text", "--data", "new.csv", "--out", "out.csv"]) == 0
    rows, run = read(place / "out.csv"), load("text")
    assert list(rows[0]) == ["id", "text", "prediction", "probability", "p(neg)", "p(pos)"]
    assert [row["text"] for row in rows] == texts
    for row, text in zip(rows, texts, strict=True):
        alone = run.predict([text])
        assert row["prediction"] == alone.values[0] == alone.classes[alone.probabilities[0].argmax()]
        assert float(row["p(pos)"]) == pytest.approx(float(alone.probabilities[0, 1]), abs=1e-5)
        assert float(row["probability"]) == max(float(row["p(neg)"]), float(row["p(pos)"]))


def test_every_form_of_output_has_the_same_predictions(place):
    for name in ("out.csv", "out.tsv", "out.jsonl", "out.txt"):
        assert main(["predict", "text", "--data", "rows.csv", "--out", name, "--limit", "4"]) == 0
    expected = [row["prediction"] for row in read(place / "out.csv")]
    assert len(expected) == 4 == len(set(range(4)))
    assert [line.split("\t")[2] for line in (place / "out.tsv").read_text().splitlines()[1:]] == expected
    assert [json.loads(line)["prediction"] for line in (place / "out.jsonl").read_text().splitlines()] == expected
    assert (place / "out.txt").read_text().splitlines() == expected


def test_lines_of_standard_input_are_predicted(place, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"good\n\nbad\r\n")))
    assert main(["predict", "text"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["text"] for row in rows] == ["good", "bad"]


def test_an_image_and_a_folder_of_images_are_predicted(place, capsys):
    assert main(["predict", "images", "--data", "photos/red/3.png"]) == 0
    alone = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert main(["predict", "images", "--data", "photos", "--out", "out.csv"]) == 0
    rows = read(place / "out.csv")
    assert len(rows) == 10 and {row["file"]: row for row in rows}["photos/red/3.png"] == alone[0]
    run = load("images")
    array = np.asarray(Image.open("photos/red/3.png").resize((28, 28), box=(1, 0, 10, 9)))
    assert float(run.predict([array]).probabilities.max()) == pytest.approx(float(alone[0]["probability"]), abs=1e-5)
    with pytest.raises(ValueError, match="input 1 is an array of uint8 of the shape"):
        run.predict([array[:5]])


def test_images_are_normalized_as_in_training(place):
    """A run that is opened without its data predicts as one with them."""
    paths = [f"photos/blue/{n}.png" for n in range(5)]
    with_data, without = (load("images", data=data).predict(paths).probabilities for data in (True, False))
    assert np.array_equal(with_data, without)


def test_the_nodes_of_a_graph_need_no_labels(place):
    graph = {"num_features": 40, "features": [[0, 4], [1], []], "edges": [[0, 1]]}
    (place / "graph.json").write_text(json.dumps(graph))
    assert main(["predict", "graph", "--data", "graph.json", "--out", "out.csv"]) == 0
    rows = read(place / "out.csv")
    assert [row["node"] for row in rows] == ["0", "1", "2"]
    assert load("graph").predict(graph).values.tolist() == [row["prediction"] for row in rows]


def test_sentences_are_translated_in_their_order(place):
    (place / "new.txt").write_text("the 3 apples\nthe 5 red apples\n")
    assert main(["predict", "pairs", "--data", "new.txt", "--out", "out.csv"]) == 0
    run = load("pairs")
    for row in read(place / "out.csv"):
        assert row["prediction"] == run.generate(row["text"])
    assert run.predict(["", "the 4 apples"]).values[0] == ""


def test_training_on_a_file_proposes_to_predict(place, capsys):
    (place / "numbers.csv").write_text(
        "text,label\n" + "\n".join(f"{'good ' * (n % 5 + 1)},{n / 7}" for n in range(20))
    )
    words = ["byte-classifier", "--task", "regress", "--size", "tiny", "--data", "numbers.csv", "--out", "numbers"]
    assert main(["train", *words, *FEW, "model.width=8", "model.heads=2"]) == 0
    command = shlex.split(capsys.readouterr().err.partition("next: everyformer ")[2])
    assert command == ["predict", "numbers", "--data", str(place / "numbers.csv"), "--limit", "5"]
    assert main(command) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6
    shutil.rmtree("numbers")


@pytest.mark.parametrize(
    "words, content, message",
    [
        (["text", "--data", "none.csv"], None, "there is no file or folder none.csv"),
        (["text", "--data", "new.csv"], "", "new.csv has no examples"),
        (["text", "--data", "new.csv"], "a,b\nx,y\n", "no column 'text' (it has a, b)"),
        (["text", "--data", "new.csv"], "1,x\n2,y\n", "no header and 2 columns; name the input with --column"),
        (["text", "--data", "new.csv", "--column", "c"], "a,b\nx,y\n", "no column 'c'"),
        (["text", "--data", "new.csv", "--out", "new.csv"], "text\nx\n", "is the file with the data"),
        (["text", "--data", "new.csv", "--out", "out.xlsx"], "text\nx\n", "is not a table; give a file that ends in"),
        (["text", "--data", "new.csv", "--out", "none/out.csv"], "text\nx\n", "is in a folder that does not exist"),
        (["text", "--data", "new.csv", "--limit", "0"], "text\nx\n", "--limit 0 is less than 1"),
        (["text", "--data", "new.csv"], 'text\nx\n"y\n', "line 3 of new.csv cannot be parsed"),
        (["images", "--data", "new.csv"], "text\nx\n", "but there is no file x; give paths"),
        (["images", "--data", "-"], None, "images cannot be read from standard input"),
        (["language", "--data", "new.csv"], "text\nx\n", "predicts no class, number or translation"),
        (["graph", "--data", "new.csv"], "text\nx\n", "new.csv is not JSON"),
    ],
)
def test_what_cannot_be_predicted_is_said_before_anything_is_written(place, capsys, words, content, message):
    for name in ("new.csv", "out.csv"):
        (place / name).unlink(missing_ok=True)
    if content is not None:
        (place / "new.csv").write_text(content)
    before = sorted(path.name for path in place.iterdir())
    assert main(["predict", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert sorted(path.name for path in place.iterdir()) == before


def test_one_text_instead_of_a_list_is_refused(place):
    with pytest.raises(ValueError, match=r"are one text; give a list of them: \['good'\]"):
        load("text").predict("good")
