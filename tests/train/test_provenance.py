"""Every log begins with the facts that are needed to measure it again."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from everyformer.cli.main import main
from everyformer.train.provenance import COMMIT, NAMES, header, provenance, read_header, start_log
from everyformer.train.record import read

ROOT = Path(__file__).parents[2]


def test_the_header_of_a_log_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    facts = start_log(seed=3, commit="abc1234", packages=("numpy",))
    log = tmp_path / "log.txt"
    log.write_text(capsys.readouterr().out + '{"ms": 1}\n# step: 5\n')
    assert read_header(log) == facts
    assert list(facts) == list(NAMES) and facts["seed"] == "3" and facts["commit"] == "abc1234"
    assert f"torch {torch.__version__.partition('+')[0]}" in facts["versions"] and "numpy" in facts["versions"]
    assert "cores" in facts["machine"]


def test_the_header_names_the_seed_that_torch_has() -> None:
    torch.manual_seed(0)
    start_log(seed=11)
    assert torch.initial_seed() == 11


def test_a_log_without_a_fact_is_refused(tmp_path: Path) -> None:
    facts = provenance(seed=[0, 1])
    log = tmp_path / "log.txt"
    log.write_text(header(facts | {"commit": ""}) + "\n")
    with pytest.raises(ValueError, match=r"log.txt does not begin with its commit"):
        read_header(log)
    log.write_text("step 1\n" + header(facts))
    with pytest.raises(ValueError, match="command, commit"):
        read_header(log)


def test_the_commit_comes_from_the_environment_where_there_is_no_git(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from everyformer.train.provenance import provenance as p; print(p(0)['commit'], p(0)['command'], sep='\\n')"
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "src"), "GIT_CEILING_DIRECTORIES": str(tmp_path.parent)}
    environment.pop(COMMIT, None)

    def lines(**more: str) -> list[str]:
        words = [sys.executable, "-c", code]
        done = subprocess.run(words, capture_output=True, text=True, env=environment | more, check=True)
        return done.stdout.splitlines()

    commit, command = lines(OMP_NUM_THREADS="1")
    assert commit == f"unknown (no git here; set {COMMIT})"
    assert command.startswith("OMP_NUM_THREADS=1 python") and "-c" in command and str(tmp_path) not in command
    assert lines(EVERYFORMER_COMMIT="0123abc")[0] == "0123abc"


def test_the_commit_of_a_checkout_is_its_head() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("this copy of the source is not a git checkout")
    head = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert provenance(seed=0)["commit"].partition(" ")[0] in (head.stdout.strip(), os.environ.get(COMMIT))


@pytest.mark.parametrize(  # tables and settled compute pages from logs
    "path",
    [path for path in sorted((ROOT / "bench").glob("[a-z]*.py")) if path.stem not in ("tables", "settled")],
    ids=lambda path: path.stem,
)
def test_every_benchmark_starts_its_log_with_the_header(path: Path) -> None:
    source = path.read_text()
    assert re.search(r"\b(start_log|header|compare\.(main|printed))\(", source) or "__main__" not in source


def test_a_run_has_its_provenance_in_its_records_and_at_the_start_of_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "train gpt2 --size tiny run.steps=1 run.batch=1 run.seed=7 run.evaluate=0 run.examples=1 --out"
    assert main([*words.split(), str(tmp_path / "run")]) == 0
    (tmp_path / "log.txt").write_text(capsys.readouterr().out)
    facts = read_header(tmp_path / "log.txt")
    assert facts["seed"] == "7"
    assert next(read(tmp_path / "run" / "records.jsonl"))["provenance"] == facts


def test_the_benchmark_of_attention_starts_with_the_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench attention local --lengths 16 --heads 1 --width 8 --repeats 1 --device cpu"
    assert main(words.split()) == 0
    (tmp_path / "log.txt").write_text(capsys.readouterr().out)
    assert read_header(tmp_path / "log.txt")["seed"] == "0"
