"""Names tell the truth: a tensor called x_BTD has three axes, and within a function equal letters are equal sizes.

A test-only tool watches every function of the library while the tiny members run.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import everyformer
from everyformer import Cache
from everyformer.study.example import example, parts

HOME = str(Path(everyformer.__file__).parent)
CONTRIBUTING = Path(__file__).parent.parent / "CONTRIBUTING.md"
KEYS = re.compile(r": [kv]_[A-Z]+$")
SUFFIX = re.compile(r"[a-z]_([A-Z0-9]+)$")


def legend() -> set[str]:
    """The letters that CONTRIBUTING.md explains, each as `B` batch."""
    score_mod = CONTRIBUTING.read_text().split("**Shape suffixes.**")[1].split("\n- ")[0]
    return set(re.findall(r"`([A-Z])` ", score_mod))


class Watch:
    """Looks at the arguments and, at the end, at all the variables of each function of the library."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.faults: set[str] = set()
        self.sizes: dict[FrameType, dict[str, int]] = {}  # of the functions that are running

    def __enter__(self) -> Watch:
        sys.setprofile(self)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.setprofile(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event in ("call", "return") and frame.f_code.co_filename.startswith(HOME):
            sizes = self.sizes.setdefault(frame, {})
            for name, value in frame.f_locals.items():
                if isinstance(value, Tensor) and (match := SUFFIX.search(name)):
                    self.look(f"{frame.f_code.co_qualname}: {name}", match[1], tuple(value.shape), sizes)
            if event == "return":
                del self.sizes[frame]

    def look(self, name: str, suffix: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        self.names.add(name)
        fits = len(shape) == len(suffix)
        for letter, size in zip(suffix, shape, strict=False):
            if letter.isdigit():
                fits = fits and size == int(letter)
            elif letter == "H" and KEYS.search(name):  # query heads may share keys and values
                fits = fits and sizes.get("H", size) % size == 0
            elif size != 1:  # 1 may stand for an axis that is broadcast
                fits = fits and sizes.setdefault(letter, size) == size
        if not fits:
            self.faults.add(f"{name} has the shape {shape} where {sizes}")


@pytest.fixture(scope="module")
def watch() -> Watch:
    """Every tiny member, forward and backward, through each kernel, padded, and going on from a past."""
    seen = Watch()
    for name in everyformer.members():
        for network, source_width in parts(everyformer.build(name, "tiny")):
            # Sizes of their own, so that a mistaken letter cannot fit by chance.
            data = example(network.value, batch=3, length=7, source_width=source_width).to(dtype=torch.float32)
            with seen:
                patterns = [one for sublayer in network.value.body.sublayers() for one in sublayer.patterns()]
                hashes = bool(patterns) and all(isinstance(one, everyformer.Hashed) for one in patterns)
                fast = () if source_width else ("hashed", "blocked") if hashes else ("blocked",)
                mods = [
                    one for sublayer in network.value.body.sublayers() for one in getattr(sublayer, "score_mods", ())
                ]
                dense = () if any(isinstance(one, everyformer.SoftCap) for one in mods) else ("sdpa",)
                for kernel in ("reference", *dense, *fast) if patterns else ("reference", "auto"):
                    data.run(network, kernel=kernel).hidden.sum().backward()
                if data.is_sequence:
                    data.pad(1, 1).run(network)
                    if network.value.body.is_causal():
                        cache = data.pad(2, 0).cut(0, 6).run(network, cache=Cache()).cache
                        data.cut(4).run(network, cache=cache.reorder(torch.arange(3)).trim(3).roll_back(1))
    return seen


def test_every_name_tells_its_axes(watch):
    assert len(watch.names) > 100
    assert not watch.faults, "\n".join(sorted(watch.faults))


def test_every_letter_is_in_the_legend():
    letters = set()
    for path in Path(HOME).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in (getattr(node, field, None) for field in ("id", "arg", "attr")):
                if isinstance(name, str) and (match := SUFFIX.search(name)):
                    letters |= {letter for letter in match[1] if letter.isalpha()}
    assert len(letters) > 8
    assert not letters - legend(), f"explain {sorted(letters - legend())} under Shape suffixes in CONTRIBUTING.md"


@pytest.mark.parametrize(
    "shape, fits",
    [((2, 3), True), ((1, 3), True), ((2, 1), True), ((2, 4), False), ((2, 3, 1), False), ((2,), False)],
)
def test_the_tool_finds_what_is_wrong(shape, fits):
    watch = Watch()
    sizes: dict[str, int] = {}
    watch.look("f: x_BTD", "BTD", (2, 3, 4), sizes)
    watch.look("f: y_BT", "BT", shape, sizes)
    assert (not watch.faults) == fits
