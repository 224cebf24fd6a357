"""The tasks by name, and the default task of each member."""

from __future__ import annotations

import math

from everyformer.attention.pattern import Graph
from everyformer.data.problems import problem_name
from everyformer.family.table import find
from everyformer.network.embed import Features, Nodes, Patches
from everyformer.network.grid import Grid
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.output_head import Classify as ClassifyHead
from everyformer.network.output_head import Language as LanguageHead
from everyformer.network.output_head import Logistics, PerToken, ReplacedToken
from everyformer.network.output_head import Masked as MaskedHead
from everyformer.network.output_head import Regress as RegressHead
from everyformer.task.answer import Answer
from everyformer.task.classify import Classify, InputKind, Regress
from everyformer.task.control import Control
from everyformer.task.denoise import Denoise
from everyformer.task.embed_texts import EmbedTexts as EmbedTexts  # a recipe names it
from everyformer.task.image import Image
from everyformer.task.language import Language
from everyformer.task.masked import Masked
from everyformer.task.replaced import Replaced
from everyformer.task.task import Task
from everyformer.task.translate import Translate
from everyformer.value import nearest

TASKS: dict[str, type[Task]] = {
    "language": Language,
    "masked": Masked,
    "classify": Classify,
    "regress": Regress,
    "translate": Translate,
    "denoise": Denoise,
    "replaced": Replaced,
    "image": Image,
    "control": Control,
    "answer": Answer,
}
BY_HEAD: dict[type, str] = {
    LanguageHead: "language",
    MaskedHead: "masked",
    ReplacedToken: "replaced",
    ClassifyHead: "classify",
    RegressHead: "regress",
    PerToken: "classify",
    Logistics: "image",
}


def task_for(
    member: str | Model | EncoderDecoder, size: str | None = None, name: str | None = None, data: str | None = None
) -> Task:
    """Returns the task of a name, or of a generated problem, or the default task of a member.

    The name of an environment stands for control in it.
    """
    row = find(member)
    value = row.value(size)
    name = name or ("answer" if problem_name(data) else row.task) or _default_task(value)
    if ":" in name or name == Control().environment:
        return Control(environment=name)
    if name not in TASKS:
        raise ValueError(
            f"there is no task {name!r} (an environment has a name like popgym:RepeatPreviousEasy); {nearest(name, TASKS)}"
        )
    if name == "image":
        return Image(shrink=_shrink(value))
    if name in ("classify", "regress"):
        task = Classify if name == "classify" else Regress
        return task(kind=_kind(value), mixed_size=_image_size(value))
    return TASKS[name]()


def _default_task(value: Model | EncoderDecoder) -> str:
    """The task of the first output head; a model whose positions are a grid generates images."""
    decoder = value.decoder if isinstance(value, EncoderDecoder) else value
    heads = ["image" if isinstance(decoder.position, Grid) else BY_HEAD.get(type(head)) for head in decoder.outputs[:1]]
    name = heads[0] if heads else None
    if name is None:
        raise ValueError("the model has no output head that decides its task; add one to its outputs, or give --task")
    return "translate" if isinstance(value, EncoderDecoder) and name == "language" else name


def _shrink(value: Model | EncoderDecoder) -> int:
    """The factor by which the image that the encoder reads is smaller."""
    positions = (value.encoder.position, value.decoder.position) if isinstance(value, EncoderDecoder) else (None, None)
    small, large = (position.rows if isinstance(position, Grid) else 1 for position in positions)
    return large // small


def _image_size(value: Model | EncoderDecoder) -> int:
    """The height and width of the images that the model reads as it is; images of mixed sizes get this size. Default: 224."""
    if not isinstance(value, Model) or not isinstance(value.embed, Patches):
        return Classify().mixed_size
    limit = value.limit()
    return math.isqrt(limit - value.class_token) * value.embed.size if limit else Classify().mixed_size


def _kind(value: Model | EncoderDecoder) -> InputKind | None:
    """The kind of inputs of a classifier, from its embedding."""
    if isinstance(value, EncoderDecoder):
        return None
    if isinstance(value.embed, Patches):
        return "images"
    if isinstance(value.embed, Features | Nodes):
        return "graph" if any(isinstance(part, Graph) for part in value.body.patterns()) else "sets"
    return "text"
