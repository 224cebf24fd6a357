"""Measures evaluation: bytes of a text per second, with a stride of half a window, beside the forward pass alone.

    for speed in bench(torch.device("cpu"), 16_384): print(speed)

The model is Bloem's byte model at its published size, in the precision of a run on the device. With such a stride each position is computed
twice, so an evaluation takes at least the forward pass of twice as many positions; the forward pass is of batches as large.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from everyformer.infer.evaluate import MAX_CPU_WINDOWS, MAX_LOGITS
from everyformer.network.model import Model
from everyformer.study.ceilings import seconds
from everyformer.train.learner import autocast
from everyformer.train.recipe import Recipe

SIZE = "paper"
TRAINED = 4096  # bytes of the training split, which nothing reads
BYTES, FEW_BYTES = {"cuda": 5_000_000}, 16_384  # evaluated, unless another number is asked for
LEAST = 1024  # bytes: some windows


@dataclass(frozen=True)
class EvaluationSpeed:
    """Positions that the model computes per second (median, least, most), and bytes that are scored per second."""

    way: str
    positions: float
    least: float
    most: float
    scored: float | None = None


def bench(device: torch.device, size: int, *, repeats: int = 5, model_size: str = SIZE) -> list[EvaluationSpeed]:
    """Returns the speed of the forward pass, and that of the evaluation of a text of so many bytes, measured in turn."""
    precision = "bf16" if device.type == "cuda" else "fp32"
    with TemporaryDirectory() as folder:
        _write(Path(folder), size)
        recipe = Recipe.of("byte-language", size=model_size, data=folder)
        data = recipe.task.open(recipe.data, None)
        value = data.adapt(recipe.value(data.member_settings()))
        assert isinstance(value, Model)
        torch.manual_seed(0)
        network, task = value.build().to(device).eval(), data.fit(value)
        window = data.context or 1
        rows = min(
            max(1, size // window), MAX_LOGITS // (window * 256), 1 << 30 if device.type == "cuda" else MAX_CPU_WINDOWS
        )
        times: dict[str, list[float]] = {"forward": [], "evaluate": []}
        with torch.no_grad(), autocast(precision, device):
            token_BT = torch.randint(256, (rows, window), device=device)
            ways = (lambda: network(token_BT), lambda: task.objective.evaluate(network, "valid", None, "auto"))
            for repeat in range(repeats + 1):  # the first is a warm-up
                for way, once in zip(times, ways, strict=True):
                    found = seconds(once, device, repeats=1, warmup=0)
                    times[way] += found if repeat else []
        windows = 1 + -(-(size - 1 - window) // max(1, window // 2))
        return [
            _speed("forward", rows * window, times["forward"]),
            _speed("evaluate", windows * window, times["evaluate"], scored=size - 1),
        ]


def _speed(way: str, positions: int, times: list[float], scored: int | None = None) -> EvaluationSpeed:
    median = statistics.median(times)
    rate = None if scored is None else scored / median
    return EvaluationSpeed(way, positions / median, positions / max(times), positions / min(times), rate)


def _write(folder: Path, size: int) -> None:
    """Write a text of random bytes, as the training and the validation split."""
    random = np.random.default_rng(0)
    for name, count in (("train", TRAINED), ("valid", size)):
        (folder / f"{name}.txt").write_bytes(random.integers(256, size=count, dtype=np.uint8).tobytes())
