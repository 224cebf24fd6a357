"""The plan of sparse attention: a pattern as disjoint parts, each of them dense in some order of the positions.

Kernels execute parts: `fused`, `tiled` and `hashed` those whose kind they have a program for, `blocked` any. With l the `size`, m the
`back`, c the `columns` and s the `skip` of a part, query i attends to the keys j with

    kind      order of the positions           allowed pairs
    BAND      as they are                      i // l * l - m <= j <= i and l - c - s <= j mod l < l - s
    RESIDUE   by i mod l, then i               i mod l = j mod l and j <= i - m l
    DISTANT   as they are                      l - c - s <= j mod l < l - s and j // l < i // l
    BUCKET    by the bucket of a round         among the m keys before i in its bucket, and in no earlier round
    ANY       by `Pattern.order` of its parts  those of the part's pattern

A window of w is a band with l = 1 and m = w - 1, a block a band with m = 0 and c = l.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import count

from everyformer.attention.algebra import And, Causal, Full, Pattern
from everyformer.attention.pattern import Block, Hashed, Local, Stride, Summary, Window


class Kind(IntEnum):
    """What is dense, and in which order. programs.py has the same numbers."""

    BAND = 0
    RESIDUE = 1
    DISTANT = 2
    BLOCK_AND_DISTANT = (
        3  # a band of one block and the distant part of all earlier ones, which `fused` computes together
    )
    BUCKET = 4
    ANY = 5


@dataclass(frozen=True)
class Part:
    """Pairs of a pattern that are dense in one order of the positions; see the table above."""

    kind: Kind
    pattern: Pattern  # the pairs of the part; of a bucket, those of all rounds
    size: int = 1
    back: int = 0
    columns: int = 0
    skip: int = 0
    round: int = 0

    def fraction(self, length: int) -> float:
        """Returns the fraction of the T x T scores in the dense area of the part, at least. Of ANY only little is known."""
        band, distant = (self.size + self.back) / length, self.columns / self.size / 2
        return {
            Kind.BAND: band,
            Kind.RESIDUE: 1 / self.size,
            Kind.DISTANT: distant,
            Kind.BLOCK_AND_DISTANT: band + distant,
            Kind.BUCKET: self.back / length,
            Kind.ANY: _least_fraction(self.pattern),
        }[self.kind]


@lru_cache(maxsize=256)
def _least_fraction(pattern: Pattern) -> float:
    superset = type(pattern.superset())
    return 1.0 if superset is Full else 0.5 if superset is Causal else 0.0


@dataclass(frozen=True)
class Plan:
    """The parts of each group of heads: head h has those of group h mod the number of groups."""

    patterns: tuple[Pattern, ...]  # of each group
    groups: tuple[tuple[Part, ...], ...]

    def fraction(self, length: int) -> float:
        """Returns the fraction of the T x T scores in the dense areas of all parts, at least."""
        return sum(part.fraction(length) for parts in self.groups for part in parts) / len(self.groups)

    def kinds(self) -> set[Kind]:
        return {part.kind for parts in self.groups for part in parts}


@lru_cache(maxsize=256)
def plan(pattern: Pattern, heads: int, max_distance: int | None = None) -> Plan:
    """Returns the parts of a pattern, those pairs left out that are farther apart than `max_distance`."""
    if max_distance is not None:
        pattern = pattern & Window(max_distance + 1)
    by_head = [pattern.for_head(head) for head in range(heads)]
    turns = next(n for n in count(1) if heads % n == 0 and by_head == by_head[:n] * (heads // n))
    return Plan(tuple(by_head[:turns]), tuple(parts(one) for one in by_head[:turns]))


def parts(pattern: Pattern) -> tuple[Part, ...]:
    """Returns disjoint parts of the pattern of one head; their union is the pattern."""
    if type(pattern) is Hashed:
        return tuple(Part(Kind.BUCKET, pattern, back=pattern.window, round=number) for number in range(pattern.rounds))
    alternatives = pattern.alternatives()
    match [_besides_causal(one) for one in alternatives]:
        case [Window(w)]:
            return (band(1, w - 1),)
        case [Block(l)]:
            return (band(l),)
        case [Local(l, m)]:
            return (band(l, m),)
        case [Stride(l)]:
            return (residue(l),)
        case [Summary(l, c, s)]:
            return band(l, 0, c, s), distant(l, c, s)
        case [Window(w), Stride(l)]:  # the strides that are not in the window
            return band(1, w - 1), residue(l, -(-w // l))
        case [Block(l), Summary(n, c, s)] if l == n:
            return band(l), distant(l, c, s)
    return tuple(Part(Kind.ANY, one) for one in _disjoint(alternatives))


def band(size: int, back: int = 0, columns: int | None = None, skip: int = 0) -> Part:
    pattern = Causal() & Local(size, back)
    if columns is not None and columns < size:
        pattern = pattern & Summary(size, columns, skip)
    return Part(Kind.BAND, pattern, size, back, size if columns is None else columns, skip)


def residue(size: int, back: int = 0) -> Part:
    pattern = Causal() & Stride(size)
    return Part(Kind.RESIDUE, pattern & ~Window(back * size) if back else pattern, size, back)


def distant(size: int, columns: int, skip: int = 0) -> Part:
    return Part(Kind.DISTANT, Causal() & Summary(size, columns, skip) & ~Block(size), size, 0, columns, skip)


def _besides_causal(pattern: Pattern) -> Pattern | None:
    """Returns the one pattern that stands beside `causal`, the smallest of several windows; None if it is not of a known kind."""
    operands = pattern.parts if isinstance(pattern, And) else (pattern,)
    others = [part for part in operands if type(part) is not Causal]
    if len(others) == len(operands):
        return None
    if windows := [part for part in others if type(part) is Window]:
        others = [part for part in others if type(part) is not Window] + [min(windows, key=lambda one: one.size)]
    # The exact class: a class that inherits from one of these may have another predicate.
    return others[0] if len(others) == 1 and type(others[0]) in (Window, Block, Local, Stride, Summary) else None


def _disjoint(alternatives: list[Pattern]) -> Iterator[Pattern]:
    """Yields each alternative without the pairs of the earlier ones."""
    for number, one in enumerate(alternatives):
        for earlier in alternatives[:number]:
            one = one & ~earlier
        yield one
