"""The protocol of patterns, which query attends to which key, and their algebra: `&`, `|`, `~` and `ByHead`.

A pattern is a predicate on positions, `allows(b, h, q, k)`: whether the query at position q of sequence b attends to the key at
position k in head h. It is elementwise arithmetic on tensors, without a Python branch on their values, so the same body serves a
dense mask, a FlexAttention block mask and a gathered block. FlexAttention calls such a function a mask_mod.

A pattern of your own inherits from Pattern and Value and defines `allows`. It may also state facts about its predicate, which make
it faster: `max_distance()`, `order(position)`, `is_causal()` and `superset()`. `attention/check_pattern.py` checks them.
`attention/pattern.py` has the patterns of the papers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from everyformer.attention.context import Context, SideInputs
from everyformer.attention.evaluate import TRIED, any_pair_ahead, pairs_of_structure, predicate_rows
from everyformer.value import Value, snake

Index = Any  # a tensor of indices or positions
Predicate = Callable[[Index, Index, Index, Index], Any]
FACTS = ("max_distance", "order", "is_causal", "superset")  # methods that state something about the predicate


class Pattern:
    """Which query attends to which key. A pattern of your own inherits from Pattern and Value and defines `allows`.

    Example: `class Dilated(Pattern, Value, frozen=True)`.
    """

    __slots__ = ()
    needs: ClassVar[str | None] = None  # the name of the side input that the predicate reads, if any
    stable: ClassVar[bool] = True  # whether later tokens leave the pairs of earlier positions unchanged

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "allows" in vars(cls) or "bind" in vars(cls):  # another predicate: facts about the inherited one do not hold
            for name in FACTS:
                if name not in vars(cls):
                    setattr(cls, name, getattr(Pattern, name))

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        """Returns whether the query at position q attends to the key at position k, in head h of sequence b."""
        raise NotImplementedError

    def bind(self, side: SideInputs) -> Predicate:
        """Returns the predicate, with the side inputs of one call for the patterns that read them."""
        return self.allows

    def max_distance(self) -> int | None:
        """Returns a distance |q - k| that no allowed pair exceeds, or None if there is no such bound."""
        return None

    def order(self, position: Tensor) -> Tensor | None:
        """Returns a sort key for each position, or None.

        Sorted by it, neighbouring queries attend to the same keys, so that blocks of them have few keys to gather. For example
        `stride(l)` returns `position % l`. The order changes the speed only, never the result.
        """
        return None

    def is_causal(self) -> bool:
        """Returns True if no query attends to a later position, at any length, and False if that is not known."""
        return False

    def superset(self) -> Pattern:
        """Returns a pattern that reads no side inputs and allows every pair that this one allows, whatever the data."""
        return Full() if self.needs else self

    def children(self) -> tuple[Pattern, ...]:
        """Returns the patterns that this one combines."""
        return ()

    def for_head(self, head: int) -> Pattern:
        """Returns the pattern of one head, with every ByHead resolved."""
        return self

    def alternatives(self) -> list[Pattern]:
        """Returns patterns whose union is this one."""
        return [self]

    def __and__(self, other: Pattern) -> Pattern:
        return And(_operands(And, self) + _operands(And, other))

    def __or__(self, other: Pattern) -> Pattern:
        return Or(_operands(Or, self) + _operands(Or, other))

    def __invert__(self) -> Pattern:
        return self.part if isinstance(self, Not) else Not(self)

    def __str__(self) -> str:
        fields = [getattr(self, name) for name in self.__struct_fields__]  # type: ignore[attr-defined]
        for default in reversed(self.__struct_defaults__):  # type: ignore[attr-defined]
            if fields[-1] != default:
                break
            fields.pop()
        name = snake(type(self).__name__)
        return f"{name}({', '.join(map(str, fields))})" if fields else name

    def walk(self) -> Iterator[Pattern]:
        """Yields the pattern and all patterns inside it."""
        yield self
        for child in self.children():
            yield from child.walk()

    def mask(self, queries: int, keys: int | None = None, heads: int = 1, context: Context | None = None) -> Tensor:
        """Returns booleans H, Q, K of the first sequence. The queries are the last of the keys."""
        keys = queries if keys is None else keys
        context = context or Context.of(queries, keys, torch.device("cpu"))
        return context.mask(self, 1, heads)[0].expand(heads, queries, keys)

    def attends_to_future(self, length: int | None = None, heads: int = 1) -> bool:
        """Returns whether a query attends to a later key, or whether later tokens decide which keys a query attends to.

        Patterns that read data count as their `superset()`. With a length all pairs of positions below it are tried. Without one
        the result holds for every length: a pattern counts as causal only if `is_causal()` states it, as `causal & ...` does,
        and neither the first 256 positions nor `structural_positions` refute it.
        """
        if not all(part.stable for part in self.walk()):
            return True
        superset = self.superset()
        if length is None and not superset.is_causal():
            return True
        turns = [len(part.patterns) for part in superset.walk() if isinstance(part, ByHead)]
        heads = max(heads, math.lcm(*turns))
        if length is not None:
            return any_pair_ahead(superset, length, heads)
        return any_pair_ahead(superset, TRIED, heads) or bool(pairs_of_structure(superset, heads)[1].triu(1).any())

    def density(self, length: int, heads: int = 1) -> float:
        """Returns the fraction of the Q x K pairs that are allowed."""
        return sum(rows.sum().item() for rows in predicate_rows(self, length, heads)) / (heads * length * length)

    def computed_blocks(self, length: int, size: int, heads: int = 1) -> float:
        """Returns the fraction of the size x size blocks that have an allowed pair."""
        computed, total = 0, 0
        for rows in predicate_rows(self, length, heads, size):
            columns = torch.nn.functional.pad(rows.any(dim=-2), (0, -length % size))
            blocks = columns.unflatten(-1, (-1, size)).any(dim=-1)
            computed, total = computed + int(blocks.sum()), total + blocks.numel()
        return computed / total


class BoundPattern(Pattern):
    """A pattern whose predicate is made by `bind`, because it or a pattern in it may read side inputs."""

    __slots__ = ()

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return self.bind(SideInputs())(b, h, q, k)


class Full(Pattern, Value, frozen=True):
    """Every query attends to every key. Example: `Full() & Window(8)`."""

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (q <= k) | (q > k)


class Causal(Pattern, Value, frozen=True):
    """No query attends to a later position: j <= i. Example: `Causal() & Window(8)`."""

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return k <= q  # eq. W20

    def is_causal(self) -> bool:
        return True


class ByHead(BoundPattern, Value, frozen=True):
    """Head h has `patterns`[h mod n]. Example: `ByHead((Causal(), Causal() & Window(8)))`."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.patterns:
            raise ValueError("by_head has no patterns: give one for each head, or fewer, which the heads take in turn")

    def __str__(self) -> str:
        return f"by_head({', '.join(map(str, self.patterns))})"

    def children(self) -> tuple[Pattern, ...]:
        return self.patterns

    def for_head(self, head: int) -> Pattern:
        return self.patterns[head % len(self.patterns)].for_head(head)

    def superset(self) -> Pattern:
        return ByHead(tuple(part.superset() for part in self.patterns))

    def max_distance(self) -> int | None:
        return _largest(self.patterns)

    def is_causal(self) -> bool:
        return all(part.is_causal() for part in self.patterns)

    def bind(self, side: SideInputs) -> Predicate:
        predicates = [pattern.bind(side) for pattern in self.patterns]

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            group = h % len(predicates)
            allowed = (group == 0) & predicates[0](b, h, q, k)
            for number, predicate in enumerate(predicates[1:], 1):
                allowed = allowed | ((group == number) & predicate(b, h, q, k))
            return allowed

        return allows


