"""Checks that a model can read the data of a task and has the output head that the task trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from everyformer.attention.pattern import SameDocument
from everyformer.network.embed import Tokens
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.output_head import Language, OutputHead


def single_sequence(model: Model | EncoderDecoder, task: str) -> Model:
    """Returns the model. Raises ValueError if it is an encoder-decoder."""
    if not isinstance(model, Model):
        raise ValueError(f"{task} needs a model of one sequence, not an encoder and a decoder; try bert or gpt2")
    return model


def head_index(model: Model, kind: type[OutputHead], task: str) -> int:
    """Returns the index of the model's first output head of a kind. Raises ValueError if there is none."""
    for index, head in enumerate(model.outputs):
        if isinstance(head, kind):
            return index
    names = ", ".join(type(head).__name__ for head in model.outputs) or "none"
    raise ValueError(
        f"{task} needs an output head {kind.__name__}, the model has {names}; choose another member, or give it that head"
    )


def check_tokens(model: Model, vocabulary: int, name: str) -> None:
    """Raises ValueError if the model cannot read token sequences with this vocabulary."""
    if any(isinstance(part, SameDocument) for part in model.body.patterns()):
        raise ValueError(
            f"the model separates the documents of a sequence (same_document), but {name} marks no documents; choose a member "
            "without it, or leave model.episodes out"
        )
    embed = model.embed
    if not isinstance(embed, Tokens):
        raise ValueError(
            f"{name} has tokens, but the model's inputs are {type(embed).__name__.lower()}; choose a member that reads tokens"
        )
    if embed.vocabulary < vocabulary:
        raise ValueError(
            f"the tokenizer of {name} has {vocabulary} tokens, but the model has {embed.vocabulary}; set model.vocabulary to "
            f"{vocabulary}, or lower task.vocabulary"
        )
    head = next((one for one in model.outputs if isinstance(one, Language)), None)
    if head is not None and head.vocabulary is not None and head.vocabulary < vocabulary:
        raise ValueError(
            f"the tokenizer of {name} has {vocabulary} tokens, but the language head has logits for {head.vocabulary}; leave its "
            f"vocabulary out, or set it to {vocabulary}"
        )


def context_setting(context: int | None) -> dict[str, int]:
    """Returns the setting with which a member's table of positions has the size that a task asks for; empty if it asks for none."""
    return {} if context is None else {"context": context}


def context_of(context: int | None, model: Model, default: int) -> int:
    """Returns the context of a task on a model: as the task sets it, else the model's number of positions, else the default.

    Raises ValueError if the model has fewer positions than the task asks for.
    """
    limit = model.limit()
    limit = None if limit is None else limit - model.class_token
    if context is not None and limit is not None and context > limit:
        raise ValueError(
            f"task.context is {context}, but the model's table of positions has {limit}; lower task.context, or give the model a "
            "longer table"
        )
    return context or limit or default


def check_split(split: str, splits: Mapping[str, Any], name: str) -> None:
    """Raises ValueError if the data have no such split."""
    if split not in splits:
        raise ValueError(f"{name} has no split {split!r}; it has {', '.join(splits)}")
