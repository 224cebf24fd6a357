"""`everyformer show pattern`: the drawing equals the mask."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.image import imread

from everyformer.attention.kernels.blocked import computed_fraction
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.cli.main import main
from everyformer.study.pattern_images import COLORS, draw, example_context, pool

PATTERNS = (
    "causal & window(8)",
    "causal & (block(4) | summary(4, 1))",
    "~stride(3)",
    "causal & same_document",
    "graph",
    "graph(((0, 1), (5, 2)))",
    "visible & window(3)",
)


@pytest.fixture
def show(capsys, monkeypatch):
    """Draws a pattern and returns the text."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def show(text: str, *options: str, columns: int = 80) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        code = main(["show", "pattern", text, *options])
        out, err = capsys.readouterr()
        assert code == 0, err
        lines = [line for line in out.splitlines() if "│" in line or columns >= 60]
        assert all(len(line) <= columns or len(line.split()) == 1 or line.startswith("note:") for line in lines)
        return out

    return show


def cells(out: str) -> list[list[bool]]:
    """The grid of half blocks, read back."""
    rows = [line.split("│")[1] for line in out.splitlines() if line.count("│") == 2]
    both = [[half in "▀█" for half in row] for row in rows], [[half in "▄█" for half in row] for row in rows]
    return [row for pair in zip(*both, strict=True) for row in pair]


def fact(out: str, label: str) -> str:
    (line,) = (line for line in out.splitlines() if line.startswith(label))
    return line.removeprefix(label).strip()


@pytest.mark.parametrize("length", (1, 9, 32))
@pytest.mark.parametrize("text", PATTERNS)
def test_the_grid_is_the_mask(text, length, show):
    out = show(text, "--length", str(length))
    pattern = parse(text)
    allowed_QK = pattern.mask(length, context=example_context(pattern, length)[0])[0]
    assert cells(out)[:length] == allowed_QK.tolist()
    assert not any(map(any, cells(out)[length:]))  # the lower half of an odd last row
    assert f"({int(allowed_QK.sum())} of {length * length:,})" in fact(out, "allowed")
    assert fact(out, "sees future") == ("yes" if pattern.attends_to_future() else "no")


@pytest.mark.parametrize("text", ("causal & window(8)", "causal & (window(8) | stride(16))"))
def test_the_printed_numbers_are_those_of_the_pattern(text, show):
    out, pattern = show(text, "--length", "256"), parse(text)
    assert fact(out, "allowed").startswith(f"{pattern.density(256):.1%} ")
    live, blocks = map(int, re.findall(r"(\d+) of (\d+) blocks", fact(out, "computed blocks"))[0])
    assert blocks == 16 * 16 and live / blocks == pattern.computed_blocks(256, 16)
    assert fact(out, "blocked kernel").startswith(
        f"computes {computed_fraction(Request.of(pattern, 256, 256, 1)):.1%} "
    )


@pytest.mark.parametrize(
    ("length", "columns", "scale"), [(32, 60, 1), (55, 60, 1), (56, 60, 2), (100, 60, 2), (150, 60, 3)]
)
def test_a_long_pattern_is_scaled_to_the_terminal(length, columns, scale, show):
    out = show("causal & stride(7)", "--length", str(length), columns=columns)
    seen = parse("causal & stride(7)").mask(length)[0].tolist()
    wanted = [
        [
            any(seen[i][j] for i in range(q, min(q + scale, length)) for j in range(k, min(k + scale, length)))
            for k in range(0, length, scale)
        ]
        for q in range(0, length, scale)
    ]
    assert cells(out)[: len(wanted)] == wanted
    assert (f"a cell stands for {scale} x {scale} positions" in out) == (scale > 1)


