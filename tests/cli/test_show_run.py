"""`everyformer show` of runs: each picture in a terminal and as a file, and one sentence for a run that has it not."""

from __future__ import annotations

import pytest

from everyformer.cli.main import main

SETTINGS = ["run.steps=2", "run.batch=1", "run.evaluate=1", "run.examples=1"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Two runs of an adaptive span."""
    folder = tmp_path_factory.mktemp("show")
    (folder / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    for name, lr in (("a", "1e-3"), ("b", "1e-2")):
        words = ["--size", "tiny", "--data", str(folder / "text.txt"), f"optim.lr={lr}", *SETTINGS]
        assert main(["train", "adaptive-span", *words, "--out", str(folder / name)]) == 0
    return folder


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize(
    "words, shown",
    [
        ("attention a --text tobe --layer 1 --head 2", "layer 1, head 2"),
        ("spans a --text tobe", "a darker cell is a longer span"),
        ("embeddings a", "tokens: 256 vectors"),
        ("curves a", "validation"),
        ("curves a b", "○ b"),
        ("family", "rows are queries, columns are keys"),
    ],
)
def test_a_picture_fits_into_the_terminal(words, shown, columns, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["show", *words.split()]) == 0
    out, err = capsys.readouterr()
    assert shown in out and max(map(len, out.splitlines())) <= columns
    assert f"next: everyformer show {words.split()[0]} " in err and "--out" in err


@pytest.mark.parametrize(
    "words", ["attention a", "spans a", "spans a --text tobe", "embeddings a", "curves a b", "family"]
)
def test_a_picture_is_written_as_svg(words, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert main(["show", *words.split(), "--out", "x.svg"]) == 0
    assert "<svg" in (place / "x.svg").read_text() and "x.svg" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("attention a --head 9", "there is no head 9; give 0 to 3"),
        ("attention a --part cross", "has no encoder"),
        ("halting a", "give a run of universal-transformer or act-rnn"),
        ("curves a none", "none has no records of a training"),
        ("embeddings a --out x.pngg", "did you mean png"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_a_sentence(words, message, place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert main(["show", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err and len(err.splitlines()) == 1 and not out


def test_curves_of_different_units_share_no_figure(place, tmp_path, capsys):
    (tmp_path / "records.jsonl").write_text('{"kind": "begin"}\n{"kind": "step", "step": 1, "loss": 2.0}\n')
    assert main(["show", "curves", str(place / "a"), str(tmp_path)]) == 2
    assert "share no axis; draw them one by one" in capsys.readouterr().err
