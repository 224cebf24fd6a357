"""Pages in Debian's chromium, for the tests that drive it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def opened_page(browser, address: str, **options: Any) -> Iterator[Any]:
    """A new page. Fails at its end if there was an error in the console, a dialog, or a request that leaves `address`."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}} | options)
    page = context.new_page()
    problems: list[str] = []
    expected = re.compile("responded with a status of (400|413)")  # a request that is refused, which the browser writes
    page.on(
        "console",
        lambda one: (
            problems.append(one.text) if one.type in ("error", "warning") and not expected.search(one.text) else None
        ),
    )
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda one: problems.append(one.message))
    page.on(
        "request", lambda one: None if one.url.startswith((address, "data:", "blob:")) else problems.append(one.url)
    )
    yield page
    context.close()
    assert not problems


def until(page, condition: str) -> None:
    """Waits for a condition in JavaScript. playwright's own function evaluates text in the page, which its policy forbids."""
    for _ in range(200):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"it did not come true: {condition}")