@pytest.mark.parametrize(("options", "heads"), [([], 2), (["--heads", "3"], 3)])
def test_by_head_has_one_grid_per_head(options, heads, show):
    text = "by_head(causal, window(3))"
    out = show(text, "--length", "16", *options, columns=30)
    pattern = parse(text)
    wanted = [row for head in range(heads) for row in pattern.for_head(head).mask(16)[0].tolist()]
    assert cells(out) == wanted
    assert all(f"head {head}: {pattern.for_head(head)}" in out for head in range(heads))


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("causal & same_document", "three documents"),
        ("graph", "binary tree"),
        ("visible", "last quarter as padding"),
        ("hashed(2, 4, 3)", "hashed is drawn with random keys"),
    ],
)
def test_example_data_are_noted(text, note, show):
    assert re.search(rf"^note: .*{note}", show(text), re.M)
    assert "note:" not in show("causal")


def test_pooling_by_blocks_counts_the_ragged_ones():
    allowed_HQK = torch.zeros(1, 17, 17, dtype=torch.bool)
    allowed_HQK[0, 16, 3] = True
    assert pool(allowed_HQK, 16).tolist() == [[[False, False], [True, False]]]


@pytest.mark.parametrize(
    ("text", "length", "scale"),
    [("causal & window(8)", 32, 1), ("by_head(causal, window(5), full)", 24, 1), ("~window(9)", 700, 2)],
)
def test_the_image_is_the_mask(text, length, scale):
    pattern = parse(text)
    allowed_HQK = pattern.mask(length, heads=3)
    figure = draw(pattern, allowed_HQK)
    assert figure.get_suptitle() == text and len(figure.axes) == 3
    for allowed_QK, plot in zip(pool(allowed_HQK, scale), figure.axes, strict=True):
        future_QK = allowed_QK & (torch.arange(len(allowed_QK)) > torch.arange(len(allowed_QK))[:, None])
        (image,) = plot.images
        assert torch.equal(torch.tensor(image.get_array().data), allowed_QK.int() + future_QK.int())
        assert (plot.get_xlabel(), plot.get_ylabel()) == ("key position", "query position")
        assert plot.get_xlim() == plot.get_ylim()[::-1] == (-0.5, length - 0.5)  # square cells, queries down
        assert plot.get_aspect() == 1


@pytest.mark.parametrize(
    ("text", "size"), [("causal & window(8)", (864, 944)), ("by_head(causal, window(5), full)", (2016, 752))]
)
def test_the_file_is_an_image_of_the_right_size(text, size, show, tmp_path):
    file = tmp_path / "pattern.png"
    assert f"wrote {file}" in " ".join(show(text, "--out", str(file)).split())
    pixels = imread(file)[:, :, :3]
    assert pixels.shape[:2] == size[::-1]
    shares = {name: (abs(pixels - to_rgb(color)).max(-1) < 1e-2).mean() for name, color in COLORS.items()}
    assert shares["allowed"] > 0.1 and (shares["allowed, in the future"] > 0.05) == ("by_head" in text)


def test_other_image_types(show, tmp_path):
    show("causal", "--out", str(tmp_path / "a.svg"))
    assert "<svg" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("pattern.pngg", "not an image type; did you mean png"),
        ("pattern", "has the suffix (none)"),
        ("missing/pattern.png", "does not exist; create it"),
        ("folder.png", "is a folder"),
        ("a" * 300 + ".png", "File name too long"),
    ],
)
def test_an_image_that_cannot_be_written_is_refused_first(name, message, capsys, tmp_path):
    (tmp_path / "folder.png").mkdir()
    assert main(["show", "pattern", "causal", "--out", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and message in err


@pytest.mark.parametrize("words", ["bench attention --figure x.png"])
def test_a_missing_matplotlib_is_reported_before_long_work(words, capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert "needs matplotlib, which is not installed" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_without_matplotlib_the_remedy_is_named(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert main(["show", "pattern", "causal", "--out", str(tmp_path / "a.png")]) == 2
    assert "pip install 'everyformer[plot]'" in capsys.readouterr().err
    assert main(["show", "pattern", "causal"]) == 0
