"""Evaluates the predicates of patterns over many positions: all of the first ones, or those at which a pattern is likely to change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everyformer.attention.context import SideInputs

if TYPE_CHECKING:
    from everyformer.attention.algebra import Pattern

TRIED = 256  # positions on which a pattern that states to be causal is tried, all against all
FARTHEST = 1 << 24  # the largest of the structural positions


def predicate_rows(pattern: Pattern, length: int, heads: int, step: int | None = None) -> Iterator[Tensor]:
    """Yields the mask H, rows, K in blocks of rows, to bound the memory of a long mask."""
    step = step or max(1, 2**24 // (length * heads))
    device = torch.device("cpu")  # also while a model is built on another device
    h, k = torch.arange(heads, device=device).view(-1, 1, 1), torch.arange(length, device=device).view(1, 1, -1)
    for start in range(0, length, step):
        q = torch.arange(start, min(start + step, length), device=device).view(1, -1, 1)
        yield _evaluate(pattern, torch.zeros_like(h), h, q, k).expand(heads, q.shape[1], length)


def _evaluate(pattern: Pattern, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Returns the booleans of a predicate. Raises ValueError if it cannot be computed on tensors."""
    try:
        allowed = pattern.bind(SideInputs())(b, h, q, k)
    except (RuntimeError, TypeError, ArithmeticError) as error:
        raise ValueError(
            f"allows(b, h, q, k) of the pattern {pattern} fails with {type(error).__name__} ({error}); define it as arithmetic on the "
            "tensors q and k, with & | ~ instead of `if`, `and`, `or`, `not`"
        ) from error
    if not isinstance(allowed, Tensor) or allowed.dtype != torch.bool:
        returned = allowed.dtype if isinstance(allowed, Tensor) else type(allowed).__name__
        raise ValueError(
            f"allows(b, h, q, k) of the pattern {pattern} returns {returned}; return booleans, with comparisons and & | ~"
        )
    return allowed


def structural_positions(pattern: Pattern) -> list[int]:
    """Returns positions, in order, around which the predicate is likely to change: the numbers in its fields, products of two and of
    three of them, and small multiples, each with its neighbours. A period is such a number."""
    fields = {number for part in pattern.walk() for number in _numbers(part)} - {0, 1}
    numbers = sorted(fields)[:8]
    products = {math.prod(some) for count in (1, 2, 3) for some in combinations_with_replacement(numbers, count)}
    ends = sorted({multiple * one for one in products for multiple in (1, 2, 3)})
    ends = [end for end in ends if end < FARTHEST]
    ends = ends[:: 1 + len(ends) // (TRIED // 4)]
    return sorted({0, 1} | {end + step for end in ends for step in (-1, 0, 1)})


def pairs_of_structure(pattern: Pattern, heads: int) -> tuple[Tensor, Tensor]:
    """Returns the structural positions N, and the mask H, N, N of all their pairs. It is empty if the pattern has an end before them."""
    position_N = torch.tensor(structural_positions(pattern), device="cpu")
    h, zero = torch.arange(heads, device="cpu").view(-1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.long, device="cpu")
    try:
        allowed = _evaluate(pattern, zero, h, position_N.view(1, -1, 1), position_N.view(1, 1, -1))
    except IndexError:
        return position_N[:0], torch.zeros(heads, 0, 0, dtype=torch.bool, device="cpu")
    return position_N, allowed.expand(heads, len(position_N), len(position_N))


def _numbers(x: Any) -> Iterator[int]:
    """Yields the whole numbers in the fields of a pattern, without those of the patterns inside it."""
    if isinstance(x, int) and not isinstance(x, bool):
        yield x
    fields = x if isinstance(x, tuple) else [getattr(x, name) for name in getattr(x, "__struct_fields__", ())]
    for field in fields:
        if not hasattr(field, "allows"):
            yield from _numbers(field)


@lru_cache(maxsize=256)
def any_pair_ahead(pattern: Pattern, length: int, heads: int) -> bool:
    """Returns whether a query of the first positions attends to a later one."""
    start = 0
    for rows in predicate_rows(pattern, length, heads):
        if bool(rows.triu(diagonal=start + 1).any()):
            return True
        start += rows.shape[1]
    return False
