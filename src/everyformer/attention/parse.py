"""Reads patterns from text such as `causal & (window(8) | stride(8))`, the form in which patterns print. It knows patterns of your
own by the snake-case name of their class, once their module is imported."""

from __future__ import annotations

import ast
from typing import Any

from everyformer.attention.pattern import And, ByHead, Not, Or, Pattern
from everyformer.value import named, nearest


def parse(text: str) -> Pattern:
    """Returns the pattern that a `text` such as `causal & (window(8) | stride(8))` names.

    Raises ValueError if the text names no pattern.
    Example: `parse("causal & (window(8) | stride(8))")`.
    """
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a str; write a pattern as text, for example 'causal & window(8)'")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ValueError(
            f"cannot read the pattern {text!r}: {error.msg}; write for example causal & window(8)"
        ) from None
    except (RecursionError, MemoryError):
        raise ValueError(_too_deep(text)) from None
    try:
        pattern = _read(tree, text)
    except RecursionError:
        raise ValueError(_too_deep(text)) from None
    except TypeError:  # & | or ~ of a number or a list
        raise ValueError(f"cannot read the pattern {text!r}: & | ~ combine patterns only") from None
    if not isinstance(pattern, Pattern):
        raise ValueError(f"{text!r} is a number or a list, not a pattern; write for example causal & window(8)")
    return pattern


def _too_deep(text: str) -> str:
    return f"the pattern {text[:40]}... is nested too deeply; use fewer parentheses and ~"


def _read(tree: ast.expr, text: str) -> Any:
    match tree:
        case ast.Name(id=name):
            return _make(name, [], text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _make(name, [_read(arg, text) for arg in args], text)
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _read(left, text) & _read(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read(left, text) | _read(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=part):
            return ~_read(part, text)
        case ast.Constant(value=int(value)):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(value))):
            return -value
        case ast.Tuple(elts=parts):
            return tuple(_read(part, text) for part in parts)
    raise ValueError(
        f"cannot read {ast.unparse(tree)!r} in the pattern {text!r}: use names, whole numbers, & | ~ and parentheses"
    )


def _make(name: str, arguments: list[Any], text: str) -> Pattern:
    kinds = {key: kind for key, kind in named(Pattern).items() if kind not in (And, Or, Not)}
    if name not in kinds:
        remedy = f"{nearest(name, kinds).rstrip('?')}. A class of your own must be imported first: on the command line with --import FILE"
        raise ValueError(f"no pattern is named {name!r} (in {text!r}); {remedy}")
    if kinds[name] is ByHead:
        arguments = [tuple(arguments)]
    try:
        return kinds[name](*arguments)
    except TypeError as error:
        call = f"{name}({', '.join(kinds[name].__struct_fields__)})"  # type: ignore[attr-defined]
        raise ValueError(f"{name} in the pattern {text!r}: {error}; write {call}") from None
