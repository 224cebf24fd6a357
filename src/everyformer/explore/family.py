"""The family as a map of the five questions, and models of parts that are chosen freely."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from everyformer.attention.pattern import Pattern
from everyformer.explore.answer import Answer, Ask
from everyformer.explore.patterns import NoRequest, train_command
from everyformer.family.table import MEMBERS, find
from everyformer.network.embed import Features
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.size import parameters
from everyformer.network.store import model_from_json
from everyformer.study.choices import CHOICES, AnyModel, Side, alternatives, choose, illegal
from everyformer.study.differences import differences, is_size, tree_of
from everyformer.study.family_listing import cache_of, read_listing
from everyformer.study.plan import plan
from everyformer.study.python_source import to_python
from everyformer.task.task import Task
from everyformer.train.recipe import Recipe
from everyformer.value import snake, to_json

SETTINGS = ("run.steps=100",)  # of the run that is planned
Json = Annotated[str, Meta(max_length=200_000)]
Name = Annotated[str, Meta(max_length=100)]


class MemberRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A member, as a place to start from."""

    name: Name
    size: Name | None = None


class ChooseRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """A model as JSON, and another choice for one of its questions. Without a question the model as it is."""

    json: Json
    question: Name | None = None
    choice: Any = None
    side: Side = "decoder"  # of an encoder-decoder


class Family:
    """Answers what the view of the family asks."""

    def __init__(self, imports: Sequence[str] = ()) -> None:
        self.imports = imports
        self.asks = {
            "/api/family": Ask(NoRequest, self.table),
            "/api/family/member": Ask(MemberRequest, self.member),
            "/api/family/choose": Ask(ChooseRequest, self.choose),
            "/api/family/plan": Ask(ChooseRequest, self.plan),
        }

    def table(self, request: NoRequest) -> Answer:
        """The members with their answers to the five questions."""
        rows = [row | {"idea": MEMBERS[row["member"]].idea} for row in read_listing()]
        return Answer({"members": rows, "questions": list(CHOICES)})

    def member(self, request: MemberRequest) -> Answer:
        return self._about(find_member(request.name).value(request.size))

    def choose(self, request: ChooseRequest) -> Answer:
        return self._about(_chosen(request), request.side)

    def plan(self, request: ChooseRequest) -> Answer:
        """Memory and operations of a training step, by `plan`."""
        model = _chosen(request)
        if reasons := illegal(model):
            raise ValueError(reasons[0])
        return Answer(_planned(model))

    def _about(self, model: AnyModel, side: Side = "decoder") -> Answer:
        """What is known of a model at once: whether it is legal, its parts, its texts, and the nearest member."""
        reasons = illegal(model)
        main = getattr(model, side) if isinstance(model, EncoderDecoder) else model
        count = None if reasons else parameters(model)
        data = {
            "json": to_json(model), "python": to_python(model), "reasons": reasons, "parameters": count,
            "answers": _answers(main), "nearest": _nearest(model), "train": _command(model, self.imports),
            "alternatives": alternatives(main.width, main.limit() or 64), "side": side if isinstance(model, EncoderDecoder) else None,
        }  # fmt: skip
        return Answer(data)


def find_member(name: str) -> Any:
    """Returns a member of the family; never a file of that name."""
    if name not in MEMBERS:
        raise ValueError(f"no member of the family is named {name!r}; choose one of the table")
    return find(name)


@lru_cache(64)
def _planned(model: AnyModel) -> dict[str, Any]:
    """The plan of the command that the page shows. It has no limit, so that nothing is tried that would need less memory."""
    found = _member_of(model)
    recipe = Recipe.of(found[0], *SETTINGS, size=found[1]) if found else Recipe.of(_fitted(model), *SETTINGS)
    planned = plan(recipe, limit=sys.maxsize)
    lines = planned.lines()
    return {
        "parameters": planned.parameters, "flops": planned.flops, "targets": planned.targets, "tensors": planned.tensors,
        "checkpoint": planned.checkpoint, "batch": planned.recipe.run.batch,
        "lines": {name: lines[name] for name in ("operations", "memory", "checkpoint", "attention") if name in lines},
    }  # fmt: skip


