"""Writes a value as Python that makes it again."""

from __future__ import annotations

import json
from typing import Any

import msgspec

import everyformer
from everyformer.attention.pattern import And, Not, Or, Pattern
from everyformer.value import Value

WIDTH = 100  # of a line
INDENT = "    "


def to_python(value: Value, name: str = "model") -> str:
    """Returns a script that assigns the value to a name. Fields with their default are left out.

    Example: `to_python(member("gpt2", "tiny"))`.
    """
    kinds = sorted({type(part).__name__ for part in _parts(value)})
    known = [kind for kind in kinds if kind in everyformer.__all__]
    own = "".join(
        f"from {type(part).__module__} import {type(part).__name__}\n"
        for part in dict.fromkeys(_parts(value))
        if type(part).__name__ not in known and not isinstance(part, And | Or | Not)
    )
    line = f"from everyformer import {', '.join(known)}"
    if len(line) > WIDTH:
        line = "\n".join(("from everyformer import (", *(f"{INDENT}{kind}," for kind in known), ")"))
    return f"{line}\n{own}\n{name} = {_write(value, 0)}\n"


def _parts(value: Any) -> list[Value]:
    """The value and all values inside it; of patterns that combine others, those others."""
    if isinstance(value, tuple):
        return [part for one in value for part in _parts(one)]
    if not isinstance(value, Value):
        return []
    inner = [part for field, one in _fields(value) for part in _parts(one)]
    return inner if isinstance(value, And | Or | Not) else [value, *inner]


def _fields(value: Value) -> list[tuple[str, Any]]:
    """The fields that differ from their defaults."""
    fields = [(field, getattr(value, field.name)) for field in msgspec.structs.fields(value)]
    return [(field.name, one) for field, one in fields if one != field.default]


def _write(value: Any, depth: int) -> str:
    if isinstance(value, Pattern):
        return _pattern(value)
    if isinstance(value, tuple):
        return _enclosed("(", [_write(one, depth + 1) for one in value], ",)" if len(value) == 1 else ")", depth)
    if not isinstance(value, Value):
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    fields = [f"{name}={_write(one, depth + 1)}" for name, one in _fields(value)]
    return _enclosed(f"{type(value).__name__}(", fields, ")", depth)


def _enclosed(start: str, parts: list[str], end: str, depth: int) -> str:
    """Parts in parentheses: in one line if they fit, else one to a line."""
    line = f"{start}{', '.join(parts)}{end}"
    if len(line) + len(INDENT) * depth <= WIDTH and "\n" not in line:
        return line
    inner = "".join(f"{INDENT * (depth + 1)}{part},\n" for part in parts)
    return f"{start}\n{inner}{INDENT * depth})"


def _pattern(pattern: Pattern) -> str:
    if isinstance(pattern, And | Or):
        sign = " & " if isinstance(pattern, And) else " | "
        parts = [f"({_pattern(part)})" if isinstance(part, And | Or) else _pattern(part) for part in pattern.parts]
        return sign.join(parts)
    if isinstance(pattern, Not):
        inner = _pattern(pattern.part)
        return f"~({inner})" if isinstance(pattern.part, And | Or) else f"~{inner}"
    fields = [
        f"{name}=({', '.join(map(_pattern, one))},)" if name == "patterns" else f"{name}={one!r}"
        for name, one in _fields(pattern)  # type: ignore[arg-type]
    ]
    return f"{type(pattern).__name__}({', '.join(fields)})"
