"""The page's view of the inside in chromium, for a model of every kind: what it shows is what the library computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import everyformer
from everyformer.explore.app import Explorer
from everyformer.explore.library import Library
from everyformer.study.attention_pictures import neighbourhood
from everyformer.study.inner_maps import bucket_maps, gate_maps, halting_maps, span_maps
from everyformer.train import Recipe, train
from tests.chromium import opened_page, until
from tests.explore.conftest import served

pytestmark = pytest.mark.browser
SETTINGS = ("run.steps=2", "run.batch=4", "run.evaluate=0", "run.examples=1")
TEXT = "To be, or not to be"
INNER = {
    "universal-transformer": ("Halting", halting_maps),
    "reformer": ("Hash buckets", bucket_maps),
    "gtrxl": ("Gates", gate_maps),
    "adaptive-span": ("Spans", span_maps),
    "lstm": ("Gates", gate_maps),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The folder of the runs."""
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture(scope="module")
def trained(folder):
    """Returns a function that trains a member and returns its run."""

    @cache
    def run(member: str) -> Any:
        train(Recipe.of(member, *SETTINGS, size="tiny"), folder / member)
        return everyformer.load(folder / member, device="cpu")

    return run


@pytest.fixture(scope="module")
def page(browser, folder) -> Iterator[Any]:
    with (
        served(Explorer(Library([folder], device="cpu"))) as address,
        opened_page(browser, address, base_url=address) as page,
    ):
        yield page


def show(page, run: str) -> None:
    page.goto("about:blank")
    page.goto(f"/#inside/{run}")
    page.get_by_role("region", name="Tokens").wait_for()


def choose(page, position: int) -> None:
    page.get_by_role("toolbar", name=re.compile("positions")).get_by_role("button").nth(position).click()


def weight_shown(page) -> float:
    return float(page.locator("[data-weight]").inner_text().rpartition("weight")[2])


def test_a_pair_shows_its_source_and_its_cross_attention(page, trained):
    run = trained("transformer")
    show(page, "transformer")
    cross = run.attention(part="cross")
    assert page.locator("[data-source] span").all_text_contents() == list(cross.keys)
    page.get_by_role("button", name="cross layer 0, head 1").click()
    canvas = page.get_by_role("application", name=re.compile("layer 0, head 1"))
    box = canvas.bounding_box()
    assert 0.19 < box["height"] / box["width"] < 1.3  # however long the target is beside the source
    rows, columns = len(cross.queries), len(cross.keys)
    canvas.hover(position={"x": box["width"] * 2.5 / columns, "y": box["height"] * (rows - 0.5) / rows})
    assert weight_shown(page) == pytest.approx(float(cross.weights[0][1, -1, 2]), abs=2e-5)


def test_arcs_reach_the_keys_of_a_text_that_is_shorter(page, folder):
    """After 12 steps the model repeats one token until the longest translation."""
    train(Recipe.of("transformer", "run.steps=12", *SETTINGS[1:], size="tiny"), folder / "longer")
    show(page, "longer")
    arcs = page.get_by_role("group", name="Arcs over the text")
    texts = arcs.locator("text")
    texts.last.wait_for()
    assert texts.count() > 60
    in_view = """(box) => [...box.querySelectorAll('text[y="10"]')].every((one) => {
        const at = one.getBoundingClientRect(), around = box.getBoundingClientRect();
        return at.right <= around.right && at.left >= around.left;
    })"""
    positions = page.get_by_role("toolbar", name=re.compile("positions")).get_by_role("button")
    for position in (0, 30, positions.count() - 1):
        positions.nth(position).click()
        page.get_by_role("img", name=re.compile(f"^arcs from query {position} ")).wait_for()
        assert arcs.evaluate(in_view)


