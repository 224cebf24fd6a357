"""The files of a run's folder that describe the run: recipe.json and model.json."""

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
from everyformer.train.record import report_write_errors
from everyformer.value import from_json, to_json

KEPT = ("optim.name", "optim.ema")  # they decide what a checkpoint holds


def write_recipe(recipe: Recipe, folder: Path) -> None:
    with report_write_errors(folder):
        (folder / "recipe.part").write_text(to_json(recipe) + "\n")
        (folder / "recipe.part").rename(folder / "recipe.json")


def override_run(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Returns the recipe of a resumed run with other settings. Raises ValueError if they change more than the run."""
    for setting in settings:
        name = setting.partition("=")[0]
        if name.partition(".")[0] not in ("run", "optim") or name in KEPT:
            raise ValueError(
                f"{setting} cannot change when a run is resumed, only run.* and optim.* (without {' and '.join(KEPT)}) can; start a "
                "new run with it, from these weights with --init-from"
            )
    return override(recipe, settings)


def read_recipe(folder: Path) -> Recipe:
    if not (folder / "recipe.json").is_file():
        raise ValueError(f"{folder} is not a run: it has no recipe.json; give a folder that train wrote")
    try:
        return from_json((folder / "recipe.json").read_text(), Recipe)
    except ValueError as error:
        raise ValueError(
            f"{folder / 'recipe.json'} cannot be read ({error}); restore the file that train wrote"
        ) from None


def resolve(recipe: Recipe) -> Recipe:
    """Returns the recipe with absolute paths, so that its run can be used from anywhere, and with the tokenizer of init_from."""
    task: Any = recipe.task
    tokenizer = load(Path(recipe.init_from).expanduser()) if recipe.init_from and hasattr(task, "tokenizer") else None
    if tokenizer is not None and (task.tokenizer, tokenizer.kind) != (
        "gpt2",
        "bpe",
    ):  # gpt2 is saved as a bpe tokenizer
        with suppress(
            ValueError
        ):  # a kind that the task does not have: opening the data raises an error with the folder
            recipe = replace(recipe, task=replace(task, tokenizer=tokenizer.kind))
    paths = {"data": recipe.data, "init_from": recipe.init_from}
    absolute = {name: str(Path(path).expanduser().absolute()) for name, path in paths.items() if path and _exists(path)}
    return replace(recipe, **absolute)


def _exists(path: str) -> bool:
    return path != "-" and Path(path).expanduser().exists()


def check_data(recipe: Recipe, folder: Path) -> None:
    """Raises ValueError if the file or folder with the run's data is missing."""
    if recipe.data and Path(recipe.data).is_absolute() and not _exists(recipe.data):
        raise ValueError(
            f"the data of {folder} are missing: there is no {recipe.data}; give their new place with --data (in Python data=)"
        )


def read_model(folder: Path) -> Model | EncoderDecoder:
    file = folder / "model.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no model.json; restore the file that train wrote")
    try:
        return model_from_json(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}); restore the file that train wrote") from None
