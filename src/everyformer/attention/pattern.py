"""Patterns: who sees whom.

A pattern is a predicate on positions, `sees(b, h, q, k, scene)`: may query position q of sequence b see key position k
in head h? It is elementwise arithmetic with no Python branch on the data, so one body serves a dense mask, a
FlexAttention block mask and a gathered block. Patterns combine with `&`, `|`, `~` and `ByHead`; they print as text that
`attention/parse.py` reads back. Whether a pattern looks ahead, how dense it is and which blocks are live are computed from the
predicate, never declared.

Sources: attention over a key set S_i (W), sparse patterns of Child et al. 2019 and local ones of Parmar et al. 2018, both with
j <= i restored by `causal &`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from everyformer.attention.context import Context, SideInputs
from everyformer.value import Count, Size, Value, snake

MOST = 4096  # positions that are tried, all against all, to see whether a pattern looks ahead

Index = Any  # tensors, in the algebra of indices
Predicate = Callable[[Index, Index, Index, Index], Any]


class Pattern:
    """Who sees whom. A new pattern inherits from Pattern and Value and defines `sees`."""

    __slots__ = ()
    needs: ClassVar[str | None] = None  # the field of the scene it reads, when it depends on data
    stable: ClassVar[bool] = True  # do later positions leave alone who sees whom among the earlier ones?

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        """Whether the query at position q attends to the key at position k, in head h of sequence b."""
        raise NotImplementedError

    def bind(self, side: SideInputs) -> Predicate:
        """The predicate, with the side inputs of one call for the patterns that read them."""
        return self.allows

    def __and__(self, other: Pattern) -> Pattern:
        return And(_parts(And, self) + _parts(And, other))

    def __or__(self, other: Pattern) -> Pattern:
        return Or(_parts(Or, self) + _parts(Or, other))

    def __invert__(self) -> Pattern:
        return self.part if isinstance(self, Not) else Not(self)

    def __str__(self) -> str:
        fields = [getattr(self, name) for name in self.__struct_fields__]  # type: ignore[attr-defined]
        for usual in reversed(self.__struct_defaults__):  # type: ignore[attr-defined]
            if fields[-1] != usual:
                break
            fields.pop()
        name = snake(type(self).__name__)
        return f"{name}({', '.join(map(str, fields))})" if fields else name

    def children(self) -> tuple[Pattern, ...]:
        return ()

    def bound(self) -> Pattern:
        """The least pattern that sees all that this one may see, whatever the data."""
        return Full() if self.needs else self

    def walk(self) -> Iterator[Pattern]:
        yield self
        for child in self.children():
            yield from child.walk()

    def mask(self, queries: int, keys: int | None = None, heads: int = 1, context: Context | None = None) -> Tensor:
        """Booleans H, Q, K (of the first sequence), the queries being the last of the keys."""
        keys = queries if keys is None else keys
        context = context or Context.of(queries, keys, torch.device("cpu"))
        seen = context.mask(self, 1, heads)
        return seen[0].expand(heads, queries, keys)

    def attends_to_future(self, length: int | None = None, heads: int = 1) -> bool:
        """Does a query see a key after it, among the first `length` positions, or see others because of what comes later?

        Data-dependent parts count as all that they may see. Without a length, what `causal` holds back is sure; else enough
        positions are tried for every number in the pattern to have had its effect twice. Where those are too many, or the
        pattern is not of this file and may have numbers in its code, only `causal` is believed.
        """
        if not all(part.stable for part in self.walk()):
            return True
        most = self.bound()
        numbers = most.numbers()
        shares = [len(part.patterns) for part in most.walk() if isinstance(part, ByHead)]
        if length is None:
            length = 64 + 2 * sum(numbers) + math.lcm(*(number for number in numbers if number))
            ours = all(type(part).__module__ == __name__ for part in most.walk())
            if _held_back(most) or length > MOST or not ours:
                return not _held_back(most)
        return _attends_to_future(most, length, max(heads, math.lcm(*shares)))

    def numbers(self) -> list[int]:
        """The whole numbers written in the pattern: window sizes, strides, block sizes, the last node of a graph."""
        fields = [getattr(part, name) for part in self.walk() for name in part.__struct_fields__]  # type: ignore[attr-defined]
        last = [max(map(max, part.edges)) for part in self.walk() if isinstance(part, Graph) and part.edges]
        return [field for field in fields if isinstance(field, int)] + last

    def density(self, length: int, heads: int = 1) -> float:
        """The share of the Q x K pairs that are seen."""
        return sum(rows.sum().item() for rows in _rows(self, length, heads)) / (heads * length * length)

    def computed_blocks(self, length: int, size: int, heads: int = 1) -> float:
        """The share of the size x size blocks in which anything is seen."""
        live, total = 0, 0
        for rows in _rows(self, length, heads, size):
            columns = rows.any(dim=-2)
            columns = torch.nn.functional.pad(columns, (0, -length % size))
            blocks = columns.unflatten(-1, (-1, size)).any(dim=-1)
            live, total = live + int(blocks.sum()), total + blocks.numel()
        return live / total


class BoundPattern(Pattern):
    """A pattern whose predicate is made by `bind`, because it or a pattern in it may read side inputs."""

    __slots__ = ()

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return self.bind(SideInputs())(b, h, q, k)


class Full(Pattern, Value, frozen=True):
    """Everybody sees everybody."""

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (q <= k) | (q > k)


class Causal(Pattern, Value, frozen=True):
    """Nobody sees the future: j <= i."""

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return k <= q


class Window(Pattern, Value, frozen=True):
    """Neighbours: |i - j| < size. `causal & window(s)` is the last s positions, this one included."""

    size: Size

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (q - k < self.size) & (k - q < self.size)


class Block(Pattern, Value, frozen=True):
    """The same block of `size` positions: floor(i / l) = floor(j / l)."""

    size: Size

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return q // self.size == k // self.size


class Stride(Pattern, Value, frozen=True):
    """A whole number of steps away: (i - j) mod l = 0."""

    step: Size

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (q - k) % self.step == 0


class Summary(Pattern, Value, frozen=True):
    """The last `last` columns of every block of `size`, but for the very last `skip`: l - c - s <= j mod l < l - s."""

    size: Size
    last: Size
    skip: Count = 0

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.last + self.skip > self.size:
            skipped, together = (f" and skip {self.skip}", " together") if self.skip else ("", "")
            raise ValueError(
                f"summary.last is {self.last}{skipped}: a block has only {self.size} columns; give {self.size} or fewer{together}"
            )

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (k + self.skip) % self.size >= self.size - self.last


class Local(Pattern, Value, frozen=True):
    """The same block of `size` positions and the `memory` before it: floor(i / l) l - m <= j < floor(i / l) l + l.

    Parmar et al. 2018, 1-D: a query block of l positions and l_m more that come before it. W writes that a query sees all of
    them; those after it are only seen without `causal &`.
    """

    size: Size
    memory: Count

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        start = q // self.size * self.size
        return (k >= start - self.memory) & (k < start + self.size)


class Local2d(Pattern, Value, frozen=True):
    """The same rectangle of a picture, and what lies up to `up` rows above it and `side` columns to either side.

    Parmar et al. 2018, 2-D: query blocks l_q of `height` x `width`, the memory larger by h_m = `up` and w_m = `side`. Positions
    count the picture, `columns` wide, in block-raster order (see `cell`). In that order `causal &` hides what of the memory is
    not there yet: all to the right of the block, and later positions in it.
    """

    columns: Size
    height: Size
    width: Size
    up: Count
    side: Count

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if self.columns % self.width:
            raise ValueError(
                f"local2d.width is {self.width}: {self.columns} columns do not divide into such blocks; give a divisor"
            )

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        first = q - q % (self.height * self.width)  # of the query's block: its upper left corner
        (top, left), (y, x) = (cell(p, self.columns, self.height, self.width) for p in (first, k))
        rows = (y >= top - self.up) & (y < top + self.height)
        return rows & (x >= left - self.side) & (x < left + self.width + self.side)


class Prefix(Pattern, Value, frozen=True):
    """The first `length` positions are seen by all."""

    length: Count

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return k < self.length


class Graph(BoundPattern, Value, frozen=True):
    """Along edges: i sees j if (i, j) is an edge. With no edges of its own it reads those given to the model's call.

    An edge (i, j) says that i sees j and nothing more: give (j, i) and (i, i) too where they are meant.
    """

    edges: tuple[tuple[Count, Count], ...] | None = None
    needs: ClassVar[str | None] = "edges_BNN"

    def bound(self) -> Pattern:
        return Full() if self.edges is None else self

    def bind(self, side: SideInputs) -> Predicate:
        if self.edges is None and side.edges is None:
            raise ValueError(
                "the pattern graph has no edges: give graph(((0, 1), ...)) or call the model with side_inputs=SideInputs(edges=...)"
            )

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            table_BNN = _adjacency(self, q.device) if side.edges is None or self.edges is not None else side.edges
            last = table_BNN.shape[-1] - 1
            inside = (q >= 0) & (k >= 0) & (q <= last) & (k <= last)
            return inside & table_BNN[b % table_BNN.shape[0], q.clamp(0, last), k.clamp(0, last)]

        return allows


class SameDocument(BoundPattern, Value, frozen=True):
    """The same document, for several packed into one sequence. Reads the `documents` given to the model's call."""

    needs: ClassVar[str | None] = "document_BP"

    def bind(self, side: SideInputs) -> Predicate:
        table_BP = side.documents
        if table_BP is None:
            raise ValueError(
                "the pattern same_document has no documents: call the model with side_inputs=SideInputs(documents=...), one id per token"
            )

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            row = b % table_BP.shape[0]
            return table_BP[row, q.clamp(min=0)] == table_BP[row, k.clamp(min=0)]

        return allows


