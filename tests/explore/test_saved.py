"""A view that is saved as one file.

With test_browser.py it holds the commands of docs/explore.md.
"""

from __future__ import annotations

import json
import re

import pytest

from everyformer.cli.main import main
from everyformer.explore.app import Explorer
from everyformer.explore.library import Library
from everyformer.explore.saved import Saved, save_page


def test_a_saved_page_has_the_answers_and_allows_its_own_script_alone(folder, tmp_path):
    explorer, file = Explorer(Library([folder / "first"], device="cpu")), tmp_path / "page.html"
    save_page(explorer, file, Saved("inside", "</script><script>alert(1)"))
    page = file.read_text()
    assert page.count("</script>") == 2 and "<script>alert" not in page
    recorded = json.loads(re.search(r'<script id="recorded" type="application/json">(.*)</script>', page)[1])
    assert recorded["text"].startswith("</script>") and len(recorded["answers"]) == 1 + 1 + 4
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "connect" not in policy
    assert not re.search(r'(src|href)="(?!data:)', page) and str(folder) not in page


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["first", "--out", "page.txt"], "give a .html file"),
        (["first", "--out", "no/page.html"], "a folder that exists"),
        (["first", "memory", "--view", "inside", "--out", "page.html"], "shows one run, but 2 are given"),
        (["first", "--text", "x"], "--out"),
        (["notes"], "neither a run nor a saved model"),
        (["nothing"], "there is no folder nothing"),
        (["first", "--text", "", "--out", "page.html"], "the text is empty"),
        (["first", "--text", "x" * 400, "--out", "page.html"], "positions"),
        (["first", "--view", "patterns", "--text", "caual", "--out", "page.html"], "did you mean causal"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_the_reason(folder, monkeypatch, capsys, arguments, says):
    monkeypatch.chdir(folder)
    assert main(["explore", *arguments]) == 2
    assert says in capsys.readouterr().err and not (folder / "page.html").exists()
