"""The benchmark of attention: rows, memory, exponents, and its command."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

from bench import tables
from everyformer.cli.main import main
from everyformer.study import bench_generate
from everyformer.study.bench import KINDS, bench, exponent


def test_rows_come_for_every_kind_and_length_with_dense_first():
    rows = list(bench([16, 256], torch.device("cpu"), heads=1, width=8, repeats=1))
    assert [(row.length, row.kind) for row in rows] == [(length, kind) for length in (16, 256) for kind in KINDS]
    assert all(0 < row.least <= row.time <= row.most and row.memory > 0 and row.batch == 1 for row in rows)


def test_memory_is_that_of_the_tensors():
    """The flash kernel saves the output and one number per query; the pass ends with three gradients."""
    length, width = 64, 8
    (row,) = bench([length], torch.device("cpu"), kinds=["dense"], heads=1, width=width, repeats=1)
    saved = 4 * length * (width + 1)
    assert saved < row.memory <= saved + 8 * 4 * length * width


@pytest.mark.parametrize("power", [1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_is_its_exponent(power):
    assert exponent((x, 7 * x**power) for x in (1024, 4096, 16384)) == pytest.approx(power)


def test_the_command_prints_a_table_and_exponents(capsys, tmp_path):
    words = "bench attention strided --lengths 64,256 --heads 1 --width 8 --repeats 1 --device cpu --figure"
    assert main([*words.split(), str(tmp_path / "attention.png"), "--json", str(tmp_path / "attention.json")]) == 0
    table = json.loads((tmp_path / "attention.json").read_text())
    assert [row["kind"] for row in table["rows"]] == ["dense", "strided"] * 2 and table["ceilings"][0]["rate"] > 0
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    out, err = capsys.readouterr()
    assert len(tables.SPEED.findall(out)) == 4
    assert "speed-up" in out and "strided    time grows as length^" in out and "next: everyformer" in err


@pytest.mark.parametrize(
    "words, reason",
    [
        ("strid", "no kind of attention is named 'strid'; did you mean strided"),
        ("--lengths none", "--lengths none is not a list of numbers of 2 or more"),
        ("--heads 0", "each must be 1 or more"),
        ("--figure nowhere/x.png", "nowhere/x.png cannot be written, because the folder nowhere does not exist"),
    ],
)
def test_bad_input_raises(words, reason, capsys):
    assert main(["bench", "attention", *words.split()]) == 2
    assert reason in capsys.readouterr().err


def test_generation_is_measured_in_every_way_with_equal_texts(monkeypatch):
    monkeypatch.setitem(bench_generate.MODELS, "tiny", (16, 2, 2, 32, 256))
    (rows,) = bench_generate.bench(["tiny"], [2], torch.device("cpu"), tokens=8, repeats=2)
    ways = ["cache", "slots", "fused", *(["transformers"] if find_spec("transformers") else []), "ceiling"]
    assert [row.way for row in rows] == ways
    assert all(0 < row.least <= row.rate <= row.most and row.batch == 2 for row in rows)
    assert [row.same_texts for row in rows] == [2] * (len(ways) - 1) + [None]


def test_the_command_prints_a_table_of_generation_and_writes_it_as_json(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(bench_generate.MODELS, "bytes", (16, 2, 2, 32, 256))
    file = tmp_path / "table.json"
    words = "bench generate bytes --batches 1 --threads 1 --tokens 4 --repeats 1 --device cpu --json"
    assert main([*words.split(), str(file)]) == 0
    out = capsys.readouterr().out
    assert "# command:" in out and "bytes        1       1  cache" in out
    assert [row["way"] for row in json.loads(file.read_text())["rows"]][:2] == ["cache", "slots"]


@pytest.mark.parametrize(
    "words, reason",
    [
        ("byte", "no model is named 'byte'; did you mean bytes"),
        ("--batches 0", "--batches 0 is not a list of numbers of 1 or more"),
        ("--tokens 0", "each must be 1 or more"),
        ("--tokens 300", "the model bytes has room for 248 after the prompt"),
        ("--json nowhere/x.json", "is in a folder that does not exist; create it first"),
    ],
)
def test_bad_input_of_the_benchmark_of_generation_is_refused(words, reason, capsys):
    assert main(["bench", "generate", *words.split()]) == 2
    assert reason in capsys.readouterr().err