class Hashed(BoundPattern, Value, frozen=True):
    """Keys like the query's own: in each round, the last `window` keys before it that fell into its bucket (Reformer).

    Looks back only, and what comes later changes nothing. A query hashes as the key of its own position, and sees itself
    only where no round shows it another. See attention/hashing.py.
    """

    rounds: Size
    buckets: Size
    window: Size
    needs: ClassVar[str | None] = "place_BHRP"

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _even(self.buckets, "hashed")

    def bound(self) -> Pattern:
        return Causal()

    def bind(self, side: SideInputs) -> Predicate:
        table_BHRP = _hashes(side)

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            at = _lookup(table_BHRP, b, h)
            allowed = (q == k) & (at(self.rounds, q) == 1)  # no round has another key
            for number in range(self.rounds):
                back = at(number, q) - at(number, k)
                allowed = allowed | ((back > 0) & (back <= self.window))
            return allowed

        return allows


class Chunked(BoundPattern, Value, frozen=True):
    """Reformer's attention as published: positions sorted by bucket are cut into chunks; a query sees its own and the last.

    Where the cuts fall depends on all positions: later ones change who sees whom among the earlier, although `both_sides`
    False shows none of them. So a language model is refused it unless it `leaks` knowingly; `hashed` does not.
    """

    rounds: Size
    buckets: Size
    chunk: Size
    bidirectional: bool = False
    leaks: bool = False
    needs: ClassVar[str | None] = "place_BHRP"
    stable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _even(self.buckets, "chunked")

    def bound(self) -> Pattern:
        return Full() if self.bidirectional else Causal()

    def bind(self, side: SideInputs) -> Predicate:
        table_BHRP = _hashes(side)

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            at = _lookup(table_BHRP, b, h)
            allowed = q != q
            for number in range(self.rounds):
                chunk, previous = at(number, q), at(self.rounds + number, q)
                for row in {number, (number - 1) % self.rounds}:
                    allowed = allowed | (at(row, k) == chunk) | (at(row, k) == previous)
            allowed = allowed & (q != k) if self.bidirectional else allowed & (k < q)
            return allowed | ((q == k) & (at(2 * self.rounds, q) == 1))

        return allows


