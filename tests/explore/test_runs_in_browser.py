"""The view of runs in chromium, while runs begin, train, end and are deleted."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everyformer.explore.app import Explorer
from everyformer.explore.library import Library
from everyformer.train.lock import only_writer
from tests.chromium import opened_page, until
from tests.explore.conftest import served

pytestmark = pytest.mark.browser
CHART = "document.querySelector('svg[aria-label^=\"Training and validation\"]')?.ariaLabel ?? ''"


@pytest.fixture
def runs(folder, tmp_path) -> Path:
    """A folder of runs, of which the ones with a larger number were written to earlier."""
    for number in range(14):
        run = shutil.copytree(folder / "first", tmp_path / f"run{number:02}")
        os.utime(run / "records.jsonl", (2e9 - number, 2e9 - number))
        os.utime(run / "recipe.json", (1e9, 1e9))
    return tmp_path


@pytest.fixture
def page(browser, runs) -> Iterator[Any]:
    with (
        served(Explorer(Library([runs], device="cpu"))) as address,
        opened_page(browser, address, base_url=address) as page,
    ):
        yield page


def shown(page) -> list[str]:
    boxes = page.get_by_role("checkbox", name=re.compile("^show "), checked=True)
    return [one.get_attribute("aria-label").removeprefix("show ") for one in boxes.all()]


def test_a_run_is_followed_until_its_end_and_after_it_is_deleted(page, runs):
    records = runs / "run13" / "records.jsonl"
    lines = records.read_text().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    records.write_text("".join(lines[: kinds.index("step") + 1]))
    os.utime(records, (1e9, 1e9))
    with only_writer(runs / "run13"):
        page.goto("/#runs")
        page.get_by_label("show run13").wait_for()
        until(page, f"({CHART}).includes('run13')")
        assert shown(page) == ["run00", "run01", "run02", "run13"]  # the one that trains, and the last ones
        charts = page.get_by_role("img", name=re.compile("^Training and validation"))
        assert charts.count() == 1  # before its first evaluation it has the unit of the others
        assert "run13, training (moving average) ends at" in page.evaluate(CHART)
        assert "run13, validation" not in page.evaluate(CHART)
        records.write_text("".join(lines))
    until(page, f"({CHART}).includes('run13, final validation')")  # also of a run that has ended since
    assert page.get_by_role("row", name=re.compile("^show run13")).inner_text().endswith("ended")
    colour = (
        "[...document.querySelectorAll('.dot')].find((one) => one.parentElement.innerText === 'run02').style.background"
    )
    before = page.evaluate(colour)
    shutil.rmtree(runs / "run13")
    page.get_by_label("show run00").uncheck()
    until(page, f"!({CHART}).includes('run13') && !({CHART}).includes('run00')")
    until(page, "!document.querySelector('[aria-label=\"show run13\"]')")
    assert page.get_by_role("alert").count() == 0 and page.evaluate(colour) == before


def test_a_run_that_breaks_does_not_hide_the_others(page, runs):
    page.goto("/#runs")
    until(page, f"({CHART}).includes('run00') && ({CHART}).includes('run03')")
    page.get_by_label("show run01").uncheck()
    (runs / "run00" / "records.jsonl").write_bytes(b"\xff\xfe")
    page.get_by_text("is not text in UTF-8").first.wait_for()
    until(page, f"!({CHART}).includes('run00') && ({CHART}).includes('run03')")
    until(page, "document.querySelectorAll('[role=alert]').length === 0")


def test_one_of_many_runs_is_found_by_its_name(page):
    page.goto("/#runs")
    page.get_by_label("filter the runs").fill("run1")
    until(page, "document.querySelectorAll('[aria-label^=\"show run\"]').length === 4")


def test_a_page_without_a_run_shows_the_first_that_begins(browser, folder, tmp_path):
    with (
        served(Explorer(Library([tmp_path], device="cpu"))) as address,
        opened_page(browser, address, base_url=address) as page,
    ):
        page.goto("/#runs")
        page.get_by_text("No run is open").wait_for()
        shutil.copytree(folder / "first", tmp_path / "first")
        until(page, f"({CHART}).includes('first')")
