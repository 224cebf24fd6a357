"""Runs from models of Hugging Face transformers: a folder that `save_pretrained` wrote becomes the folder of a run at step 0.

The run has the recipe, the model, the tokenizer, the names of the classes and a checkpoint like any other, so evaluating,
generating, predicting and fine-tuning need no knowledge of where it comes from.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from msgspec.structs import replace

from everyformer.data.files import checksum, digest
from everyformer.data.generation import end_tokens, load_generation
from everyformer.data.subwords import load_published
from everyformer.data.tokenizer import TokenIds, Tokenizer
from everyformer.family.names import Config
from everyformer.family.pretrained import read_network
from everyformer.family.weight_files import WEIGHTS, optional_list, optional_object, read_config, read_weights
from everyformer.network.embed import Patches, Tokens
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify, Language, Masked, Reading, Regress, ReplacedToken
from everyformer.task.classify import Classify as ClassifyTask
from everyformer.task.classify import Regress as RegressTask
from everyformer.task.corruption import MARKS
from everyformer.task.denoise import Denoise
from everyformer.task.embed_texts import POOLINGS, EmbedTexts
from everyformer.task.language import Language as LanguageTask
from everyformer.task.language_inference import CONTEXT
from everyformer.task.masked import Masked as MaskedTask
from everyformer.task.replaced import Replaced
from everyformer.task.table import task_for
from everyformer.task.task import FittedTask, Task, TaskData
from everyformer.train import checkpoint
from everyformer.train.distributed import World
from everyformer.train.folder import PUBLISHED, write_run
from everyformer.train.gradient_watch import GradientWatch
from everyformer.train.lock import only_writer
from everyformer.train.provenance import provenance
from everyformer.train.recipe import TUNING, Recipe
from everyformer.train.record import Records
from everyformer.value import nearest

BYTE = 255  # the largest value of a pixel
BERT_MARKS = ("[CLS]", "[SEP]", "[MASK]")
USUAL = 0.75  # the least share of a model's tokens that its tokenizer has: some tables are rounded up


@dataclass(frozen=True)
class Imported:
    """What was read of a folder: the network, the task that it is used for, and the files of the run."""

    network: Network | PairNetwork
    task: Task
    tokenizer: Tokenizer | None
    classes: dict[str, Any]  # of classes.json; empty if there are none
    config: Config
    notes: tuple[str, ...] = ()


class ImportedData(TaskData):
    """Writes what a task reads again from the folder of a run."""

    def __init__(self, imported: Imported, fingerprint: str):
        self.imported, self.fingerprint = imported, fingerprint

    def save(self, folder: Path) -> None:
        if self.imported.tokenizer is not None:
            self.imported.tokenizer.save(folder)
        if self.imported.classes:
            (folder / "classes.json").write_text(json.dumps(self.imported.classes) + "\n")
        (folder / PUBLISHED).write_text(json.dumps(self.imported.config, indent=2) + "\n")


def import_run(source: str | Path, folder: str | Path, leave_out: Sequence[str] = ()) -> Imported:
    """Write a folder of transformers as a run: `import_run("gpt2", "runs/gpt2")`. Returns what was read.

    `leave_out` are beginnings of names of weights that are not read, such as those of a head that everyformer has not.
    Raises ValueError, and writes nothing, if the model or its tokenizer cannot be read, or if `folder` is not empty.
    """
    source, folder = Path(source).expanduser(), Path(folder).expanduser()
    if source.is_file():
        if source.suffix not in (".safetensors", ".bin", ".json"):
            raise ValueError(f"{source} is not a file of a saved model; give the folder that save_pretrained wrote")
        source = source.parent  # a file of a model stands for its folder
    imported = read_folder(source, leave_out)
    model = imported.network.value
    recipe = _recipe(imported)
    files = sorted(path for path in source.iterdir() if path.name.startswith(WEIGHTS) and path.is_file())
    data = ImportedData(imported, digest("imported", *(checksum(path) for path in files)))
    with only_writer(folder) as is_new:
        if not is_new:
            raise ValueError(f"{folder} already exists and is not empty; choose another folder")
        try:
            write_run(recipe, data, model, folder)
            _write_checkpoint(folder, imported, recipe, data.fingerprint)
            Records(folder / "records.jsonl").write("import", 0, source=str(source), provenance=provenance(None))
        except BaseException:
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            raise
    return imported


def _write_checkpoint(folder: Path, imported: Imported, recipe: Recipe, fingerprint: str) -> None:
    watch = GradientWatch(recipe.optim.patience, recipe.optim.skip_spikes)
    state = {"step": 0, "data": fingerprint, "splits": {}, "watch": watch.state(), "scaler": {}, "best": None}
    contents = checkpoint.Contents(imported.network.float(), [], None, {}, state)
    checkpoint.save(folder, contents, World(), recipe.run.keep)


def _recipe(imported: Imported) -> Recipe:
    """The recipe of fine-tuning."""
    recipe = Recipe(member=imported.network.value, task=imported.task)
    warmup = recipe.run.steps // 10
    return replace(recipe, optim=replace(recipe.optim, lr=recipe.default_lr() * TUNING, warmup=warmup))


def is_published(folder: Path) -> bool:
    """Returns whether a folder has a model of transformers, and neither a run nor a saved model."""
    return (folder / "config.json").is_file() and not any(
        (folder / name).is_file() for name in ("recipe.json", "model.json")
    )


def open_published(
    folder: Path, data: str | None
) -> tuple[Network | PairNetwork, FittedTask, Recipe, Callable[[], FittedTask], Config]:
    """Returns the network of a folder of transformers, its task, a recipe of it, a function that opens data, and its config."""
    imported = read_folder(folder)
    model = imported.network.value

    def fitted(open_task: Callable[[str | None, Path], TaskData], name: str | None) -> FittedTask:
        with TemporaryDirectory() as copies:  # a task reads its tokenizer and its classes from the folder of a run
            ImportedData(imported, "").save(Path(copies))
            return open_task(name, Path(copies)).fit(model)

    def open_data() -> FittedTask:
        if data is None:
            raise ValueError(f"{folder} is a model of transformers, which has no data; give load a path as data=")
        return fitted(imported.task.open, data)

    task = fitted(imported.task.open_for_inference, None)
    return imported.network.float(), task, _recipe(imported), open_data, imported.config


def read_folder(source: Path, leave_out: Sequence[str] = ()) -> Imported:
    """Reads a folder of transformers: its model, its tokenizer and what they are used for."""
    config = read_config(source)
    state = read_weights(source)
    for start in leave_out:
        if not any(name.startswith(start) for name in state):
            raise ValueError(f"no weight of {source} has a name that begins with {start!r}; {nearest(start, state)}")
    state = {name: x for name, x in state.items() if not name.startswith(tuple(leave_out))}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        network = read_network(source, config, state)
    notes = tuple(str(one.message) for one in caught)
    model = network.value
    tokenizer = _tokenizer(source, config, model)
    notes += tuple(_notes_of(tokenizer, model))
    task, classes, network = _task(source, config, network, tokenizer)
    return Imported(network, task, tokenizer, classes, config, notes)


def _tokenizer(source: Path, config: Config, model: Model | EncoderDecoder) -> Tokenizer | None:
    embed = (model.encoder if isinstance(model, EncoderDecoder) else model).embed
    if not isinstance(embed, Tokens):
        return None
    tokenizer: Tokenizer | None = load_published(source, str(config["model_type"]))
    if tokenizer is None:
        tokenizer = TokenIds(embed.vocabulary, end_tokens(load_generation(source), embed.vocabulary))
    if tokenizer.vocabulary > embed.vocabulary:
        raise ValueError(
            f"the tokenizer of {source} has {tokenizer.vocabulary} tokens, but the model has {embed.vocabulary}; give the tokenizer "
            "of this model"
        )
    return tokenizer


def _notes_of(tokenizer: Tokenizer | None, model: Model | EncoderDecoder) -> Iterator[str]:
    """What is unusual about the tokenizer of a model: it may be that of another one."""
    remedy = "if it belongs to another model, copy the tokenizer.json of this one there"
    if isinstance(tokenizer, TokenIds):
        yield "there is no tokenizer, so texts are token ids such as '1 2 3'"
    elif tokenizer is not None and isinstance(model, Model) and isinstance(model.embed, Tokens):
        if tokenizer.vocabulary < USUAL * model.embed.vocabulary:
            yield f"the tokenizer has {tokenizer.vocabulary:,} of the model's {model.embed.vocabulary:,} tokens; {remedy}"
        if isinstance(next(iter(model.outputs), None), Masked | ReplacedToken) and not _has_marks(tokenizer):
            yield f"the tokenizer has no {', '.join(BERT_MARKS)}, so the masked model only gives vectors of texts; {remedy}"
        if isinstance(next(iter(model.outputs), None), Language) and not _keeps_text(tokenizer):
            yield f"the tokenizer does not keep all of a text, so the language model only gives vectors of texts; {remedy}"


def _has_marks(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is not None and None not in map(tokenizer.special_id, BERT_MARKS)


def _keeps_text(tokenizer: Tokenizer | None) -> bool:
    return tokenizer is None or tokenizer.bytes_per_token is not None


def _task(
    source: Path, config: Config, network: Network | PairNetwork, tokenizer: Tokenizer | None
) -> tuple[Task, dict[str, Any], Network | PairNetwork]:
    """What the first output head is used for, and the classes, if it predicts any."""
    model = network.value
    if isinstance(model, EncoderDecoder):
        if tokenizer is None or tokenizer.special_id(MARKS[0]) is None:
            raise ValueError(
                f"{source} has no tokenizer with marks of spans ({MARKS[0]}, ...), as T5's has; copy its tokenizer.json there, or open "
                "the network in Python with everyformer.from_pretrained"
            )
        return Denoise(), {}, network
    heads = model.outputs
    first = heads[0] if heads else None
    marked = _has_marks(tokenizer)
    if isinstance(first, Masked) and marked:
        return MaskedTask(next_sentence=len(heads) > 1), {}, network
    if isinstance(first, ReplacedToken) and marked:
        return Replaced(), {}, network
    if isinstance(first, Language) and _keeps_text(tokenizer):
        return _language(config, model), {}, network
    if isinstance(first, Classify):
        return _classify(source, config, network, first, tokenizer)
    if isinstance(model.embed, Tokens):
        return _embed_texts(source, model), {}, network
    raise ValueError(
        f"{source} has no output head that decides a task; open it in Python with everyformer.from_pretrained, or give a model with a "
        "head for language, masked tokens or classes"
    )


def _language(config: Config, model: Model) -> Task:
    """The task of a language model: its windows are no longer than the texts that it was trained on."""
    task, positions = task_for(model), config.get("max_position_embeddings")
    if isinstance(task, LanguageTask) and model.limit() is None and type(positions) is int and 0 < positions < CONTEXT:
        task = replace(task, context=positions)
    return task


def _embed_texts(source: Path, model: Model) -> EmbedTexts:
    """How a sentence encoder makes one vector of a text: the files of sentence-transformers, if there are any."""
    modules = optional_list(source / "modules.json")
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in modules if isinstance(one, Mapping)]
    if unknown := [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]:
        raise ValueError(
            f"modules.json in {source} has a {unknown[0]}, which everyformer has not; give a model without it"
        )
    pooling: Reading = "mean"
    folders = [str(one.get("path")) for one, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    for folder in folders:
        given = optional_object(source / Path(folder).name / "config.json")
        chosen = [name for name, on in given.items() if name.startswith("pooling_mode") and on and on is not False]
        if len(chosen) != 1 or chosen[0] not in POOLINGS:
            raise ValueError(
                f"the pooling of {source} is {' and '.join(chosen) or 'none'}; the names are {', '.join(POOLINGS)}"
            )
        pooling = POOLINGS[chosen[0]]
    length = optional_object(source / "sentence_bert_config.json").get("max_seq_length")
    limit = model.limit()
    fits = isinstance(length, int) and 0 < length <= (limit or length)
    return EmbedTexts(pooling, "Normalize" in kinds, length if fits else None)


def _classify(
    source: Path, config: Config, network: Network | PairNetwork, head: Classify, tokenizer: Tokenizer | None
) -> tuple[Task, dict[str, Any], Network | PairNetwork]:
    problem = config.get("problem_type")
    if problem == "multi_label_classification":
        raise ValueError(
            "problem_type is 'multi_label_classification', but everyformer predicts one class of each example; give a model with one"
        )
    model = network.value
    assert isinstance(model, Model)
    images = _image_settings(source, model) if isinstance(model.embed, Patches) else {}
    kind = "images" if images else "text"
    settings: dict[str, Any] = {"kind": kind} | ({"size": images["size"]} if images else {})
    if tokenizer is not None and tokenizer.kind in ("bpe", "wordpiece"):
        settings["tokenizer"] = tokenizer.kind
    if head.classes == 1 or problem == "regression":
        if head.classes > 1:
            raise ValueError(
                f"the model predicts {head.classes} numbers of each example, but everyformer one; give such a model"
            )
        number = Regress(1, head.reading, head.pooler, head.dropout, head.pooler_activation, head.bias)
        network.value = replace(model, outputs=(number, *model.outputs[1:]))
        return RegressTask(**settings), {"kind": kind, "mean": 0.0, "std": 1.0, "column": None} | images, network
    names = _class_names(config, head.classes)
    return ClassifyTask(**settings), {"kind": kind, "classes": names, "column": None} | images, network


def _class_names(config: Config, classes: int) -> list[str]:
    table = config.get("id2label")
    if table is None:
        return [f"LABEL_{index}" for index in range(classes)]
    given = [table.get(str(index)) for index in range(classes)] if isinstance(table, Mapping) else []
    names = [name for name in given if isinstance(name, str)]
    if not isinstance(table, Mapping) or not len(names) == len(table) == classes:
        raise ValueError(f"id2label in config.json does not name the {classes} classes of the model; restore it")
    if len(set(names)) < len(names):
        raise ValueError(
            f"id2label in config.json has one name for several of the {classes} classes; give each its own"
        )
    return names


def _image_settings(source: Path, model: Model) -> dict[str, Any]:
    """How the pixels of an image are scaled, and the size of images, as `classes.json` has them."""
    embed = model.embed
    assert isinstance(embed, Patches)
    side = round(((model.limit() or 0) - model.class_token) ** 0.5) * embed.size
    path = source / "preprocessor_config.json"
    given = {"do_rescale": True, "rescale_factor": 1 / BYTE, "do_normalize": True} | optional_object(path)
    size = given.get("size", side)
    sides = {size} if isinstance(size, int) else set(size.values()) if isinstance(size, Mapping) else set()
    if isinstance(crop := given.get("crop_size"), Mapping) and given.get("do_center_crop"):
        sides = set(crop.values())
    if sides != {side}:
        raise ValueError(
            f"size is {size!r} in {path}, but the model reads images of {side} x {side} pixels; restore both"
        )
    mean, std = ([0.5] * embed.channels, [0.5] * embed.channels) if given["do_normalize"] else ([0.0], [1.0])
    mean, std = (given.get("image_mean", mean), given.get("image_std", std)) if given["do_normalize"] else (mean, std)
    scale = given["rescale_factor"] if given["do_rescale"] else 1.0
    if not isinstance(scale, int | float) or scale <= 0:
        raise ValueError(f"rescale_factor is {scale!r} in {path}; give a number above 0, such as 1/255")
    pixel = [
        [float(one) / scale for one in (values if isinstance(values, list) else [values])] for values in (mean, std)
    ]
    if any(len(values) not in (1, embed.channels) for values in pixel) or min(pixel[1]) <= 0:
        raise ValueError(f"image_mean and image_std in {path} do not fit {embed.channels} channels; restore it")
    mean_C, std_C = (values * (embed.channels // len(values)) for values in pixel)
    return {"channels": embed.channels, "size": side, "pixel": mean_C, "pixel_std": std_C}
