"""`everyformer data` lists what `--data` takes by name, in any width."""

from __future__ import annotations

import json

import pytest

from everyformer.cli.data import FILES
from everyformer.cli.main import main
from everyformer.data.datasets import DATASETS, GPT2_FILES
from everyformer.data.problems import PROBLEMS
from tests.spec.problems import ANSWERS


@pytest.mark.parametrize("columns", [40, 200])
def test_every_data_set_with_a_name_is_listed(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line and line[0] != " "} >= {*PROBLEMS, *DATASETS} - {GPT2_FILES}
    assert max(map(len, lines)) <= columns
    assert {*FILES} == {*DATASETS} - {GPT2_FILES}


def test_a_problem_is_shown_with_examples(capsys):
    assert main(["data", "parity", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["chance"], row["train length"]) == (0.5, PROBLEMS["parity"].length)
    for example in row["examples"]:
        question, answer = example.rstrip("]").split("[")
        assert ANSWERS["parity"](question) == answer
    assert main(["data", "parity"]) == 0 and row["examples"][0] in capsys.readouterr().out
    assert main(["data", "enwik8"]) == 0 and "Wikipedia" in capsys.readouterr().out
    assert main(["data", "paritty"]) == 2 and "did you mean parity?" in capsys.readouterr().err
