"""The trials of an entry: its rate on a grid of powers around the default, and with it values of the settings that matter to it.

Every entry has the same number of trials. The first one has the default settings. Warm-up is searched over where the layers are
post-norm, which diverge without enough of it; other settings are the user's: `optim.weight_decay=0,0.01,0.1`.
"""

from __future__ import annotations

from random import Random

from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.residual import PostNorm
from everyformer.study.compare.frozen import Settings
from everyformer.train.recipe import Recipe

STEP = 2.0  # between rates that are next to each other
RANGE = 64.0  # from the smallest to the largest, with many trials


def trials(recipe: Recipe, model: Model | EncoderDecoder, count: int, search: Settings) -> tuple[Settings, ...]:
    """Returns the settings of each trial."""
    path, rate = ("optim.lr", recipe.optim.lr)
    if recipe.optim.name == "muon":
        path, rate = ("optim.muon_lr", recipe.optim.muon_lr)
    step = min(STEP, RANGE ** (1 / max(1, count - 1)))
    given = dict(setting.split("=", 1) for setting in search)
    columns: list[list[str]] = []
    if path in given:
        columns.append(_column(path, given.pop(path).split(","), count))
    else:
        columns.append([f"{path}={rate * step**power:{'g' if power == 0 else '.3g'}}" for power in _powers(count)])
    side = model.decoder if isinstance(model, EncoderDecoder) else model
    if isinstance(side.body.residual, PostNorm) and "optim.warmup" not in given and count > 3:
        warmup = recipe.optim.warmup
        given["optim.warmup"] = f"{warmup},{min(max(1, recipe.run.steps // 2), 3 * warmup)}"
    columns += [_column(name, _values(text), count) for name, text in given.items()]
    return tuple(zip(*columns, strict=True))


def _powers(count: int) -> list[int]:
    """0, 1, -1, 2, -2, ..."""
    return [(number + 1) // 2 * (1 if number % 2 else -1) for number in range(count)]


def _values(text: str) -> list[str]:
    """The values of a setting, separated by commas outside of brackets."""
    values, depth = [""], 0
    for letter in text:
        depth += letter in "([{"
        depth -= letter in ")]}"
        if letter == "," and depth == 0:
            values.append("")
        else:
            values[-1] += letter
    return values


def _column(path: str, values: list[str], count: int) -> list[str]:
    """The values of a setting over the trials: each as often as the others, the first one in the first trial."""
    if not all(values):
        raise ValueError(f"--search {path} has an empty value; write the values with commas between them")
    rest = [values[number % len(values)] for number in range(1, count)]
    Random(path).shuffle(rest)
    return [f"{path}={value}" for value in [values[0], *rest]]