class And(BoundPattern, Value, frozen=True):
    """The pairs that all parts allow."""

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _check_parts(self.parts)

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts)

    def children(self) -> tuple[Pattern, ...]:
        return self.parts

    def for_head(self, head: int) -> Pattern:
        return And(tuple(part.for_head(head) for part in self.parts))

    def alternatives(self) -> list[Pattern]:
        """Distributes the others over the first part that is a union: a & (b | c) is (a & b) | (a & c)."""
        for number, part in enumerate(self.parts):
            if isinstance(part, Or):
                others = self.parts[:number] + self.parts[number + 1 :]
                return [And((*others, one)) for one in part.parts]
        return [self]

    def superset(self) -> Pattern:
        return And(tuple(part.superset() for part in self.parts))

    def max_distance(self) -> int | None:
        return min((end for part in self.parts if (end := part.max_distance()) is not None), default=None)

    def is_causal(self) -> bool:
        return any(part.is_causal() for part in self.parts)

    def bind(self, side: SideInputs) -> Predicate:
        predicates = [part.bind(side) for part in self.parts]

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            allowed = predicates[0](b, h, q, k)
            for predicate in predicates[1:]:
                allowed = allowed & predicate(b, h, q, k)
            return allowed

        return allows


class Or(BoundPattern, Value, frozen=True):
    """The pairs that any part allows."""

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _check_parts(self.parts)

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))

    def children(self) -> tuple[Pattern, ...]:
        return self.parts

    def for_head(self, head: int) -> Pattern:
        return Or(tuple(part.for_head(head) for part in self.parts))

    def alternatives(self) -> list[Pattern]:
        return list(self.parts)

    def superset(self) -> Pattern:
        return Or(tuple(part.superset() for part in self.parts))

    def max_distance(self) -> int | None:
        return _largest(self.parts)

    def is_causal(self) -> bool:
        return all(part.is_causal() for part in self.parts)

    def bind(self, side: SideInputs) -> Predicate:
        predicates = [part.bind(side) for part in self.parts]

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            allowed = predicates[0](b, h, q, k)
            for predicate in predicates[1:]:
                allowed = allowed | predicate(b, h, q, k)
            return allowed

        return allows


class Not(BoundPattern, Value, frozen=True):
    """The pairs that the part does not allow."""

    part: Pattern

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, And | Or) else f"~{self.part}"

    def children(self) -> tuple[Pattern, ...]:
        return (self.part,)

    def for_head(self, head: int) -> Pattern:
        return Not(self.part.for_head(head))

    def superset(self) -> Pattern:
        return self if self.part.superset() == self.part else Full()

    def bind(self, side: SideInputs) -> Predicate:
        predicate = self.part.bind(side)
        return lambda b, h, q, k: ~predicate(b, h, q, k)


def _largest(patterns: tuple[Pattern, ...]) -> int | None:
    """Returns the largest `max_distance()`, or None if one has none."""
    ends = [part.max_distance() for part in patterns]
    known = [end for end in ends if end is not None]
    return max(known) if len(known) == len(ends) else None


def _check_parts(parts: tuple[Pattern, ...]) -> None:
    if not parts:
        raise ValueError("& and | combine at least one pattern, but none is given; give one or more")


def _operands(kind: type[And] | type[Or], pattern: Pattern) -> tuple[Pattern, ...]:
    if not isinstance(pattern, Pattern):
        raise ValueError(f"{pattern!r} is not a pattern; combine patterns with & | ~")
    return pattern.parts if isinstance(pattern, kind) else (pattern,)
