"""The benchmark of attention: rows, memory, exponents, and its command."""

from __future__ import annotations

import pytest
import torch

from everyformer.cli.main import main
from everyformer.study.bench import KINDS, bench, exponent


def test_rows_come_for_every_kind_and_length_with_dense_first():
    rows = list(bench([16, 256], torch.device("cpu"), heads=1, width=8, repeats=1))
    assert [(row.length, row.kind) for row in rows] == [(length, kind) for length in (16, 256) for kind in KINDS]
    assert all(row.time > 0 and row.memory > 0 and row.batch == 1 for row in rows)


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
    assert main([*words.split(), str(tmp_path / "attention.png")]) == 0
    assert (tmp_path / "attention.png").stat().st_size > 10_000
    out, err = capsys.readouterr()
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
