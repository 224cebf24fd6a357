"""Times the page of `everyformer explore` in chromium: the first load of every view, and what a user does in it.

    python -m bench.explore --length 512

The page is served by the command in a process of its own. The model has random weights: byte-language in its tiny size with room for
the text. A time ends when the browser has drawn the answer; 0.8 seconds lie between two actions. First loads are those of a new
browser context, without a cache. Prints the command, the commit, the machine and the versions, then a table: median, and largest of
the repetitions.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import everyformer
from everyformer.train.provenance import start_log

VIEWS = {"inside": "[data-weight]", "patterns": "[data-keys]", "family": "[data-parameters]", "runs": "h1"}
UNTIL = """async ([act, changed, name]) => {
  const see = () => document.querySelector(changed)?.[name] ?? document.querySelector(changed)?.dataset[name];
  const before = see(), start = performance.now();
  eval_act[act]();
  while (see() === before) {
    await new Promise(requestAnimationFrame);
    if (performance.now() - start > 20000) return -1;
  }
  return performance.now() - start;
}"""
PAINTED = """async () => {
  for (;;) {
    const paint = performance.getEntriesByName("first-contentful-paint")[0];
    if (paint) return paint.startTime;
    await new Promise(requestAnimationFrame);
  }
}"""
PAUSE = 800  # milliseconds between two actions
HEAD = "canvas[aria-label^='attention weights']"
ACTIONS = {  # the view, what is done, and what changes then: an element and its property
    "choose another head": ("inside", "head", HEAD, "drawn"),
    "point at a cell": ("inside", "point", "[data-weight]", "innerText"),
    "choose another position": ("inside", "position", "[data-weight]", "innerText"),
    "switch a head off or on": ("inside", "toggle", HEAD, "drawn"),
    "next candidates": ("inside", "token", "[aria-label^=candidates]", "innerText"),
    "change a pattern": ("patterns", "slide", "canvas", "drawn"),
    "point at a query": ("patterns", "query", "[data-keys]", "innerText"),
    "change a part": ("family", "part", "[data-parameters]", "innerText"),
}
SCRIPT = """() => {
  let turn = 0;
  const one = (where) => document.querySelector(where);
  const move = (canvas, x, y) => {
    const box = canvas.getBoundingClientRect();
    const at = { clientX: box.left + box.width * x, clientY: box.top + box.height * y, bubbles: true };
    canvas.dispatchEvent(new PointerEvent("pointermove", at));
  };
  const layers = () =>
    [...document.querySelectorAll("fieldset")].find((f) => /How often/.test(f.innerText)).querySelector("input");
  const type = (input, value, kind = "input") => {
    input.value = value;
    input.dispatchEvent(new Event(kind, { bubbles: true }));
  };
  window.eval_act = {
    head: () => document.querySelectorAll(".grid button")[++turn % 8].click(),
    point: () => move(one("canvas[aria-label^='attention weights']"), ((++turn * 7) % 90) / 100, 0.95),
    position: () => document.querySelectorAll("[aria-label^='The positions'] button")[100 + (++turn % 50)].click(),
    toggle: () => [...document.querySelectorAll("button")].find((b) => /^switch it/.test(b.innerText)).click(),
    token: () => [...document.querySelectorAll("button")].find((b) => b.innerText === "next token").click(),
    slide: () => type([...document.querySelectorAll(".sliders input")][0], 8 + (++turn % 40)),
    query: () => move(one("canvas"), 0.5, ((++turn * 7) % 90) / 100),
    part: () => type(layers(), 1 + (++turn % 3), "change"),
  };
}"""


def serve(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """Starts the command, and returns its process and the address that it prints."""
    command = [sys.executable, "-m", "everyformer", "explore", str(folder), "--no-browser"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    found = re.search(r"http://[\d.:]+", process.stdout.readline())
    assert found is not None
    return process, found[0]


def first_load(browser: Any, address: str, view: str) -> tuple[float, float]:
    """Milliseconds to the first paint of the page, and to its first answer."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    start = time.perf_counter()
    page.goto(f"{address}/#{view}", wait_until="commit")
    page.locator(VIEWS[view]).first.wait_for(timeout=60_000)
    answered = 1000 * (time.perf_counter() - start)
    painted = page.evaluate(PAINTED)
    context.close()
    return painted, answered


def prepared(browser: Any, address: str, view: str, length: int) -> Any:
    """The page with a text of `length` tokens read, or a pattern over as many positions."""
    page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
    page.goto(f"{address}/#{view}")
    page.locator(VIEWS[view]).first.wait_for(timeout=60_000)
    if view == "inside":
        page.get_by_label("text", exact=True).fill(("To be, or not to be, that is the question: " * 99)[:length])
        page.get_by_role("button", name="read it").click()
        page.locator("[aria-label^='The positions'] button").nth(length - 1).wait_for(timeout=60_000)
        page.get_by_label("prompt").fill(("To be, or not to be. " * 99)[: length - 64])
        page.get_by_role("button", name="start again").click()
    elif view == "patterns":
        page.get_by_label("length").first.fill(str(length))
    page.wait_for_timeout(2000)
    page.evaluate(SCRIPT)
    return page


def acted(page: Any, what: list[str]) -> float:
    """Milliseconds from an action to what it changes. Before it the user looks at the page."""
    page.wait_for_timeout(PAUSE)
    spent: float = page.evaluate(UNTIL, what)
    return spent


def times(repeat: int, measure: Callable[[], float]) -> str:
    found = [measure() for _ in range(repeat)]
    assert min(found) >= 0, "the page did not answer"
    return f"{statistics.median(found):.0f} ms | {max(found):.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=512, help="tokens, and positions of the pattern")
    parser.add_argument("--repeat", type=int, default=11)
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    start_log(seed=0)
    print(f"# load: {os.getloadavg()[0]:.1f} processes were running on {os.cpu_count()} cores at the start")
    with tempfile.TemporaryDirectory() as parent, sync_playwright() as driver:
        torch.manual_seed(0)
        folder = Path(parent) / "model"
        everyformer.save(everyformer.build("byte-language", "tiny", context=options.length), folder)
        process, address = serve(folder)
        browser = driver.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        try:
            print(f"| what, at {options.length:,} tokens | median | largest of {options.repeat} |\n| --- | --- | --- |")
            for view in VIEWS:
                loads = [first_load(browser, address, view) for _ in range(options.repeat)]
                for name, number in (("first paint", 0), ("first answer", 1)):
                    values = iter([load[number] for load in loads])
                    print(f"| load `{view}`: {name} | {times(options.repeat, lambda v=values: next(v))} |", flush=True)  # type: ignore[misc]
            for view in VIEWS:
                actions = {name: rest for name, (one, *rest) in ACTIONS.items() if one == view}
                page = prepared(browser, address, view, options.length) if actions else None
                for name, rest in actions.items():
                    page.evaluate(UNTIL, rest)  # type: ignore[union-attr]
                    spent = times(options.repeat, lambda p=page, r=rest: acted(p, r))  # type: ignore[misc]
                    print(f"| `{view}`: {name} | {spent} |", flush=True)
        finally:
            browser.close()
            process.terminate()
            process.wait(20)


if __name__ == "__main__":
    main()
