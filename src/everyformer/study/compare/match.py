"""Makes entries equal in size or cost: solves for the width at which a quantity is that of the baseline.

Quantities follow from a model and a batch, not from a clock: parameters without embeddings are counted on the meta device, operations
and memory on fake tensors (study/cost.py). The width keeps the number of heads and is a multiple of it, of twice as many where parts
need that; a hidden width that the size names grows with it. What no width matches exactly is the entry's mismatch.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from msgspec.structs import replace

from everyformer.family.table import find
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.size import parameters_without_embeddings
from everyformer.study.compare.request import Match
from everyformer.study.plan import count_steps
from everyformer.task.task import TaskData
from everyformer.train.distributed import find_device
from everyformer.train.recipe import Recipe, override

MAX_SOLVED = 24  # widths that are tried
HIDDEN_MULTIPLE = 8
ROWS = 2  # of the batch on which operations are counted; they are proportional to it


def quantity(match: Match, recipe: Recipe, data: TaskData) -> float:
    """Returns what is to be equal, of a recipe."""
    model = model_of(recipe, data)
    if match == "parameters":
        return parameters_without_embeddings(model)
    device = find_device(recipe.run.device)
    if match == "memory":
        return count_steps(recipe, data, device)[0].peak
    few = min(recipe.run.batch, ROWS)
    cost = count_steps(replace(recipe, run=replace(recipe.run, batch=few, accumulate=1)), data, device)[0]
    return cost.flops * recipe.run.batch / few


def model_of(recipe: Recipe, data: TaskData) -> Model | EncoderDecoder:
    """Returns the model of a recipe, as the data need it."""
    model = data.adapt(recipe.value(data.member_settings()))
    data.fit(model)
    return model


def width_settings(match: Match, recipe: Recipe, data: TaskData, target: float) -> tuple[str, ...]:
    """Returns the settings of the model with which the quantity is closest to the target; none if it is equal or has no width to set."""
    known = find(recipe.member).settings()
    if "width" not in known or "width" in recipe.model or quantity(match, recipe, data) == target:
        return ()
    model = model_of(recipe, data)
    side = model.decoder if isinstance(model, EncoderDecoder) else model
    size = find(recipe.member).sizes[recipe.size or find(recipe.member).size]
    heads = recipe.model.get("heads") or size.get("heads") or max(1, side.width // 64) if "heads" in known else 1

    def settings(width: int) -> tuple[str, ...]:
        given = [f"model.width={width}"]
        if "heads" in known and "heads" not in size and "heads" not in recipe.model:
            given.append(f"model.heads={heads}")
        if size.get("hidden") and "hidden" not in recipe.model:
            multiple = HIDDEN_MULTIPLE
            given.append(f"model.hidden={max(1, round(size['hidden'] * width / side.width / multiple)) * multiple}")
        return tuple(given)

    for step in (math.lcm(2, heads), 2 * heads):

        def measure(number: int, step: int = step) -> float:
            with torch.random.fork_rng(devices=[]):
                return quantity(match, override(recipe, settings(number * step)), data)

        try:
            return settings(solve(measure, max(1, round(side.width / step)), target) * step)
        except ValueError:  # some parts, as rotary positions, need heads of an even width
            if step == 2 * heads:
                raise
    raise AssertionError("the last step returns or raises")


def solve(measure: Callable[[int], float], start: int, target: float) -> int:
    """Returns the positive integer at which a growing function is closest to the target, in proportion."""
    known: dict[int, float] = {}
    low, high, number = 0, math.inf, start
    for _ in range(MAX_SOLVED):
        value = known[number] = measure(number)
        low, high = (number, high) if value <= target else (low, number)
        if high - low <= 1:
            break
        guess = round(number * math.sqrt(target / value))  # as if it grew with the square
        number = int(min(max(guess, low + 1), high - 1))
    return min(known, key=lambda one: abs(math.log(known[one] / target)))
