"""The tasks by name, and what each member is for."""

from __future__ import annotations

from typing import Literal

from everyformer.attention.pattern import Graph
from everyformer.family.table import find
from everyformer.network.embed import Features, Nodes, Patches
from everyformer.network.grid import Grid
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.output_head import Classify as ClassifyHead
from everyformer.network.output_head import Language as LanguageHead
from everyformer.network.output_head import Logistics, PerToken
from everyformer.network.output_head import Masked as MaskedHead
from everyformer.task.classify import Classify
from everyformer.task.control import Control
from everyformer.task.image import Image
from everyformer.task.language import Language
from everyformer.task.masked import Masked
from everyformer.task.translate import Translate
from everyformer.task.work import Task
from everyformer.value import nearest

TASKS: dict[str, type[Task]] = {
    "language": Language,
    "masked": Masked,
    "classify": Classify,
    "translate": Translate,
    "image": Image,
    "control": Control,
}
BY_HEAD: dict[type, str] = {
    LanguageHead: "language",
    MaskedHead: "masked",
    ClassifyHead: "classify",
    PerToken: "classify",
    Logistics: "image",
}


def task_for(member: str | Model | EncoderDecoder, size: str | None = None, name: str | None = None) -> Task:
    """The task of a name, or the one that a member's first head is for. An environment's name is the task of acting in it."""
    value = find(member).value(size)
    name = name or _purpose(value)
    if ":" in name or name == Control().environment:
        return Control(environment=name)
    if name not in TASKS:
        raise ValueError(
            f"no task is named {name!r}, and an environment is named as popgym:RepeatPreviousEasy; {nearest(name, TASKS)}"
        )
    if name == "image":
        return Image(shrink=_shrink(value))
    return Classify(kind=_kind(value)) if name == "classify" else TASKS[name]()


def _purpose(value: Model | EncoderDecoder) -> str:
    """The task that the first head is for; what counts rows and columns paints."""
    one = value.decoder if isinstance(value, EncoderDecoder) else value
    name = "image" if isinstance(one.position, Grid) else BY_HEAD[type(one.outputs[0])]
    return "translate" if isinstance(value, EncoderDecoder) and name == "language" else name


def _shrink(value: Model | EncoderDecoder) -> int:
    """By how much the picture that an encoder reads is smaller."""
    sides = (value.encoder.position, value.decoder.position) if isinstance(value, EncoderDecoder) else (None, None)
    small, large = (one.rows if isinstance(one, Grid) else 1 for one in sides)
    return large // small


def _kind(value: Model | EncoderDecoder) -> Literal["text", "sets", "images", "graph"] | None:
    """What a classifier reads, told by its embedding."""
    if isinstance(value, EncoderDecoder):
        return None
    if isinstance(value.embed, Patches):
        return "images"
    if isinstance(value.embed, Features | Nodes):
        return "graph" if any(isinstance(part, Graph) for part in value.body.patterns()) else "sets"
    return "text"
