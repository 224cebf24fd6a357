"""Values: frozen, hashable, typed, and the same after a round trip through JSON.

Everything that says *what a model is* (a pattern, a rule, a block, a whole member) is a value. A value knows its
numbers and how to build its module; it holds no tensor. Fields are checked when the value is made, so a wrong number
is named where it was written.

A protocol (Pattern, Rule, Wiring, ...) is a plain class; a value is a `Value` that also inherits its protocol. Anyone's
subclass takes part in JSON: it is found by its tag among the protocol's subclasses.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # a whole number of 1 or more
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # a whole number of 0 or more
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]  # a probability that may not be 1
Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositivePart = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

T = TypeVar("T")


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class Value(msgspec.Struct, frozen=True, tag=snake, tag_field="type", omit_defaults=False, forbid_unknown_fields=True):
    """A frozen struct whose fields are checked against their types when it is made."""

    def __post_init__(self) -> None:
        for name, full_name, kind in _fields(type(self)):
            value = checked(full_name, getattr(self, name), kind)
            msgspec.structs.force_setattr(self, name, value)  # a list becomes the tuple it means


@functools.cache
def _fields(kind: type[Value]) -> tuple[tuple[str, str, Any], ...]:
    """The fields of a class by name, by the name an error tells, and with their types: slow to find, so found once."""
    fields = msgspec.structs.fields(kind)
    return tuple((field.name, f"{snake(kind.__name__)}.{field.name}", field.type) for field in fields)


def checked(name: str, given: Any, kind: Any) -> Any:
    """What is given, converted to the kind; or a ValueError that names it."""
    if isinstance(given, float) and not math.isfinite(given):
        raise ValueError(f"{name} is {given!r}: give a finite number")
    try:
        return msgspec.convert(given, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        reason = str(error).replace("Expected", "expected").replace("`", "")
        if get_origin(kind) is Literal:
            reason = nearest(str(given), get_args(kind))
        raise ValueError(f"{name} is {given!r}: {reason}") from None


def to_json(value: Value, indent: int = 2) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()


def from_json(text: str | bytes, kind: type[T]) -> T:
    """The value that `to_json` wrote. `kind` is a protocol or a value class."""
    try:
        tree = msgspec.json.decode(text)
        return msgspec.convert(tree, kind, dec_hook=_decode)
    except msgspec.MsgspecError as error:
        raise ValueError(f"this JSON is not a {kind.__name__}: {error}") from None


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a value as (path, plain value); a nested value's own name stands at its path."""
    tree = msgspec.to_builtins(value) if isinstance(value, Value) else value
    if isinstance(tree, dict):
        for name, part in tree.items():
            if name == "type":
                yield path or "model", part
            else:
                yield from flatten(part, f"{path}.{name}" if path else name)
    elif isinstance(tree, list | tuple) and tree and any(isinstance(part, dict) for part in tree):
        for number, part in enumerate(tree):
            yield from flatten(part, f"{path}[{number}]")
    else:
        yield path, tree


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error message: the names that look like the wrong one, or all of them."""
    names = sorted(names)
    known = {one.lower(): one for one in names}
    close = [known[one] for one in difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else f"the names are {', '.join(names)}"


def named(protocol: type[T]) -> dict[str, type[T]]:
    """The value classes of a protocol by tag, the user's own included."""
    found: dict[str, type[T]] = {}
    for kind in protocol.__subclasses__():
        if issubclass(kind, Value):
            name = snake(kind.__name__)
            if name in found and found[name].__module__.startswith("everyformer."):
                raise ValueError(
                    f"{kind.__module__}.{kind.__name__} has the name of everyformer's own {name}; name it otherwise"
                )
            found[name] = kind
        found |= named(kind)
    return found


def _decode(kind: Any, tree: Any) -> Any:
    if isinstance(tree, kind):
        return tree
    name = kind.__name__.lower()
    if not isinstance(tree, dict) or "type" not in tree:
        raise ValueError(f"expected a {name} value, got {type(tree).__name__}")
    kinds = named(kind)
    if tree["type"] not in kinds:
        raise ValueError(f"no {name} is named {tree['type']!r}; {nearest(tree['type'], kinds)}")
    return msgspec.convert(tree, kinds[tree["type"]], dec_hook=_decode)
