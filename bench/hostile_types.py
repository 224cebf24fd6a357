"""Strategies of hypothesis for values of declared types: legal ones, ones with a wrong value here and there, and any JSON.

values(Pattern)         JSON of a pattern: its tag, and a value of the declared type for each field
models()                JSON of a legal model, mostly with some fields set to other values of their declared types
drawn(strategy, 20, 1)  the first 20 examples of a strategy, the same for the same seed
"""

from __future__ import annotations

import json
import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from msgspec.structs import replace

from everyformer.network.embed import Tokens
from everyformer.network.model import Model
from everyformer.network.output_head import Classify, Language, Masked
from everyformer.study.random_models import random_models
from everyformer.value import Value, named, to_json

DEPTH = 3  # of values in values
EDGES = (0, -1, 2**16, 2**16 + 1, 2**31 - 1, 2**31, 2**63, 10**30)
WRONG = 30  # one value in so many has another type

T = TypeVar("T")
Path = tuple[str | int, ...]

texts = st.one_of(
    st.sampled_from(["", " ", "none", "auto", "tiny", "cpu", "best", "text", "label", "\x1b[2J", "\ufeff", "a" * 300]),
    st.text(max_size=12),
)
floats = st.one_of(st.floats(-2, 2), st.floats())
scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 99), st.sampled_from(EDGES), floats, texts)
trees: SearchStrategy[Any] = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts | st.just("type"), inner, max_size=3),
    max_leaves=6,
)


def values(kind: Any, depth: int = DEPTH) -> SearchStrategy[Any]:
    """JSON of a type: of the values of a class, of the classes of a protocol, or of a plain type."""
    legal = st.deferred(lambda: _legal(kind, depth))
    return st.integers(0, WRONG).flatmap(lambda number: trees if number == WRONG else legal)


def _legal(kind: Any, depth: int) -> SearchStrategy[Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _bounded(inner[0], inner[1])
    if origin is Literal:
        return st.sampled_from(inner)
    if origin in (Union, types.UnionType):
        return st.one_of(*(values(one, depth) for one in inner))
    if origin is list or (origin is tuple and inner[-1] is Ellipsis):
        return st.lists(values(inner[0], depth), min_size=0 if depth < DEPTH else 1, max_size=3)
    if origin is tuple:
        return st.tuples(*(values(one, depth) for one in inner)).map(list)
    if origin is dict:
        return st.dictionaries(texts, trees, max_size=2)
    plain: dict[Any, SearchStrategy[Any]] = {
        int: st.integers(-2, 40), float: floats, str: texts, bool: st.booleans(), type(None): st.none(), Any: trees,
    }  # fmt: skip
    if kind in plain:
        return plain[kind]
    if issubclass(kind, msgspec.Struct):
        return _value(kind, depth)
    kinds = list(named(kind).values())
    flat = [one for one in kinds if not any(_holds_values(field.type) for field in msgspec.structs.fields(one))]
    return st.sampled_from(kinds if depth > 0 else flat or kinds).flatmap(lambda one: _value(one, depth))


def _bounded(kind: Any, limits: msgspec.Meta) -> SearchStrategy[Any]:
    """Numbers within the limits, mostly small ones, and those at the limits."""
    least, most = limits.ge if limits.ge is not None else limits.gt, limits.le if limits.le is not None else limits.lt
    ends = [end for end in (least, most) if end is not None]
    if kind is int:
        low = int(least or 0)
        return st.integers(low, low + 7) | st.integers(low, low + 40) | st.sampled_from([*ends, *EDGES])
    return st.floats(least, most) | st.sampled_from(ends or [0.0])


def _value(kind: type[msgspec.Struct], depth: int) -> SearchStrategy[dict[str, Any]]:
    fields = msgspec.structs.fields(kind)
    needed = {field.name: values(field.type, depth - 1) for field in fields if field.required}
    others = {field.name: values(field.type, depth - 1) for field in fields if not field.required}
    tag = {"type": st.just(str(kind.__struct_config__.tag))} if kind.__struct_config__.tag else {}
    return st.fixed_dictionaries(tag | needed, optional=others)


def _holds_values(kind: Any) -> bool:
    """Whether a field of this type holds other values."""
    if isinstance(kind, type) and kind.__module__.startswith("everyformer"):
        return True
    return any(_holds_values(one) for one in get_args(kind) if not isinstance(one, str | int | float))


# Legal values with some fields changed


def typed_places(value: Value, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every field of a value and of the values in it: its path in JSON, and its declared type."""
    for field in msgspec.structs.fields(value):
        content, here = getattr(value, field.name), (*path, field.name)
        yield here, field.type
        parts = [(here, content)] if isinstance(content, Value) else []
        if isinstance(content, tuple):
            parts = [((*here, number), one) for number, one in enumerate(content) if isinstance(one, Value)]
        for place, one in parts:
            yield from typed_places(one, place)


@st.composite
def changes(draw: DrawFn, value: Value, most: int = 3) -> list[tuple[Path, Any]]:
    """Other values of the declared types for some fields of a value, by their paths."""
    places = list(typed_places(value))
    chosen = draw(st.lists(st.sampled_from(places), max_size=most))
    return [(path, draw(values(kind))) for path, kind in chosen]


def changed(tree: Any, changes: list[tuple[Path, Any]]) -> Any:
    """JSON with other values at some paths. A path that an earlier change has removed is left out."""
    for path, content in changes:
        container = tree
        try:
            for key in path[:-1]:
                container = container[key]
            container[path[-1]] = content
        except (KeyError, IndexError, TypeError):
            continue
    return tree


@st.composite
def models(draw: DrawFn) -> Any:
    """JSON of a model: a random legal one, mostly with some fields changed; or one with a random value in each field.

    Most read tokens and have one output head, so that a task can train them.
    """
    if draw(st.integers(0, 7)) == 7:
        return draw(values(Model, DEPTH + 1))
    model = next(random_models(draw(st.integers(0, 2**32 - 1))))
    head = draw(st.sampled_from((None, Language(), Masked(), Classify(3), Classify(1))))
    if head is not None:
        model = replace(model, embed=Tokens(300), outputs=(head,), auxiliary=None)
    return changed(json.loads(to_json(model)), draw(changes(model)))


# Examples


def drawn(strategy: SearchStrategy[T], count: int, number: int) -> list[T]:
    """The first examples of a strategy, the same for the same number. The simplest one, always the first, is left out."""
    found: list[T] = []

    @seed(number)
    @settings(max_examples=count + 1, database=None, phases=[Phase.generate], deadline=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(strategy)
    def collect(example: T) -> None:
        found.append(example)

    run: Callable[[], None] = collect
    run()
    return found[1:]
