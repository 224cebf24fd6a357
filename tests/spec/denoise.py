"""Span corruption, written from Raffel et al. 2019 (sections 3.1.4 and 3.3.4) and the functions of its published code.

Symbols: L tokens of a window, r share of noise, mu mean length of a span; <i> is the token marks[i].
"""

from __future__ import annotations

from collections.abc import Sequence


def number_of_noise_tokens(length: int, r: float) -> int:
    """noise_tokens = round(L r), at least one; one token at least stays."""
    return min(max(round(length * r), 1), length - 1)


def number_of_spans(noise_tokens: int, mu: float) -> int:
    """spans = round(noise_tokens / mu), at least one."""
    return max(round(noise_tokens / mu), 1)


def noise_mask(kept: Sequence[int], noise: Sequence[int]) -> list[bool]:
    """Kept and missing spans take turns, a kept one first."""
    mask: list[bool] = []
    for keep, miss in zip(kept, noise, strict=True):
        mask += [False] * keep + [True] * miss
    return mask


def span_to_unique_sentinel(tokens: Sequence[int], mask: Sequence[bool], marks: Sequence[int]) -> list[int]:
    """The first token of the i-th masked span becomes <i>, and its other tokens are dropped."""
    found, number, before = [], 0, False
    for token, masked in zip(tokens, mask, strict=True):
        if not masked:
            found.append(token)
        elif not before:
            found.append(marks[number])
            number += 1
        before = masked
    return found


def inputs(tokens: Sequence[int], mask: Sequence[bool], marks: Sequence[int], end: int) -> list[int]:
    return [*span_to_unique_sentinel(tokens, mask, marks), end]


def targets(tokens: Sequence[int], mask: Sequence[bool], marks: Sequence[int], end: int) -> list[int]:
    """The same with the mask inverted."""
    return [*span_to_unique_sentinel(tokens, [not masked for masked in mask], marks), end]
