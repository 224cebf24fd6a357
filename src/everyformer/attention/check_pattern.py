"""Checks what a pattern states about itself against its predicate, over all pairs of the first positions and of those at which its
numbers let it change.

    check_pattern(Dilated(4) & Causal())        # raises ValueError with a counterexample, or returns

A wrong `max_distance()` or `superset()` makes attention wrong, a wrong `is_causal()` lets a model read the future, and a predicate
that is not elementwise differs between kernels. An `order(position)` cannot make the result wrong, only slow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from everyformer.attention.algebra import Pattern
from everyformer.attention.context import SideInputs
from everyformer.attention.evaluate import pairs_of_structure

ROWS = 16  # queries in a block, to see whether an order of the positions helps


def check_pattern(pattern: Pattern, length: int = 64, heads: int = 2) -> None:
    """Checks the `pattern` and every pattern inside it, on `length` positions and for each of `heads`.

    A pattern that needs side inputs is not checked by itself, because its predicate depends on them.

    Raises ValueError if a stated fact does not hold, with the pair of positions that contradicts it.
    Example: `check_pattern(Causal() & Window(8))`.
    """
    for part in pattern.walk():
        if not any(one.needs and one.superset() != one for one in part.walk()):
            _check(part, length, heads)


def _check(pattern: Pattern, length: int, heads: int) -> None:
    allowed_HQK = _elementwise(pattern, length, heads)
    position = torch.arange(length)
    superset_HQK = pattern.superset().mask(length, heads=heads)
    _check_facts(pattern, position, allowed_HQK, superset_HQK)
    at_N, allowed_HNN = pairs_of_structure(pattern, heads)
    h, zero = torch.arange(heads).view(-1, 1, 1), torch.zeros(1, 1, 1, dtype=torch.long)
    superset_HNN = pattern.superset().bind(SideInputs())(zero, h, at_N.view(1, -1, 1), at_N.view(1, 1, -1))
    _check_facts(pattern, at_N, allowed_HNN, superset_HNN)
    if (key := pattern.order(position)) is not None:
        _check_order(pattern, key, allowed_HQK)


def _check_facts(pattern: Pattern, at_N: Tensor, allowed_HNN: Tensor, superset_HNN: Tensor) -> None:
    """Checks the facts on all pairs of these positions."""

    def check(wrong_HNN: Tensor, fact: str) -> None:
        for head, q, k in wrong_HNN.nonzero()[:1].tolist():
            raise ValueError(
                f"{pattern}: {fact}, but query {at_N[q]} attends to key {at_N[k]} in head {head}; correct the method, or remove it"
            )

    check(allowed_HNN & ~superset_HNN, "superset() leaves out an allowed pair")
    if (end := pattern.max_distance()) is not None:
        check(allowed_HNN & ((at_N[:, None] - at_N).abs() > end), f"max_distance() is {end}")
    if pattern.is_causal():
        check(allowed_HNN.triu(1), "is_causal() is True")


def _elementwise(pattern: Pattern, length: int, heads: int) -> Tensor:
    """Returns the mask H, Q, K. Raises unless single pairs give what the whole gives."""
    allowed_HQK = pattern.mask(length, heads=heads)
    if allowed_HQK.dtype != torch.bool:
        raise ValueError(f"{pattern}: allows(b, h, q, k) returns {allowed_HQK.dtype}; return booleans, with & | ~")
    predicate, zero = pattern.bind(SideInputs()), torch.tensor(0)
    for head in range(heads):
        for q in range(0, length, max(1, length // 8)):
            for k in range(q % 3, length, max(1, length // 16)):
                if bool(predicate(zero, torch.tensor(head), torch.tensor(q), torch.tensor(k))) != bool(
                    allowed_HQK[head, q, k]
                ):
                    raise ValueError(
                        f"{pattern}: allows(b, h, q, k) of query {q} and key {k} in head {head} alone differs from the same pair "
                        "among others; compute each pair from its own q and k, without a Python branch on their values"
                    )
    return allowed_HQK


def _check_order(pattern: Pattern, key: Tensor, allowed_HQK: Tensor) -> None:
    """Raises if the order is no key for each position, or if blocks of queries gather more keys in it than without it."""
    allowed_QK = allowed_HQK.any(0)
    if not isinstance(key, Tensor) or key.shape != (len(allowed_QK),):
        raise ValueError(
            f"{pattern}: order(position) returns {getattr(key, 'shape', key)} for {len(allowed_QK)} positions; return one key for each"
        )
    plain, ordered = (_gathered(x) for x in (allowed_QK, allowed_QK[key.argsort()]))
    if ordered > plain:
        raise ValueError(
            f"{pattern}: in the order of order(position) blocks of {ROWS} queries gather {ordered} keys, without it {plain}; give "
            "queries that attend to the same keys the same sort key, or remove the method"
        )


def _gathered(allowed_QK: Tensor) -> int:
    """Returns the number of keys that the blocks of queries gather, together."""
    return sum(int(rows_QK.any(0).sum()) for rows_QK in allowed_QK.split(ROWS))
