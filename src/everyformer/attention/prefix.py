"""The prefix of a pattern: the first positions, outside of which no query attends to a later one.

With the prefix P of a sequence, `prefix_of` states that a query i attends to a key j > i only if j is in P, and so i is. Tokens from the
end of P on then change nothing before them: a language model may learn to predict them. This is the prefix language model of Raffel et
al. 2019, `causal | prefix`.
"""

from __future__ import annotations

from collections.abc import Iterable

from everyformer.attention.algebra import And, ByHead, Or, Pattern
from everyformer.attention.pattern import Prefix

NOTHING = Prefix(0)


def prefix_of(pattern: Pattern, heads: int = 1) -> Prefix | None:
    """Returns the prefix of a pattern: Prefix(0) if it is causal, None if there is none, or none that is known.

    Example: `prefix_of(Causal() | Prefix(8))`.
    """
    if not pattern.attends_to_future(heads=heads):
        return NOTHING
    if not all(part.stable for part in pattern.walk()):
        return None
    if isinstance(pattern, Prefix):
        return pattern
    if isinstance(pattern, And):
        return next((found for part in pattern.parts if (found := prefix_of(part, heads)) is not None), None)
    if isinstance(pattern, Or | ByHead):
        return largest(prefix_of(part, heads) for part in pattern.children())
    return None


def largest(prefixes: Iterable[Prefix | None]) -> Prefix | None:
    """Returns the prefix that contains all of these; None if one is None, or if some have a length and others are given one."""
    found = set(prefixes) - {NOTHING}
    if not found:
        return NOTHING
    if None in found or (len(found) > 1 and Prefix() in found):
        return None
    return max((one for one in found if one is not None), key=lambda one: one.length or 0)