class Visible(Pattern, Value, frozen=True):
    """Not padding and not an empty memory slot. Always implied where a scene has any; here to be named and shown."""

    needs: ClassVar[str | None] = "key_BK"

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (k >= 0) & ((q <= k) | (q > k))


class ByHead(BoundPattern, Value, frozen=True):
    """Head h follows patterns[h mod n]."""

    patterns: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.patterns:
            raise ValueError("by_head has no patterns: give one for each head, or fewer to be dealt out in turn")

    def __str__(self) -> str:
        return f"by_head({', '.join(map(str, self.patterns))})"

    def children(self) -> tuple[Pattern, ...]:
        return self.patterns

    def bound(self) -> Pattern:
        return ByHead(tuple(part.bound() for part in self.patterns))

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
    """All of them."""

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _some(self.parts)

    def __str__(self) -> str:
        return " & ".join(f"({part})" if isinstance(part, Or) else str(part) for part in self.parts)

    def children(self) -> tuple[Pattern, ...]:
        return self.parts

    def bound(self) -> Pattern:
        return And(tuple(part.bound() for part in self.parts))

    def bind(self, side: SideInputs) -> Predicate:
        predicates = [part.bind(side) for part in self.parts]

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            allowed = predicates[0](b, h, q, k)
            for predicate in predicates[1:]:
                allowed = allowed & predicate(b, h, q, k)
            return allowed

        return allows


