"""The page in Debian's chromium. Every test fails on an error in the console, and on a request that leaves this machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from everyformer.attention.parse import parse

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.fail("chromium is not installed; run make browser, which installs it")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def page(browser, address) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, base_url=address)
    page = context.new_page()
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda one: None if one.url.startswith((address, "data:", "blob:")) else problems.append(one.url)
    )
    yield page
    context.close()
    assert not problems


def test_a_pattern_is_drawn_and_its_numbers_are_the_librarys(page):
    page.goto("/#patterns")
    field = page.get_by_role("textbox", name="Pattern")
    field.fill("causal & window(5)")
    page.wait_for_function("document.querySelector('canvas')?.ariaLabel.startsWith('causal & window(5)')")
    allowed = int(parse("causal & window(5)").mask(64).sum())
    assert f"({allowed} of 4,096)" in page.locator("[data-density]").inner_text()
    canvas = page.get_by_role("application")
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] * 9.5 / 64, "y": box["height"] * 20.5 / 64})
    assert (
        page.locator("[data-keys]").inner_text().startswith("query 20 attends to 5 keys: 16–20 · key 9 is not allowed")
    )
    canvas.press("ArrowDown")
    assert page.locator("[data-keys]").inner_text().startswith("query 21 attends to 5 keys: 17–21")
