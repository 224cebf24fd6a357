"""Values: frozen, hashable, typed, and the same after a round trip through JSON.

Everything that describes a model (a pattern, a score modification, a layer, a whole member) is a value. A value has settings and
a method that builds its module; it holds no tensor. Its fields are checked when it is made, so an error names the field.

A protocol (Pattern, ScoreMod, Residual, ...) is a plain class; a value class inherits from its protocol and from `Value`. JSON
finds a class by its tag, the class name in snake_case, among the subclasses of the protocol, so that classes of your own are
found too, once their module is imported.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

Size = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]  # an integer of at least 1
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]  # an integer of at least 0
Few = Annotated[int, msgspec.Meta(ge=1, le=2**16)]  # a number of heads, layers or repetitions: each takes time
FewOrZero = Annotated[int, msgspec.Meta(ge=0, le=2**16)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]  # a probability below 1
Part = Annotated[float, msgspec.Meta(ge=0, le=1)]
PositivePart = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]

T = TypeVar("T")


class UnknownPart(ValueError):
    """JSON names a class that is not known: misspelled, or a part of your own that is not imported."""


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class Value(msgspec.Struct, frozen=True, tag=snake, tag_field="type", omit_defaults=False, forbid_unknown_fields=True):
    """A frozen struct. Raises ValueError if a field does not have its type. Example: `class Dilated(Pattern, Value, frozen=True)`."""

    def __post_init__(self) -> None:
        for name, full_name, kind in _fields(type(self)):
            value = checked(full_name, getattr(self, name), kind)
            msgspec.structs.force_setattr(self, name, value)  # a list becomes a tuple


@functools.cache
def _fields(kind: type[Value]) -> tuple[tuple[str, str, Any], ...]:
    """The fields of a class: name, name in errors, and type. Cached, because msgspec takes long."""
    if not kind.__struct_config__.frozen:
        raise ValueError(f"{kind.__name__} has frozen=False, but values do not change; write frozen=True")
    fields = msgspec.structs.fields(kind)
    return tuple((field.name, f"{snake(kind.__name__)}.{field.name}", field.type) for field in fields)


def checked(name: str, value: Any, kind: Any) -> Any:
    """Returns the value converted to the type. Raises ValueError with the name if that is impossible."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}: give a finite number")
    try:
        return msgspec.convert(value, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        if mistake := _common_mistake(value, kind):
            raise ValueError(f"{name} is {mistake}") from None
        reason = nearest(str(value), get_args(kind)) if get_origin(kind) is Literal else _reason(error)
        raise ValueError(f"{name} is {value!r}: {reason}") from None


def _common_mistake(value: Any, kind: Any) -> str | None:
    """A class instead of a value, or one value instead of a tuple of them, with the remedy."""
    for one in value if isinstance(value, tuple | list) else (value,):
        if isinstance(one, type):
            return f"the class {one.__name__}, not a value: write {one.__name__}(...), with its fields"
    if isinstance(value, Value) and any(get_origin(one) is tuple for one in (kind, *get_args(kind))):
        name = type(value).__name__
        return f"one {name}, but a tuple is expected: write ({name}(...),)"
    return None


def _words(error: msgspec.MsgspecError) -> str:
    return str(error).replace("Expected", "expected").replace("`", "").replace("NoneType", "null")


def _reason(error: msgspec.MsgspecError) -> str:
    """The message of msgspec in our words: without backticks, and with a path such as body.layers[0]."""
    return re.sub(r" - at \$\.?(.+)", r", at \1", _words(error))


def to_json(value: Value, indent: int = 2) -> str:
    """Returns a `value` as JSON, which `from_json` reads; `indent` is the number of spaces. Example: `to_json(member("gpt2", "tiny"))`."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode()


def decode_json(text: str | bytes) -> Any:
    """Read JSON as plain data. Raises msgspec.DecodeError if it is not JSON in UTF-8, or is nested more deeply than any value."""
    try:
        return msgspec.json.decode(text)
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(f"byte {error.start} is not text in UTF-8") from None


def from_json(text: str | bytes, kind: type[T]) -> T:
    """Returns the value of a JSON `text`. `kind` is a protocol or a value class. Raises ValueError if the JSON is not one.

    Raises UnknownPart, a ValueError, if the JSON names a class that is not known. Example: `from_json(text, Model)`.
    """
    try:
        return msgspec.convert(decode_json(text), kind, dec_hook=_decode)
    except msgspec.MsgspecError as error:
        if isinstance(error.__cause__, UnknownPart):
            raise UnknownPart(str(error.__cause__)) from None
        raise ValueError(f"this JSON is not a {kind.__name__}: {_reason(error)}") from None


def flatten(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every leaf of a value as (path, plain value). At the path of a nested value stands its tag."""
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
    """The end of an error message: the names similar to the wrong one, or all names."""
    names = sorted(names)
    known = {one.lower(): one for one in names}
    close = [known[one] for one in difflib.get_close_matches(str(name).lower(), known, n=3, cutoff=0.5)]
    return f"did you mean {' or '.join(close)}?" if close else f"the names are {', '.join(names)}"


@functools.cache
def _public_tags() -> set[str]:
    """The tags of the package's own classes. A class of your own may be defined again, these may not."""
    import everyformer

    return {snake(name) for name in (*everyformer.__all__, "And", "Or", "Not")}


def named(protocol: type[T]) -> dict[str, type[T]]:
    """The value classes of a protocol by tag, including those of your own that are imported. A name that begins with _ is abstract."""
    classes: dict[str, type[T]] = {}
    for kind in protocol.__subclasses__():
        if issubclass(kind, Value) and not kind.__name__.startswith("_"):
            name = snake(kind.__name__)
            if name in classes and name in _public_tags():
                raise ValueError(
                    f"a class {kind.__name__} of your own has the tag {name} of everyformer's; rename the class"
                )
            classes[name] = kind
        classes |= named(kind)
    return classes


def _decode(kind: Any, tree: Any) -> Any:
    if isinstance(tree, kind):
        return tree
    name = kind.__name__.lower()
    if not isinstance(tree, dict) or "type" not in tree:
        raise ValueError(f"expected a {name} value, got {type(tree).__name__}")
    kinds = named(kind)
    if tree["type"] not in kinds:
        raise UnknownPart(
            f"no {name} is named {tree['type']!r}; {nearest(tree['type'], kinds).rstrip('?')}. If it is a part of your own, import its "
            "file: with --import FILE on the command line, with import in Python"
        )
    return msgspec.convert(tree, kinds[tree["type"]], dec_hook=_decode)
