"""A small run for tests, and a command that trains it in another process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from everyformer.task.language import Language
from everyformer.train.recipe import Recipe, override

BASE = (
    "run.steps=12", "run.batch=4", "run.evaluate=6", "run.save=3", "run.examples=4", "run.keep=3", "run.device=cpu",
    "model.width=16", "model.heads=2", "model.layers=2", "task.context=8", "optim.warmup=4", "optim.ema=0.5",
)  # fmt: skip
TEXT = "the quick brown fox jumps over the lazy dog; pack my box with five dozen liquor jugs.\n" * 40

SCRIPT = """
import sys, time
import torch
from everyformer.train.loop import resume, train
from tests.train.small import recipe
torch.set_num_threads(1)
folder, data, verb, *settings = sys.argv[1:]
def slow(record):
    time.sleep(0.01)  # so that a run does not end before it is killed
train(recipe(data, *settings), folder, callbacks=(slow,)) if verb == "train" else resume(folder, callbacks=(slow,))
"""


def recipe(data: Path | str, *settings: str) -> Recipe:
    start = Recipe(member="byte-language", size="tiny", task=Language(), data=str(data))
    return override(start, [*BASE, "model.dropout=0.1", *settings])


def text(folder: Path, content: str = TEXT) -> Path:
    path = folder / "text.txt"
    path.write_text(content)
    return path


def command(folder: Path, data: Path, verb: str, *settings: str) -> list[str]:
    script = folder.parent / "script.py"
    script.write_text(SCRIPT)
    return [sys.executable, str(script), str(folder), str(data), verb, *settings]


def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )


def finish(command: list[str]) -> str:
    process = start(command)
    try:
        output, _ = process.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun's agent ends its workers then
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def same(one: Path, two: Path, names: tuple[str, ...] = ("model", "optimizer", "ema")) -> bool:
    """Returns True if two checkpoints are bitwise equal."""
    from safetensors.torch import load_file

    for name in names:
        a, b = load_file(one / f"{name}.safetensors"), load_file(two / f"{name}.safetensors")
        if a.keys() != b.keys() or not all(torch.equal(a[key], b[key]) for key in a):
            return False
    return True
