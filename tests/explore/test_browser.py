"""The page in Debian's chromium. Every test fails on an error in the console, and on a request that leaves this machine."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import everyformer
from everyformer.attention.parse import parse
from everyformer.explore.saved import Saved, save_page
from everyformer.family.table import member, parameters
from tests.chromium import opened_page, until
from tests.explore.conftest import SCRIPT

pytestmark = pytest.mark.browser
TEXT = "To be, or not to be"


@pytest.fixture
def page(browser, address) -> Iterator[Any]:
    with opened_page(browser, address, base_url=address) as page:
        yield page


def patterns_of(trained) -> set[str]:
    return {str(pattern) for one in trained.network.value.body.sublayers() for pattern in one.patterns()}


def read_text(page, text: str = TEXT, run: str = "first") -> None:
    page.goto(f"/#inside/{run}")
    page.get_by_label("text", exact=True).fill(text)
    with page.expect_response("**/api/inside"):
        page.get_by_role("button", name="read it").click()
    page.get_by_role("toolbar", name=re.compile("positions")).get_by_role("button").nth(len(text) - 1).wait_for()


def test_a_pattern_is_drawn_and_its_numbers_are_the_librarys(page):
    page.goto("/#patterns")
    page.get_by_role("textbox", name="Pattern").fill("causal & window(5)")
    until(page, "document.querySelector('canvas')?.ariaLabel.startsWith('causal & window(5)')")
    allowed = int(parse("causal & window(5)").mask(64).sum())
    assert f"({allowed} of 4,096)" in page.locator("[data-density]").inner_text()
    canvas = page.get_by_role("application")
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] * 9.5 / 64, "y": box["height"] * 20.5 / 64})
    says = page.locator("[data-keys]")
    assert says.inner_text().startswith("query 20 attends to 5 keys: 16–20 · key 9 is not allowed")
    canvas.press("ArrowDown")
    assert says.inner_text().startswith("query 21 attends to 5 keys: 17–21")
    page.get_by_label("window size").fill("3")
    until(page, "document.querySelector('[data-keys]').innerText.includes('3 keys: 19–21')")


def test_what_a_model_computes_is_shown_as_the_library_computes_it(page, folder):
    model = everyformer.load(folder / "first", device="cpu")
    read_text(page)
    score = model.score([list(TEXT.encode())])[0]
    bits = -score.log_likelihood / math.log(2)
    assert f"the text takes {bits:.1f} bits" in page.get_by_role("region", name="Tokens").inner_text()
    page.get_by_role("button", name="layer 0, head 1").click()
    canvas = page.get_by_role("application", name=re.compile("layer 0, head 1"))
    canvas.focus()
    size, weight = len(TEXT), model.attention(TEXT).weights[0][1]
    box = canvas.bounding_box()
    canvas.hover(position={"x": box["width"] * 3.5 / size, "y": box["height"] * 10.5 / size})
    shown = float(page.locator("[data-weight]").inner_text().rpartition("weight")[2])
    assert shown == pytest.approx(float(weight[10, 3]), abs=2e-5)
    canvas.press("ArrowLeft")
    assert "key 2" in page.locator("[data-weight]").inner_text()


def test_a_text_that_is_refused_leaves_the_last_one(page):
    read_text(page)
    for text, says in (("x" * 10_000_000, "the body has more than"), ("x" * 40, "positions")):
        page.get_by_label("text", exact=True).evaluate(
            "(box, text) => { box.value = text; box.dispatchEvent(new Event('input', { bubbles: true })); }", text
        )
        page.get_by_role("button", name="read it").click()
        page.get_by_role("alert").filter(has_text=says).wait_for()
        page.wait_for_timeout(200)
        assert page.get_by_role("alert").count() == 1
        assert page.get_by_role("application", name=re.compile("attention weights of layer")).count() == 1


def test_a_head_is_switched_off_and_the_text_takes_other_bits(page):
    read_text(page)
    page.get_by_role("button", name="layer 0, head 0").click()
    page.get_by_role("button", name="switch it off").click()
    assert re.search(r"takes [\d.]+ bits instead of [\d.]+", page.locator("[data-effect]").inner_text())
    page.get_by_role("button", name="switch it on").click()
    page.locator("[data-effect]").wait_for(state="detached")


def test_a_text_is_generated_step_by_step_and_branches(page, folder):
    model = everyformer.load(folder / "first", device="cpu")
    read_text(page)
    part = page.get_by_role("region", name="Generate step by step")
    part.get_by_label("temperature").fill("0")
    for _ in range(3):
        with page.expect_response("**/api/generate/step"):
            part.get_by_role("button", name="next token").click()
    tokens = part.get_by_role("toolbar").get_by_role("button")
    until(page, "document.querySelector('[aria-label=\"Generate step by step\"] [role=toolbar]').children.length === 9")
    expected = everyformer.generate(model.network, [list(b"ROMEO:")], 3, temperature=0)[0][6:]
    assert [text.replace("\xa0", " ") for text in tokens.all_inner_texts()[6:]] == [
        chr(one) if 31 < one < 127 else "\\n" if one == 10 else f"\\x{one:02x}" for one in expected
    ]
    tokens.nth(7).click()
    choices = part.get_by_role("list", name="candidates").get_by_role("button")
    until(page, "document.querySelectorAll('[aria-label^=candidates] button').length >= 20")
    choices.nth(1).click()
    part.get_by_text("Earlier branches").wait_for()
    assert tokens.count() == 8


def test_a_token_is_asked_for_once(page):
    read_text(page)
    asked = list[str]()
    page.on("request", lambda one: asked.append(one.url) if "generate/step" in one.url else None)
    for _ in range(3):
        with page.expect_response("**/api/generate/step"):
            page.get_by_role("button", name="next token").click()
    assert len(asked) == 3


def test_the_arrow_keys_choose_a_head_and_the_tab_key_leaves_the_grid(page):
    read_text(page)
    page.get_by_role("button", name="layer 1, head 0").click()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    page.get_by_role("application", name=re.compile("layer 0, head 1")).wait_for()
    focused = "document.activeElement.ariaLabel ?? document.activeElement.innerText"
    assert page.evaluate(focused).strip() == "layer 0, head 1"
    page.keyboard.press("Tab")
    assert page.evaluate(focused) == "switch it off"


def test_a_segment_memory_reaches_back_across_segments(page):
    read_text(page, "x" * 40, "memory")
    with page.expect_response("**/api/inside"):
        page.get_by_label(re.compile("segments of")).fill("8")
        page.get_by_label(re.compile("segments of")).press("Enter")
    canvas = page.get_by_role("application")
    canvas.wait_for()
    page.wait_for_timeout(300)
    box = canvas.bounding_box()
    for key, reached in ((30, True), (10, False)):  # the memory holds 16 positions before the segment that begins at 32
        canvas.hover(position={"x": box["width"] * (key + 0.5) / 40, "y": box["height"] * 35.5 / 40})
        weight = float(page.locator("[data-weight]").inner_text().rpartition("weight")[2])
        assert (weight > 0) == reached


def test_the_family_is_a_map_and_a_choice_changes_the_model(page):
    page.goto("/#family")
    page.get_by_role("button", name="gpt2", exact=True).click()
    shown = page.locator("[data-parameters]")
    shown.wait_for()
    assert shown.inner_text() == f"{parameters(member('gpt2', 'tiny')):,}"
    page.get_by_role("spinbutton", name="layers").fill("3")
    page.get_by_role("spinbutton", name="layers").press("Tab")
    until(page, f"document.querySelector('[data-parameters]').innerText === '{170560:,}'")
    assert parameters(member("gpt2", "tiny", layers=3)) == 170560
    page.get_by_label("add a sublayer").select_option("lstm")
    page.get_by_role("button", name="remove lstm, sublayer 3").click()
    page.get_by_role("button", name="move feed-forward, sublayer 2, up").click()
    until(page, "document.querySelector('ol li').innerText.startsWith('feed-forward')")
    page.get_by_label("segment memory").fill("32")
    page.get_by_label("segment memory").press("Tab")
    page.get_by_text("not legal").wait_for()
    assert "Learned has a last position" in page.get_by_role("region", name="The model").inner_text()


def test_changes_that_follow_each_other_at_once_are_all_made(page):
    page.goto("/#family")
    page.get_by_label("rotary").wait_for()
    page.evaluate(
        """() => {
            const field = document.querySelector('[aria-label=pattern]');
            for (const text of ['causal & w', 'causal & window(8)']) {
                field.value = text;
                field.dispatchEvent(new Event('input', { bubbles: true }));
            }
            const labelled = (name) => [...document.querySelectorAll('label')].find((one) => one.innerText.trim() === name);
            for (const name of ['rotary', 'sinks']) labelled(name).click();
            const heads = labelled('heads').querySelector('input');
            heads.value = 2;
            heads.dispatchEvent(new Event('change', { bubbles: true }));
        }"""
    )
    page.get_by_role("button", name="Python", exact=True).click()
    value = "document.querySelector('[aria-label=\"the Python\"]').innerText"
    until(page, f"{value}.includes('Standard(heads=2')")
    assert "pattern=Causal() & Window(size=8)" in page.evaluate(value)
    assert "score_mods=(Rotary(), Sinks())" in page.evaluate(value)
    assert page.get_by_role("alert").count() == 0


def test_a_run_that_is_not_there_is_named_and_another_one_is_shown(page):
    page.goto("/#inside/nothing")
    page.get_by_role("alert").filter(has_text="There is no run nothing; this is ").wait_for()
    page.get_by_role("main").get_by_role("combobox").select_option("memory")
    page.get_by_role("region", name="Tokens").wait_for()
    until(page, "document.querySelectorAll('[role=alert]').length === 0")


def test_the_curves_and_the_recipes_of_runs_are_shown(page):
    page.goto("/#runs")
    page.get_by_label("show first").wait_for()
    page.get_by_text("Training and validation").first.wait_for()
    page.get_by_label("show memory").check()
    assert page.get_by_role("row", name=re.compile("^member byte-language")).count() == 1
    page.get_by_text("Samples of first by step").click()
    assert "step 6" in page.locator("details[open]").inner_text()


def test_a_folder_with_a_script_in_its_name_is_only_text(page):
    page.goto("/#runs")
    page.get_by_text(SCRIPT.replace("/", "|")).first.wait_for()
    assert page.locator("main script").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["inside/first", "patterns", "family", "runs"])
def test_every_view_fits_a_telephone_and_names_its_controls(browser, address, view, scheme):
    size = {"width": 380, "height": 800}
    with opened_page(browser, address, base_url=address, viewport=size, color_scheme=scheme) as page:
        page.goto(f"/#{view}")
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        unnamed = page.evaluate(
            """() => [...document.querySelectorAll('button, input, select, textarea, canvas, svg[role]')].filter((one) =>
                !(one.ariaLabel || one.labels?.length || one.textContent.trim() || one.closest('[aria-hidden]') || one.ariaHidden))
                .map((one) => one.outerHTML)"""
        )
        assert unnamed == []
        page.locator("h2, table").first.wait_for()
        levels = page.evaluate("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
        assert levels[0] == 1 and all(after - before <= 1 for before, after in itertools.pairwise(levels))
        unreached = page.evaluate(
            """() => [...document.querySelectorAll('.scroll')].filter((one) =>
                one.tabIndex < 0 && !one.querySelector('button, input, select, [tabindex]')).map((one) => one.outerHTML)"""
        )
        assert unreached == []  # what scrolls can be scrolled with the keys


def test_the_page_is_used_with_the_keyboard_alone(page):
    page.goto("/#patterns")
    page.get_by_role("application").wait_for()
    for _ in range(30):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.tagName") == "CANVAS":
            break
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert page.evaluate("document.activeElement.tagName") == "CANVAS" and outline == "solid"
    before = page.locator("[data-keys]").inner_text()
    page.keyboard.press("ArrowUp")
    assert page.locator("[data-keys]").inner_text() != before


@pytest.mark.parametrize("view", ["inside", "patterns", "family", "runs"])
def test_a_saved_page_works_without_a_server(browser, folder, tmp_path, view):
    from everyformer.explore.app import Explorer
    from everyformer.explore.library import Library

    file = tmp_path / "page.html"
    text = TEXT if view == "inside" else None
    save_page(Explorer(Library([folder / "first"], device="cpu")), file, Saved(view, text))
    with opened_page(browser, file.as_uri()) as page:
        page.goto(file.as_uri())
        page.locator("h1").wait_for()
        if view == "inside":
            page.get_by_role("button", name="layer 1, head 1").click()
            page.get_by_role("application", name=re.compile("layer 1, head 1")).wait_for()
        elif view != "runs":
            page.locator("canvas").first.wait_for()
        else:
            page.get_by_text("Training and validation").wait_for()
        page.wait_for_timeout(300)
        assert page.get_by_role("alert").count() == 0


def test_a_new_user_finds_why_a_head_looks_where_it_looks_and_trains_a_legal_pattern(page, folder, tmp_path):
    """With the page alone: look into the model, see the reason, edit a pattern until it is legal, copy the command, train."""
    read_text(page)
    page.get_by_role("button", name="layer 1, head 0").click()
    why = page.get_by_role("region", name="The chosen head")
    why.get_by_role("application").focus()
    text = why.inner_text()
    assert "the pattern allows causal" in text and "from q · k" in text and "a query shares its weight among" in text
    weight_K = everyformer.load(folder / "first", device="cpu").attention(TEXT).weights[1][0, -1]
    first, second = (why.get_by_role("row").nth(row).inner_text().split("\t") for row in (1, 2))
    order = (-weight_K).argsort().tolist()
    assert [int(row[0].split()[-1]) for row in (first, second)] == order[:2]  # where it looks
    ratio = math.log(float(weight_K[order[0]] / weight_K[order[1]]))
    assert float(first[2]) - float(second[2]) == pytest.approx(ratio, abs=0.011)  # and why, as the page explains it
    page.get_by_role("link", name="Pattern editor").click()
    field = page.get_by_role("textbox", name="Pattern")
    field.fill("window(4) | prefix(2)")
    page.get_by_text("add causal &").first.wait_for()
    assert page.get_by_text("Train a language model with it").count() == 0
    field.fill("causal & (window(4) | prefix(2))")
    page.get_by_text("Train a language model with it").wait_for()
    command = page.get_by_label("the command", exact=True).inner_text()
    words = [sys.executable, "-m", *shlex.split(command)]
    tiny = ["run.steps=2", "run.batch=2", "run.evaluate=0", "task.context=32", "task.valid=0.001", "run.examples=2"]
    words[words.index("runs/mine")] = str(tmp_path / "mine")
    subprocess.run([*words, *tiny], check=True, capture_output=True, cwd=tmp_path)
    trained = everyformer.load(tmp_path / "mine", device="cpu")
    assert patterns_of(trained) == {"causal & (window(4) | prefix(2))"}


def test_a_model_of_parts_is_trained_by_the_command_that_the_page_shows(page, tmp_path):
    page.goto("/#family")
    page.get_by_role("button", name="gpt2", exact=True).click()
    page.get_by_role("textbox", name="pattern", exact=True).fill("causal & window(8)")
    until(page, "document.querySelector('[aria-label=\"the command\"]')?.innerText.startsWith('echo')")
    command = page.get_by_label("the command", exact=True).inner_text()
    tiny = "run.steps=2 run.batch=2 run.evaluate=0 task.context=32 task.valid=0.001 run.examples=2"
    command = command.replace("everyformer train", f"{sys.executable} -m everyformer train") + f" {tiny}"
    subprocess.run(command, shell=True, check=True, capture_output=True, cwd=tmp_path)
    trained = everyformer.load(tmp_path / "runs" / "mine", device="cpu")
    assert patterns_of(trained) == {"causal & window(8)"}
