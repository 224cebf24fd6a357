"""A run's folder: the recipe and the model that are written there, and read by whoever goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from everyformer.data.tokenizer import load
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.store import model_from_json
from everyformer.train.recipe import Recipe, override
from everyformer.train.record import writing
from everyformer.value import from_json, to_json


def write_recipe(recipe: Recipe, folder: Path) -> None:
    with writing(folder):
        (folder / "recipe.part").write_text(to_json(recipe) + "\n")
        (folder / "recipe.part").rename(folder / "recipe.json")


def changed(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """The recipe of a run that goes on with other settings."""
    for setting in settings:
        if not setting.startswith("run."):
            raise ValueError(
                f"{setting} cannot change in a run that goes on, only run.name=value can; begin a new run with it"
            )
    return override(recipe, settings)


def read_recipe(folder: Path) -> Recipe:
    if not (folder / "recipe.json").is_file():
        raise ValueError(f"{folder} is not a run: it has no recipe.json; give a folder that train wrote")
    try:
        return from_json((folder / "recipe.json").read_text(), Recipe)
    except ValueError as error:
        raise ValueError(
            f"{folder / 'recipe.json'} is broken ({error}); bring the file back that train wrote"
        ) from None


def placed(recipe: Recipe) -> Recipe:
    """The recipe with whole paths, so that its run can be used from anywhere, and with the tokenizer that it takes over."""
    task: Any = recipe.task
    taken = load(Path(recipe.init_from).expanduser()) if recipe.init_from and hasattr(task, "tokenizer") else None
    if taken is not None and (task.tokenizer, taken.kind) != ("gpt2", "bpe"):  # whose pairs are GPT-2's
        with suppress(ValueError):  # no kind of this task: it will say so of the folder
            recipe = replace(recipe, task=replace(task, tokenizer=taken.kind))
    found = {"data": recipe.data, "init_from": recipe.init_from}
    whole = {name: str(Path(path).expanduser().absolute()) for name, path in found.items() if path and _there(path)}
    return replace(recipe, **whole)


def _there(path: str) -> bool:
    return path != "-" and Path(path).expanduser().exists()


def check_data(recipe: Recipe, folder: Path) -> None:
    if recipe.data and Path(recipe.data).is_absolute() and not _there(recipe.data):
        raise ValueError(f"what {folder} learned from is gone: there is no {recipe.data}; bring it back")


def read_model(folder: Path) -> Model | EncoderDecoder:
    file = folder / "model.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no model.json; bring the file back that train wrote")
    try:
        return model_from_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is broken ({error}); bring the file back that train wrote") from None
