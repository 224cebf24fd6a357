"""The pages of docs/results: every table is computed from its log, and every log says how it was made."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import pytest
import torch

import everyformer
from bench import halting, settled, tables
from bench.gpu import page as gpu_page
from bench.long_context import reuse_row
from everyformer.train.provenance import header, provenance, read_header

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs" / "results").glob("*.md"))
LOGS = sorted((ROOT / "docs" / "results" / "logs").iterdir())


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_every_log_begins_with_command_commit_machine_versions_and_seed(log):
    assert read_header(log)


def test_the_index_names_the_logs_whose_facts_were_written_by_hand():
    text = (ROOT / "docs" / "results" / "index.md").read_text()
    named = re.search(r"by hand\nafterwards: (.*?)\.", text, re.DOTALL)
    by_hand = {log.stem for log in LOGS if read_header(log)["date"].endswith("or before")}
    assert named and set(re.split(r",\s+|\s+and\s+", named[1])) == by_hand


@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.stem)
def test_no_log_names_a_folder_of_its_machine(log):
    assert not re.findall(r"(?<![\w.~-])/(?:home|root|tmp|work)/\S+", log.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_every_table_is_computed_from_its_log(page):
    text = page.read_text()
    assert tables.MISSING not in text, "measure the table, or leave it out"
    if "Written by `python -m bench." in text:  # as a whole; tests of the program compare it
        return
    assert text == tables.rewritten(page), "run python -m bench.tables"
    assert "| ---" not in tables.rewritten(page, shown=False), (
        "name the log of each table above it, see bench/tables.py"
    )


def test_the_page_of_the_gpu_is_computed_from_its_log():
    page = ROOT / "docs" / "results" / "gpu.md"
    if not page.exists():
        pytest.skip("there is no record of a GPU yet; write it with make gpu")
    assert page.read_text() == gpu_page(page.parent / "logs" / "gpu.txt"), "run python -m bench.gpu --only-page"


def test_the_page_of_the_claims_is_computed_from_the_logs():
    assert (ROOT / "docs" / "claims.md").read_text() == settled.page(), "run python -m bench.settled > docs/claims.md"


def test_a_claim_is_settled_by_three_seeds_or_more():
    for one in settled.CLAIMS:
        seeds, _, verdict = one.judge(*((settled.LOGS / name).read_text() for name in one.logs))
        assert verdict.startswith("not settled: ") or (verdict in settled.VERDICTS and int(seeds.split()[0]) >= 3)


@pytest.mark.parametrize(
    ("values", "bounds", "verdict"),
    [
        ([-0.4, -0.5, -0.45], (-math.inf, 0.0), "holds"),
        ([0.4, 0.5, 0.45], (-math.inf, 0.0), "does not hold"),
        ([-0.1, 0.1, 0.05], (-math.inf, 0.0), "inconclusive"),
        ([0.001, -0.001, 0.002], (-0.05, 0.05), "holds"),
        ([0.2, 0.21, 0.19], (-0.05, 0.05), "does not hold"),
    ],
)
def test_a_verdict_is_what_the_interval_allows(values, bounds, verdict):
    assert settled.verdict(values, *bounds) == verdict


def test_every_log_belongs_to_a_page():
    text = "".join(page.read_text() for page in PAGES)
    assert [log.name for log in LOGS if f"(logs/{log.name})" not in text] == []


def test_a_table_that_differs_from_its_log_is_found(tmp_path):
    source = ROOT / "docs" / "results" / "deep_character.md"
    (tmp_path / "logs").symlink_to(source.parent / "logs")
    page = tmp_path / source.name
    page.write_text(source.read_text().replace("**3.341**", "**3.241**"))
    assert tables.rewritten(page) == source.read_text() != page.read_text()


def test_a_table_without_a_log_is_not_shown(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n\n<!-- table: algorithms, logs/none.txt -->\n\n| a |\n| --- |\n\nafter\n")
    once = tables.rewritten(page)
    assert once == f"before\n\n<!-- table: algorithms, logs/none.txt -->\n\n{tables.MISSING}\n\nafter\n"
    page.write_text(once)
    assert tables.rewritten(page) == once


def test_a_table_may_be_what_a_program_prints_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(halting, "main", lambda: print(f"read {sys.argv[1:]}\n\n| a |\n| --- |\n| 1 |\n\nend"))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "x.txt").write_text(header(provenance(seed=0)) + "\n")
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- python -m bench.halting --table docs/results/logs/x.txt -->\n| a |\n| --- |\n| 2 |\n\nafter\n"
    )
    lines = tables.rewritten(page).splitlines()
    assert lines[1:6] == ["", "| a |", "| --- |", "| 1 |", ""] and lines[-2:] == ["", "after"]
    assert lines[6].startswith("*`") and "| ---" not in tables.rewritten(page, shown=False)


def test_the_readme_has_the_numbers_of_the_record_of_the_contracts():
    models, checks = re.findall(
        r"contracts over ([\d,]+) models.* all ([\d,]+) checks", (ROOT / "README.md").read_text()
    )[0]
    page = (ROOT / "docs" / "results" / "contracts.md").read_text()
    assert f"{checks} cells" in page and f"{models} models" in page
    log = ROOT / "docs" / "results" / "logs" / "contracts.txt"
    if log.exists():
        assert f"all {checks} checks passed" in log.read_text() and f"{models} models" in log.read_text()


def test_the_page_has_the_numbers_of_the_random_models():
    log = (ROOT / "docs" / "results" / "logs" / "random_models.txt").read_text()
    failed, checks, models = re.findall(r"^(\d+) of (\d+) checks on (\d+) models failed, seed 0", log, re.MULTILINE)[0]
    page = " ".join((ROOT / "docs" / "results" / "contracts.md").read_text().split())
    assert f"{models} random legal models" in page and f"{failed} of {int(checks):,} checks failed" in page


def test_the_readme_has_the_numbers_of_the_logs():
    readme, logs = (ROOT / "README.md").read_text(), ROOT / "docs" / "results" / "logs"
    step = {row[0]: float(row[6]) for row in tables.printed((logs / "gpt2_step.txt").read_text())[1:]}
    assert f"{step['everyformer'] / min(step.values()):.2f} times the processor time of the fastest" in readme
    _, *layers = tables.depth((logs / "reversible.txt").read_text())
    first, last = (float(row[1].partition(" ")[0]) for row in (layers[0], layers[-1]))
    assert f"| {last / first:.2f} times that of 6 layers" in readme


def test_the_time_with_a_memory_is_measured():
    network = everyformer.build("transformer-xl", "tiny", width=16, heads=1, layers=1).eval()
    with torch.no_grad():
        row = reuse_row(network, memory=16, device="cpu", rounds=1, segment=4)
    assert row["attention_length"] == 16 and row["ms_per_byte_with_memory"] > 0
