"""Runs that are interrupted resume to the same bits, and long runs do not grow: the campaigns of bench, on a small scale."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import long_run
from bench.kills import EVENTS, kills, read_log, summary
from bench.long_run import growth, is_constant, measure
from everyformer.train.provenance import read_header

ROOT = Path(__file__).parents[2]


def test_killed_runs_resume_to_equal_bits(tmp_path):
    log = tmp_path / "log.txt"
    command = [sys.executable, "-m", "bench.kills", "--kills", "6", "--kinds", "memory,recurrent", "--ways", "one"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--seed", str(os.getpid()), "--log", str(log)],
        env=environment, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_log(log)
    assert sum(map(kills, lines)) >= 6 and {line["result"] for line in lines} == {"equal"}


def test_the_tables_of_the_campaign_follow_from_its_log():
    page = (ROOT / "docs" / "results" / "kills.md").read_text()
    log = ROOT / "docs" / "results" / "logs" / "kills.txt"
    lines = read_log(log)
    for row in summary(lines):
        assert row in page, row
    assert {event.split("@")[0] for line in lines for event in line["events"]} == set(EVENTS)
    assert read_header(log) and not [line for line in lines if line["result"] == "FAILED"]


def test_memory_files_and_threads_stay_constant(tmp_path, monkeypatch):
    monkeypatch.setenv("EVERYFORMER_CACHE", str(tmp_path / "cache"))
    rows = measure(48, 4, tmp_path)
    grown = growth(rows)
    assert [row["step"] for row in rows] == list(range(4, 52, 4)) and torch.get_num_threads() >= 1
    assert grown["files"] == grown["threads"] == 0 and grown["memory"] < 16


@pytest.mark.parametrize("name, per_row", [("memory", 1.0), ("files", 1), ("threads", 1), ("objects", 100)])
def test_a_leak_is_noticed(name, per_row):
    flat = {"memory": 400.0, "files": 8, "threads": 1, "objects": 300_000}
    assert is_constant(growth([dict(flat) for _ in range(40)]))
    assert not is_constant(growth([flat | {name: flat[name] + per_row * row} for row in range(40)]))


def test_the_long_run_did_not_grow_and_its_table_follows_from_its_log():
    page = (ROOT / "docs" / "results" / "long_run.md").read_text()
    log = ROOT / "docs" / "results" / "logs" / "long_run.txt"
    rows = long_run.read_log(log)
    assert read_header(log) and is_constant(growth(rows)) and f"for {rows[-1]['step']:,} steps" in page
    for row in long_run.table(rows):
        assert row in page, row
