"""The files of a run's folder that describe the run: recipe.json, model.json, and those of the task, such as the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from everyformer.data.files import checksum
from everyformer.data.tokenizer import load
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.store import model_from_json
from everyformer.task.task import TaskData
from everyformer.train import checkpoint
from everyformer.train.checksums import flush, read_checksums, replace_file, write_checksums
from everyformer.train.recipe import Recipe, override
from everyformer.train.record import report_write_errors
from everyformer.value import UnknownPart, from_json, to_json

PUBLISHED = "published.json"  # the config of the imported model that a run began with


def write_run(recipe: Recipe, data: TaskData, model: Model | EncoderDecoder, folder: Path) -> None:
    """Write the files that describe a new run. If that fails, none of them is left."""
    others = set(folder.iterdir())
    try:
        with report_write_errors(folder):
            data.save(folder)
            if recipe.init_from and (Path(recipe.init_from) / PUBLISHED).is_file():
                (folder / PUBLISHED).write_bytes((Path(recipe.init_from) / PUBLISHED).read_bytes())
            (folder / "model.json").write_text(to_json(model) + "\n")
            write_checksums(folder, {path.name: (checksum(path),) for path in set(folder.iterdir()) - others})
        write_recipe(recipe, folder)  # last: a folder with a recipe has the other files
    except BaseException:
        for path in set(folder.iterdir()) - others:
            path.unlink()
        raise


KEPT = ("optim.name", "optim.ema")  # they decide what a checkpoint holds


def write_recipe(recipe: Recipe, folder: Path) -> None:
    with report_write_errors(folder):
        replace_file(folder, "recipe.json", (to_json(recipe) + "\n").encode())


def add_files(folder: Path, names: Sequence[str]) -> None:
    """Add files to the checksums of a run."""
    with report_write_errors(folder):
        for name in names:
            flush(folder / name)
        write_checksums(folder, read_checksums(folder) | {name: (checksum(folder / name),) for name in names})


def override_run(recipe: Recipe, settings: Sequence[str]) -> Recipe:
    """Returns the recipe of a resumed run with other settings. Raises ValueError if they change more than the run."""
    for setting in settings:
        name = setting.partition("=")[0]
        if name.partition(".")[0] in ("model", "task") or name in KEPT:
            raise ValueError(
                f"{setting} cannot change when a run is resumed, only run.* and optim.* (without {' and '.join(KEPT)}) can; start a "
                "new run with it, from these weights with --init-from"
            )
    return override(recipe, settings)


def read_recipe(folder: Path) -> Recipe:
    if not (folder / "recipe.json").is_file() and not checkpoint.steps(folder):
        what = "it has no recipe.json" if folder.is_dir() else "there is no such folder"
        raise ValueError(f"{folder} is not a run: {what}; give a folder that train wrote")
    checkpoint.verify_run(folder)
    try:
        return from_json((folder / "recipe.json").read_text(), Recipe)
    except UnknownPart as error:
        raise UnknownPart(f"{folder / 'recipe.json'}: {error}") from None
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
    except UnknownPart as error:
        raise UnknownPart(f"{file}: {error}") from None
    except ValueError as error:
        raise ValueError(f"{file} cannot be read ({error}); restore the file that train wrote") from None
