"""Every run ends with the contracts' table: cells and worst errors, gathered from all workers."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton

from everyformer.data import datasets
from everyformer.study.contract_report import Report, Result
from everyformer.study.contracts import LIMIT

collect_ignore = [] if torch.cuda.is_available() else ["device"]  # these need a GPU


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Output is not wrapped; pytest-xdist sets COLUMNS for its workers."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def gpt2_files(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first 2,000 merges of GPT-2's vocab.bpe and their ids in encoder.json (OpenAI, MIT licence), taken as the whole files."""
    folder = Path(__file__).parent / "data" / "gpt2_excerpt"
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    monkeypatch.setitem(datasets.DATASETS, datasets.GPT2_FILES, (datasets.FileSet(sums, "https://home/"),))
    return folder


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium, driven by playwright."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.fail("chromium is not installed; run make browser, which installs it")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    properties = [pair for report in reports if report.when == "call" for pair in report.user_properties]
    found = [Result(*finding) for name, findings in properties if name == "findings" for finding in findings]
    refused = sum(count for name, count in properties if name == "refused")
    if found:
        terminalreporter.section("contracts")
        terminalreporter.write_line(str(Report(found, refused)))
        worst = max(finding.error for finding in found if finding.limit == LIMIT)
        terminalreporter.write_line(
            f"{len(found)} cells, {refused} combinations refused, worst error of an equality {worst:.1e}"
        )
