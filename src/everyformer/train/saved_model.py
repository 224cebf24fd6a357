"""Opens models without a run: folders that `everyformer.save` wrote. Their output heads decide what they are used for.

A tokenizer in the folder (tokenizer.json, characters.json) reads texts. Without one, a vocabulary of 256 is that of bytes; of any other
the texts are token ids, such as "1 2 3".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from everyformer.data import tokenizer as tokenizers
from everyformer.data.tokenizer import ByteTokenizer, TokenIds, Tokenizer
from everyformer.network.embed import Tokens
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import Network, PairNetwork
from everyformer.network.output_head import Classify, Language
from everyformer.network.store import load_network
from everyformer.task.language import Language as LanguageTask
from everyformer.task.language_inference import LanguageInference
from everyformer.task.table import task_for
from everyformer.task.task import FittedTask, Inference, Objective, Task, TaskData
from everyformer.task.token_inference import TokenInference
from everyformer.train import checkpoint
from everyformer.train.recipe import Recipe

BYTES = 256
Opened = tuple[Network | PairNetwork, FittedTask, Recipe, Callable[[], FittedTask]]


def is_saved_model(folder: Path) -> bool:
    """Returns whether a folder has a model but no run."""
    return (folder / "model.json").is_file() and not (folder / "recipe.json").is_file() and not checkpoint.steps(folder)


def open_saved(folder: Path, data: str | None) -> Opened:
    """Returns the network of a saved model, its task, a recipe of it, and a function that opens data."""
    network = load_network(folder)
    value, task = network.value, _task(network.value)

    def open_data() -> FittedTask:
        if data is None:
            raise ValueError(f"{folder} is a saved model, which has no data; give load a path as data=")
        return (task or task_for(value)).open(data, folder).fit(value)

    recipe = Recipe(member=value, task=task or LanguageTask(), data=data)
    return network, FittedTask(TaskData(), Objective(), _inference(value, task, folder)), recipe, open_data


def _task(value: Model | EncoderDecoder) -> Task | None:
    try:
        return task_for(value)
    except ValueError:  # no head decides it
        return None


def _inference(value: Model | EncoderDecoder, task: Task | None, folder: Path) -> Inference:
    if not isinstance(value, Model):
        return Inference()
    if any(isinstance(head, Classify) for head in value.outputs[:1]) and (folder / "classes.json").is_file():
        assert task is not None
        return task.open_for_inference(None, folder).fit(value).inference
    if not isinstance(value.embed, Tokens):
        return Inference()
    tokenizer = tokenizers.load(folder) or _default_tokenizer(value.embed.vocabulary)
    limit = value.limit()
    context = None if limit is None else limit - value.class_token
    if any(isinstance(head, Language) for head in value.outputs):
        return LanguageInference(tokenizer, context)
    return TokenInference(tokenizer, context, (tokenizer.start, ()) if value.body.is_causal() else tokenizer.marks)


def _default_tokenizer(vocabulary: int) -> Tokenizer:
    return ByteTokenizer() if vocabulary == BYTES else TokenIds(vocabulary)