class Or(BoundPattern, Value, frozen=True):
    """Any of them."""

    parts: tuple[Pattern, ...]

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _some(self.parts)

    def __str__(self) -> str:
        return " | ".join(map(str, self.parts))

    def children(self) -> tuple[Pattern, ...]:
        return self.parts

    def bound(self) -> Pattern:
        return Or(tuple(part.bound() for part in self.parts))

    def bind(self, side: SideInputs) -> Predicate:
        predicates = [part.bind(side) for part in self.parts]

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            allowed = predicates[0](b, h, q, k)
            for predicate in predicates[1:]:
                allowed = allowed | predicate(b, h, q, k)
            return allowed

        return allows


class Not(BoundPattern, Value, frozen=True):
    """The others."""

    part: Pattern

    def __str__(self) -> str:
        return f"~({self.part})" if isinstance(self.part, And | Or) else f"~{self.part}"

    def children(self) -> tuple[Pattern, ...]:
        return (self.part,)

    def bound(self) -> Pattern:
        return self if self.part.bound() == self.part else Full()

    def bind(self, side: SideInputs) -> Predicate:
        predicate = self.part.bind(side)
        return lambda b, h, q, k: ~predicate(b, h, q, k)


def strided(stride: int) -> tuple[Pattern, Pattern]:
    """Child et al. 2019: the last l positions, and every l-th one before; for data with a period (images, sound)."""
    return Causal() & Window(stride), Causal() & Stride(stride)


def fixed(stride: int, columns: int, skip: int = 0) -> tuple[Pattern, Pattern]:
    """Child et al. 2019: the same block of l positions, and the last c columns of every block; for text. With several heads each
    is to have other columns: so many of the last are skipped."""
    return Causal() & Block(stride), Causal() & Summary(stride, columns, skip)


def cell(p: Index, columns: int, height: int, width: int) -> tuple[Index, Index]:
    """Row and column of position p where a picture is cut into blocks of `height` x `width`, `width` dividing its `columns`.

    Block-raster order: block after block, from left to right and then downwards, and inside a block row after row. Blocks of one
    whole row make it raster order.
    """
    block, inside, across = p // (height * width), p % (height * width), columns // width
    return block // across * height + inside // width, block % across * width + inside % width