def _chosen(request: ChooseRequest) -> AnyModel:
    model = model_from_json(request.json.encode())
    if request.question is not None:
        try:
            model = choose(model, request.question, request.choice, request.side)
        except (TypeError, AttributeError, msgspec.MsgspecError):
            raise ValueError(
                f"{request.question} cannot be {str(request.choice)[:100]!r}; give another choice"
            ) from None
    sides = (model.encoder, model.decoder) if isinstance(model, EncoderDecoder) else (model,)
    if any(side.width > 1 << 15 or getattr(side.body, "num_layers", 1) > 512 for side in sides):
        raise ValueError("the page shows models up to a width of 32,768 and 512 layers; choose a smaller one")
    return model


def _answers(model: Model) -> dict[str, Any]:
    """The choices of a model, as the page shows and changes them."""
    body = model.body
    attentions = [one for one in body.sublayers() if isinstance(one, Attention)]
    patterns: list[Pattern] = list(dict.fromkeys(one.pattern for one in attentions))
    first = attentions[0] if attentions else None
    return {
        "pattern": None if first is None else str(first.pattern), "patterns": [str(one) for one in patterns],
        "score_mods": [] if first is None else [msgspec.to_builtins(one) for one in first.score_mods],
        "heads": None if first is None else getattr(first.heads, "heads", None),
        "residual": msgspec.to_builtins(body.residual), "depth": snake(type(body).__name__),
        "layers": getattr(body, "num_layers", None) or getattr(body, "steps", None),
        "memory": model.memory.length if model.memory else None, "cache": cache_of(model), "width": model.width,
        "position": None if model.position is None else msgspec.to_builtins(model.position),
        "outputs": [msgspec.to_builtins(one) for one in model.outputs], "tree": tree_of(model),
        "sublayers": [msgspec.to_builtins(one) for one in body.layers[0].sublayers],
    }  # fmt: skip


@cache
def _members() -> dict[tuple[str, str], AnyModel]:
    """Every member in every size."""
    return {(name, size): one.value(size) for name, one in MEMBERS.items() for size in one.sizes}


def _member_of(model: AnyModel) -> tuple[str, str] | None:
    """The name and the size of the member that a model is."""
    return next((found for found, value in _members().items() if value == model), None)


def _fitted(model: AnyModel) -> AnyModel:
    """The model with the tokens or inputs of the embedded data, as a member has when it is trained on them."""
    settings = _data_settings(Recipe.of(model).task)

    def fit(side: Model) -> Model:
        embed: Any = side.embed
        if settings.get("vocabulary", 0) > getattr(embed, "vocabulary", math.inf):
            embed = replace(embed, vocabulary=settings["vocabulary"])
        if settings.get("inputs") not in (None, getattr(embed, "inputs", None)) and isinstance(embed, Features):
            embed = replace(embed, inputs=settings["inputs"])
        return replace(side, embed=embed)

    if isinstance(model, EncoderDecoder):
        return replace(model, encoder=fit(model.encoder), decoder=fit(model.decoder))
    return fit(model)


@lru_cache(32)
def _data_settings(task: Task) -> dict[str, Any]:
    """The settings of a model that follow from the embedded data of a task, such as the number of tokens."""
    try:
        return task.open(None, None).member_settings()
    except ValueError:  # it has none
        return {}


def _nearest(model: AnyModel) -> dict[str, Any]:
    """The member that differs in the fewest parts, and then in the fewest sizes."""
    best: tuple[int, int, str, str, dict[str, Any]] | None = None
    for (name, size), value in _members().items():
        if size != next(iter(MEMBERS[name].sizes)):
            continue
        pairs = differences(value, model)
        parts = sum(not is_size(path, pair) for path, pair in pairs.items())
        if best is None or (parts, len(pairs)) < best[:2]:
            best = parts, len(pairs), name, size, pairs
    assert best is not None
    rows = [
        {"path": path, "member": _text(pair[0]), "model": _text(pair[1]), "size": is_size(path, pair)}
        for path, pair in best[4].items()
    ]
    return {"name": best[2], "size": best[3], "differences": rows}


def _text(leaf: Any) -> str:
    return "–" if leaf is None or leaf == [] else "yes" if leaf is True else str(leaf)


def _command(model: AnyModel, imports: Sequence[str]) -> str:
    """A command that trains the model: a member by its name, any other from a file that it writes first."""
    if found := _member_of(model):
        return train_command([found[0], "--size", found[1]], imports)
    text = shlex.quote(msgspec.json.encode(_fitted(model)).decode())
    return f"echo {text} > mine.json && {train_command(['mine.json'], imports)}"
