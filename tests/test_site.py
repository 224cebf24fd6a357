"""The site of `make docs` builds without a warning, needs nothing from the network, and its links to the source lead to lines."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import everyformer
from docs.hooks.equations import NONE, equations
from everyformer.cli.main import app
from everyformer.cli.settings_listing import read_listing
from everyformer.sources import SOURCES
from tests.chromium import opened_page, until

ROOT = Path(__file__).parent.parent
LOADED = re.compile(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"?([^\s\">]+)|<link[^>]*?\shref=\"?([^\s\">]+)")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` does: a warning, such as a link that leads nowhere, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder


def test_a_page_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        loaded = [first or second for first, second in LOADED.findall(page.read_text())]
        assert loaded and not [url for url in loaded if re.match(r"https?:|//", url)], page


def test_a_link_to_the_source_leads_to_its_line(site):
    links = 0
    for page in site.rglob("*.html"):
        for file, line in re.findall(r'href="?([^\s">]*?code/[^\s">#]*)(?:#(L\d+))?', page.read_text()):
            target = page.parent / file
            assert target.is_file() and (not line or f'id="{line}"' in target.read_text()), (page, file, line)
            links += 1
    assert links > 400


def test_the_reference_has_every_name_command_and_setting(site):
    pages = {page.stem: page.read_text() for page in (site / "reference").glob("*.html")}
    for name in set(everyformer.__all__) - {"__version__", "KERNELS"}:
        assert any(re.search(rf'<h2 id="?[\w.]*\b{name}"?[ >]', page) for page in pages.values()), name
    for command in app:
        if not command.startswith("-") and app[command].show:
            assert re.search(rf'<h2 id="?everyformer-{command}"?[ >]', pages["commands"]), command
    listing = read_listing()
    rows = [*listing["run"], *listing["optim"], *(row for rows in listing["tasks"].values() for row in rows)]
    rows += [row for member in listing["members"].values() for row in member["model"]]
    assert all(f"<code>{row['name']}</code>" in pages["settings"] for row in rows)


@pytest.mark.browser
def test_a_student_finds_the_code_of_any_equation(browser, site):
    """With three clicks from the first page: the reference, whose first page lists the equations, the equation's code."""
    with opened_page(browser, site.as_uri()) as page:
        page.goto((site / "index.html").as_uri())
        page.get_by_role("link", name="Reference", exact=True).first.click()
        page.get_by_role("heading", name="From the equation to the code").wait_for()
        numbers = [number for number in equations() if number not in NONE]
        assert {number[0] for number in numbers} == set(SOURCES)
        for number in numbers:
            row = page.get_by_role("row").filter(has=page.locator(f"[id='{number}']"))
            row.get_by_role("link", name=re.compile(r"\.py:\d+")).first.click()
            line = page.locator(":target")
            line.wait_for()
            above = page.locator(f"#L{int(line.get_attribute('id')[1:]) - 1}")
            assert re.search(rf"# eq\. .*\b{number}\b", above.inner_text() + line.inner_text())
            until(
                page,
                "(box => box.top >= 0 && box.bottom <= innerHeight)(document.querySelector(':target').getBoundingClientRect())",
            )
            page.go_back()


@pytest.mark.browser
def test_a_chapter_leads_from_its_equation_to_the_code(browser, site):
    with opened_page(browser, site.as_uri()) as page:
        page.goto((site / "learn" / "01_self_attention.html").as_uri())
        page.get_by_role("link", name="K1 and K2").click()
        row = page.get_by_role("row").filter(has=page.locator(":target"))
        row.get_by_role("link", name=re.compile(r"\.py:\d+")).first.click()
        assert "# eq. " in page.locator(":target").inner_text()