def test_the_cells_of_an_image_are_chosen_in_the_image(page, trained):
    run = trained("image-transformer")
    show(page, "image-transformer")
    picture = page.get_by_role("img", name=re.compile("the image"))
    box = picture.bounding_box()
    pixel_YX = run.task_with_data.inference.probe_input(run.network, None, 0).image.pixel_CYX[0]
    height, width = pixel_YX.shape
    picture.click(position={"x": box["width"] * 5.5 / width, "y": box["height"] * 9.5 / height})
    assert "9,5" in page.locator("[data-weight]").inner_text()
    came = page.locator("[data-surprisal] code").inner_text()
    assert int(came) == round(float(pixel_YX[9, 6]) * 255)  # the pixel after the one that is read
    predicted = page.get_by_role("region", name="Predicted").inner_text()
    page.get_by_label("image", exact=True).fill("100000")
    page.get_by_role("alert").filter(has_text="example 100000 is not one of").wait_for()
    assert page.get_by_role("region", name="Predicted").inner_text() == predicted


def test_the_patches_of_a_classified_image_are_shown(page, trained):
    run = trained("vit")
    show(page, "vit")
    page.get_by_role("img", name=re.compile("the image")).wait_for()
    shown = page.get_by_role("region", name="Predicted").inner_text()
    inputs = run.task_with_data.inference.probe_input(run.network, None, 0)
    logits = run.network(*inputs.inputs, **inputs.options).logits
    assert f"{100 * float(logits.detach().softmax(-1).max()):.1f} %" in shown


def test_the_neighbours_of_a_node_are_around_it(page, trained):
    run = trained("graph-classifier")
    show(page, "graph-classifier")
    graph = run.task_with_data.inference.probe_input(run.network, None, 0).graph
    choose(page, 3)
    until(page, "document.querySelector('svg[aria-label^=\"the graph around node 3;\"]') !== null")
    nodes = neighbourhood(graph.edge_NN, 3)
    circles = page.get_by_role("button", name=re.compile(r"^node \d+, weight"))
    weights = run.attention().weights[-1][0, 3]
    shown = dict(
        re.findall(r"node (\d+), weight ([\d.e-]+)", " ".join(one.get_attribute("aria-label") for one in circles.all()))
    )
    assert {int(node): float(weight) for node, weight in shown.items()} == pytest.approx(
        {node: float(weights[node]) for node in nodes}, abs=1e-3
    )


@pytest.mark.parametrize("member", INNER)
def test_what_is_inside_a_model_is_shown_by_position(page, trained, member):
    run = trained(member)
    show(page, member)
    page.get_by_label("text", exact=True).fill(TEXT)
    with page.expect_response("**/api/inside"):
        page.get_by_role("button", name="read it").click()
    choose(page, 4)
    title, maps = INNER[member]
    figures = page.get_by_role("region", name=re.compile(title)).get_by_role("figure")
    found = maps(run.network, run.task.inference.probe_input(run.network, TEXT))
    until(page, f"document.querySelectorAll('section[aria-label^=\"{title}\"] figure').length === {len(found)}")
    for index, one in enumerate(found):
        text = figures.nth(index).locator("p").inner_text()
        assert text.startswith("e (4): ") and one.title in figures.nth(index).inner_text()
        if one.count_T is not None:
            assert f"halts after {one.count_T[4]} step" in text
            assert text.partition("; ")[2].startswith("step 0: ")  # as the grid of heads counts them
        numbers = [float(part.rpartition(": ")[2]) for part in text.removeprefix("e (4): ").split(", ")]
        assert numbers == pytest.approx(one.value_RT[:, 4].tolist(), rel=1e-2, abs=1e-6)


def test_the_weights_of_an_lstm_are_shown_in_time(page, trained):
    run = trained("lstm")
    show(page, "lstm")
    page.get_by_label("text", exact=True).fill(TEXT)
    with page.expect_response("**/api/inside"):
        page.get_by_role("button", name="read it").click()
    page.get_by_role("button", name="layer 0, group 1").click()
    canvas = page.get_by_role("application", name=re.compile("weights of earlier inputs of layer 0, group 1"))
    box, size = canvas.bounding_box(), len(TEXT)
    canvas.hover(position={"x": box["width"] * 6.5 / size, "y": box["height"] * 12.5 / size})
    assert weight_shown(page) == pytest.approx(float(run.attention(TEXT).weights[0][1, 12, 6]), abs=2e-5)
    text = page.get_by_role("region", name="The chosen head").inner_text()
    assert "What is left of earlier inputs" in text and "state at 12" in text
    assert "quer" not in text and "key" not in text  # a recurrent layer has neither