def max_distance(pattern: Pattern) -> int | None:
    """A distance beyond which nobody sees anybody, or None where the pattern sets no end."""
    if isinstance(pattern, Window | Block):
        return pattern.size - 1
    if isinstance(pattern, Local):
        return pattern.size - 1 + pattern.memory
    if isinstance(pattern, Local2d):  # as many whole bands of blocks as the memory has a part in
        return (1 - -pattern.up // pattern.height) * pattern.height * pattern.columns - 1
    ends = [max_distance(part) for part in pattern.children()]
    known = [end for end in ends if end is not None]
    if isinstance(pattern, And):
        return min(known, default=None)
    return max(known) if isinstance(pattern, Or | ByHead) and len(known) == len(ends) else None


def for_head(pattern: Pattern, head: int) -> Pattern:
    """The pattern as one head has it, with every ByHead resolved."""
    if isinstance(pattern, ByHead):
        return for_head(pattern.patterns[head % len(pattern.patterns)], head)
    if isinstance(pattern, And | Or):
        return type(pattern)(tuple(for_head(part, head) for part in pattern.parts))
    if isinstance(pattern, Not):
        return Not(for_head(pattern.part, head))
    return pattern


def alternatives(pattern: Pattern) -> list[Pattern]:
    """Patterns whose union this one is."""
    if isinstance(pattern, Or):
        return list(pattern.parts)
    if isinstance(pattern, And):
        for number, part in enumerate(pattern.parts):
            if isinstance(part, Or):
                rest = pattern.parts[:number] + pattern.parts[number + 1 :]
                return [And((*rest, one)) for one in part.parts]
    return [pattern]


def _even(buckets: int, name: str) -> None:
    if buckets % 2:
        raise ValueError(f"{name}.buckets is {buckets}: they are directions and their opposites; make it even")


def _hashes(side: SideInputs) -> Tensor:
    if side.hashes is None:
        raise ValueError("the patterns hashed and chunked need hashed keys: use them in a model, which hashes its keys")
    return side.hashes


def _lookup(table_BHRP: Tensor, b: Index, h: Index) -> Any:
    """A function (row, position) -> the number in that row of the table of hashes."""
    b, h, last = b % table_BHRP.shape[0], h % table_BHRP.shape[1], table_BHRP.shape[3]
    return lambda row, position: table_BHRP[b, h, row, position % last]  # padding has position -1, the last column


def _some(parts: tuple[Pattern, ...]) -> None:
    if not parts:
        raise ValueError("& and | of no patterns at all say nothing; give at least one")


def _parts(kind: type[And] | type[Or], pattern: Pattern) -> tuple[Pattern, ...]:
    if not isinstance(pattern, Pattern):
        raise ValueError(f"{pattern!r} is not a pattern; combine patterns with & | ~")
    return pattern.parts if isinstance(pattern, kind) else (pattern,)


def _rows(pattern: Pattern, length: int, heads: int, step: int | None = None) -> Iterator[Tensor]:
    """The mask H, rows, K a few rows at a time, so that long patterns are looked at in little memory."""
    step = step or max(1, 2**24 // (length * heads))
    device = torch.device("cpu")  # whatever the device of the model that is being built
    h, k = (
        torch.arange(heads, device=device).view(-1, 1, 1),
        torch.arange(length, device=device).view(1, 1, -1),
    )
    for start in range(0, length, step):
        q = torch.arange(start, min(start + step, length), device=device).view(1, -1, 1)
        yield pattern.bind(SideInputs())(torch.zeros_like(h), h, q, k).expand(heads, q.shape[1], length)


def _held_back(pattern: Pattern) -> bool:
    """Is the pattern held back by `causal` in every alternative?"""
    if isinstance(pattern, And):
        return any(_held_back(part) for part in pattern.parts)
    if isinstance(pattern, Or | ByHead):
        return all(_held_back(part) for part in pattern.children())
    return isinstance(pattern, Causal)


@lru_cache(maxsize=256)
def _attends_to_future(pattern: Pattern, length: int, heads: int) -> bool:
    start = 0
    for rows in _rows(pattern, length, heads):
        if bool(rows.triu(diagonal=start + 1).any()):
            return True
        start += rows.shape[1]
    return False


@lru_cache(maxsize=16)
def _adjacency(graph: Graph, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # what is kept must serve training too
        edges = torch.tensor(graph.edges or [(0, 0)], device=device)
        size = int(edges.max()) + 1
        table_NN = torch.zeros(size, size, dtype=torch.bool, device=device)
        if graph.edges:
            table_NN[edges[:, 0], edges[:, 1]] = True
        return table_NN[None]
