"""Measures members: a training step, an evaluation, generation, and memory.

    for speed in bench(["gpt2"], torch.device("cpu")): print(speed)

Each member has its own task on the data that come with the library, eager, with the dropout that it has. Generation is of one text, greedy,
with the cache; an image is drawn whole, and a model with an encoder reads a source of 32 tokens first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from everyformer.family.table import find
from everyformer.infer.generate import generate
from everyformer.infer.generate_images import generate_images
from everyformer.network.embed import Tokens
from everyformer.network.model import Model
from everyformer.network.network import Network, PairNetwork
from everyformer.study.bench_steps import Steps, Tick, measure, reason, train_steps
from everyformer.study.ceilings import seconds
from everyformer.task.image import ImageData
from everyformer.train.recipe import Recipe
from everyformer.train.trained import TrainedRun

SOURCE, PROMPT = 32, 8  # tokens
REPEATS = 3  # of evaluation and generation, after one that is not counted


@dataclass(frozen=True)
class MemberSpeed:
    """One member: seconds of its steps, targets evaluated and tokens generated per second; None: it has no such thing."""

    member: str
    size: str
    task: str
    parameters: int
    batch: int
    steps: Steps
    evaluated: float | None = None
    generated: float | None = None
    failure: str | None = None


def bench(
    members: Sequence[str],
    device: torch.device,
    *,
    size: str = "tiny",
    batch: int = 8,
    steps: int = 10,
    tokens: int = 32,
) -> Iterator[MemberSpeed]:
    """Yields the speeds of each member at a size. A member that fails, or has no such size, is reported so."""
    for name in members:
        yield _speed(name, device, size, batch, steps, tokens)


def _speed(name: str, device: torch.device, size: str, batch: int, steps: int, tokens: int) -> MemberSpeed:
    runs: list[TrainedRun] = []
    settings = (
        f"run.batch={batch}", "run.compile=no", "run.evaluate=0", f"run.device={device.type}",
        f"run.precision={'bf16' if device.type == 'cuda' else 'fp32'}",
    )  # fmt: skip

    def way(tick: Tick) -> None:
        runs[:] = []  # so that the network of the pass before is not in the memory
        runs.append(train_steps(Recipe.of(name, *settings, size=size), device, tick))

    found = measure({name: way}, device, steps)[name]
    if found.failure is not None or not runs:
        return MemberSpeed(name, size, "", 0, batch, found, failure=found.failure)
    run = runs[0]
    task, count = type(run.recipe.task).__name__.lower(), sum(p.numel() for p in run.network.parameters())
    try:
        evaluated, generated = _evaluated(run, batch, device), _generated(run, tokens, device)
    except Exception as error:  # the other members are measured all the same
        return MemberSpeed(name, size, task, count, batch, found, failure=reason(error))
    return MemberSpeed(name, size, task, count, batch, found, evaluated, generated)


def _evaluated(run: TrainedRun, examples: int, device: torch.device) -> float:
    """Targets per second."""
    metrics: dict[str, Any] = {}
    times = seconds(lambda: metrics.update(run.evaluate(limit=examples)), device, REPEATS, 1)
    return float(metrics["targets"] / statistics.median(times))


def _generated(run: TrainedRun, tokens: int, device: torch.device) -> float | None:
    """New tokens per second, or None for a member that generates none."""
    network, once = run.network, None
    data: Any = run.task.data
    if isinstance(data, ImageData) and isinstance(network, Network):
        tokens, empty_BPN = data.layout.length, torch.zeros(1, 0, data.layout.channels, dtype=torch.long, device=device)
        once = _drawn(network, data, empty_BPN)
    elif isinstance(network, PairNetwork) or _is_language_model(network):
        once = _written(network, tokens, device)
    if once is None:
        return None
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        return tokens / statistics.median(seconds(once, device, REPEATS, 1))


def _is_language_model(network: Network) -> bool:
    value = network.value
    return isinstance(value, Model) and isinstance(value.embed, Tokens) and value.body.is_language_model()


def _drawn(network: Network, data: ImageData, empty_BPN: torch.Tensor) -> Callable[[], object]:
    return lambda: generate_images(network, data.layout, empty_BPN, temperature=1.0, seed=0)


def _written(network: Network | PairNetwork, tokens: int, device: torch.device) -> Callable[[], object]:
    if isinstance(network, Network):
        return lambda: generate(network, [list(range(PROMPT))], tokens, temperature=0)
    source_BS = torch.arange(SOURCE, device=device)[None]
    decoder, pair = network.decoder, network
    return lambda: generate(decoder, [[0]], tokens, temperature=0, encoder_output=pair.encode(source_BS))


def choose_members(names: Sequence[str]) -> list[str]:
    """Returns the names of members, all if none is given. Raises ValueError for an unknown one."""
    from everyformer.family.table import members

    return [find(name).name for name in names] or members()
