"""The server of the page: what it answers, and what it refuses."""

from __future__ import annotations

import re

import numpy as np
import pytest

from everyformer.attention.parse import parse
from everyformer.explore.answer import Answer, quantised
from everyformer.explore.app import PAGE, Explorer
from everyformer.explore.library import Library
from tests.explore.conftest import unpack


def test_the_matrix_of_a_pattern_is_the_librarys(client):
    text = "by_head(causal & window(3), full)"
    for head in (0, 1):
        answer = client.post("/api/pattern", json={"text": text, "length": 13, "head": head})
        data, (bits,) = unpack(answer.content)
        allowed_QK = np.unpackbits(bits, count=13 * 13, bitorder="little").reshape(13, 13)
        assert (allowed_QK == parse(text).mask(13, heads=2)[head].numpy()).all()
        assert data["allowed"] == allowed_QK.sum() and data["heads"] == 2


def test_the_cost_names_the_kernels_and_the_reasons(client):
    data = client.post("/api/pattern/cost", json={"text": "window(4)", "length": 64}).json()
    reasons = {one["use"]: one["reasons"] for one in data["uses"]}
    assert reasons["a classifier"] == []
    assert "add causal &" in reasons["a language model"][0]
    fractions = {one["name"]: one.get("fraction") for one in data["kernels"]}
    assert fractions["reference"] == 1 and data["auto"] == "sdpa" and data["future"]


def test_the_commands_of_the_page_import_the_parts_of_ones_own():
    explorer = Explorer(Library(), ["own parts.py"])
    pattern = explorer.answer("/api/pattern/cost", b'{"text": "causal", "length": 8}').data["train"]
    member = explorer.answer("/api/family/member", b'{"name": "gpt2", "size": "tiny"}').data["train"]
    assert pattern == (
        "everyformer train sparse-transformer --size tiny model.patterns=causal --import 'own parts.py' --out runs/mine"
    )
    assert member == "everyformer train gpt2 --size tiny --import 'own parts.py' --out runs/mine"


def test_arrays_survive_the_way_to_the_page():
    arrays = [np.arange(3, dtype=np.uint8), np.arange(6, dtype=np.uint16).reshape(2, 3), np.ones(1, np.float32)]
    data, read = unpack(Answer({"name": "é"}, arrays).encode())
    assert data["name"] == "é" and all((a == b).all() for a, b in zip(arrays, read, strict=True))


def test_weights_are_quantised_to_a_65535th_of_the_largest():
    weight_QK = np.random.default_rng(0).random((5, 7)).astype(np.float32) * 0.3
    code_QK, largest = quantised(weight_QK)
    assert np.abs(code_QK * (largest / 65535) - weight_QK).max() <= 0.51 * largest / 65535
    assert quantised(np.zeros((2, 2), np.float32))[1] == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]:80"])
def test_another_host_is_refused(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize("host", ["localhost:8000", "127.0.0.1", "[::1]:8000", "[::1]"])
def test_this_machine_is_answered(client, host):
    assert client.get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1", "http://127.0.0.1:1"])
def test_a_page_of_another_origin_is_refused(client, origin):
    answer = client.post("/api/pattern", json={"text": "causal"}, headers={"Origin": origin})
    assert answer.status_code == 403 and "only the page" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/../pyproject.toml", "/%2e%2e/app.py", "/app.py", "/page/../app.py", "//etc/passwd"])
def test_only_the_files_of_the_page_are_served(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"text": "causal & windo(3)"}, "did you mean window"),
        ({"text": "causal", "length": 5000}, "length"),
        ({"text": "causal", "more": 1}, "no field 'more'"),
        ({"text": "causal &"}, "cannot read the pattern"),
        ({}, "no text"),
    ],
)
def test_a_wrong_request_is_refused_with_one_sentence(client, body, says):
    answer = client.post("/api/pattern", json=body)
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_a_text_of_ten_megabytes_is_refused(client):
    assert client.post("/api/pattern", json={"text": "a" * 10_000_000}).status_code == 413


def test_the_page_may_load_nothing_from_elsewhere(client):
    policy = client.get("/").headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy


def luminance(colour: str) -> float:
    """The relative luminance of #rrggbb, as WCAG 2 defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_text_of_every_colour_can_be_read():
    schemes = re.findall(r":root \{(.*?)\}", (PAGE.parents[3] / "explore/src/page.css").read_text(), re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        for ink in ("ink", "quiet", "accent", "future", "good", "bad"):
            for ground in ("paper", "panel"):
                low, high = sorted(luminance(colours[one]) for one in (ink, ground))
                assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground)
