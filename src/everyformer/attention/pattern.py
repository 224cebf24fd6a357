"""The patterns of the papers: which query attends to which key.

`attention/algebra.py` has the protocol `Pattern` and its algebra, whose names can be imported from here too. Patterns print as text
that `attention/parse.py` reads back.

Sources: attention over a key set S_i (Weng 2020, source W), the sparse patterns of Child et al. 2019 and the local ones of Parmar
et al. 2018. The formulas of both leave out j <= i, which `causal &` adds.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from everyformer.attention.algebra import (
    And,
    BoundPattern,
    ByHead,
    Causal,
    Full,
    Index,
    Not,
    Or,
    Pattern,
    Predicate,
)
from everyformer.attention.context import SideInputs
from everyformer.value import Count, Size, Value

__all__ = [  # with the names of algebra.py
    "And",
    "Block",
    "BoundPattern",
    "ByHead",
    "Causal",
    "Chunked",
    "Full",
    "Graph",
    "Hashed",
    "Local",
    "Local2d",
    "Not",
    "Or",
    "Pattern",
    "Prefix",
    "SameDocument",
    "Stride",
    "Summary",
    "Visible",
    "Window",
    "cell",
    "fixed",
    "strided",
]


class Window(Pattern, Value, frozen=True):  # eq. W14
    """Neighbours: |i - j| < `size`. `causal & window(s)` is the last s positions, the query's own included.

    Example: `Causal() & Window(8)`.
    """

    size: Size

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (q - k < self.size) & (k - q < self.size)

    def max_distance(self) -> int:
        return self.size - 1

    def is_causal(self) -> bool:
        return self.size == 1


class Block(Pattern, Value, frozen=True):
    """The same block of `size` positions: floor(i / l) = floor(j / l). Example: `Causal() & Block(16)`."""

    size: Size

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return q // self.size == k // self.size

    def max_distance(self) -> int:
        return self.size - 1


class Stride(Pattern, Value, frozen=True):
    """Every `step`-th position, counted from the query: (i - j) mod l = 0. Example: `Causal() & (Window(8) | Stride(8))`."""

    step: Size

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (q - k) % self.step == 0

    def order(self, position: Tensor) -> Tensor:
        return position % self.step


class Summary(Pattern, Value, frozen=True):
    """The last `last` columns of every block of `size`, without the final `skip`: l - c - s <= j mod l < l - s.

    Example: `Causal() & (Block(16) | Summary(16, 2))`.
    """

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
    """The same block of `size` positions and the `previous` ones before it: floor(i / l) l - m <= j < floor(i / l) l + l.

    Parmar et al. 2018, 1-D: a query block of l positions and m = l_m more before it. Weng 2020 (source W) lets a query attend to all of
    them; with `causal &` it attends to those up to its own.
    Example: `Causal() & Local(size=16, previous=16)`.
    """

    size: Size
    previous: Count

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        start = q // self.size * self.size
        return (k >= start - self.previous) & (k < start + self.size)

    def max_distance(self) -> int:
        return self.size - 1 + self.previous


class Local2d(Pattern, Value, frozen=True):
    """The same rectangle of an image, `up` rows above it and `side` columns to its left and right.

    Parmar et al. 2018, 2-D: query blocks l_q of `height` x `width`, extended by h_m = `up` and w_m = `side`. Positions number an
    image of `columns` columns in block-raster order (see `cell`). In that order `causal &` removes everything to the right of the
    block and the later positions inside it.
    Example: `Causal() & Local2d(columns=28, height=4, width=4, up=4, side=4)`.
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
        first = q - q % (self.height * self.width)  # the upper left corner of the query's block
        (top, left), (y, x) = (cell(p, self.columns, self.height, self.width) for p in (first, k))
        rows = (y >= top - self.up) & (y < top + self.height)
        return rows & (x >= left - self.side) & (x < left + self.width + self.side)

    def max_distance(self) -> int:
        bands = 1 - -self.up // self.height  # rows of blocks that the rectangle touches, its own included
        return bands * self.height * self.columns - 1


class Prefix(BoundPattern, Value, frozen=True):
    """Every query attends to the first `length` positions; without a length to those that the side input `prefix` of the call states.

    `causal | prefix` is the pattern of a prefix language model (Raffel et al. 2019): full within the prefix, causal after it.
    Example: `Causal() & (Window(8) | Prefix(2))`.
    """

    length: Count | None = None

    @property
    def needs(self) -> str | None:  # type: ignore[override]
        """The side input that it reads, or None."""
        return "prefix" if self.length is None else None

    def bind(self, side: SideInputs) -> Predicate:
        length, table_B = self.length, side.prefix
        if length is not None:
            return lambda b, h, q, k: k < length
        if table_B is None:
            raise ValueError(
                "the pattern prefix has no length: call the model with side_inputs=SideInputs(prefix=...), one number per sequence, or "
                "write prefix(8)"
            )
        return lambda b, h, q, k: k < table_B[b % table_B.shape[0]]


class Graph(BoundPattern, Value, frozen=True):
    """Edges: i attends to j if (i, j) is an edge. Without `edges` the pattern reads the side input `edges` of the call.

    An edge (i, j) lets i attend to j only: give (j, i) and (i, i) too if they are meant.
    Example: `Graph(((0, 1), (1, 0)))`.
    """

    edges: tuple[tuple[Count, Count], ...] | None = None
    needs: ClassVar[str | None] = "edges"

    def superset(self) -> Pattern:
        return Full() if self.edges is None else self

    def is_causal(self) -> bool:
        return self.edges is not None and all(j <= i for i, j in self.edges)

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
    """The same document, for several documents packed into one sequence. Reads the side input `documents` of the call.

    Example: `Causal() & SameDocument()`.
    """

    needs: ClassVar[str | None] = "documents"

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
    """Similar keys: in each of `rounds`, the last `window` earlier keys in the query's bucket, of `buckets` (Kitaev et al. 2020).

    It is causal, and later tokens change nothing. A query has the bucket of the key at its position, and attends to itself only
    if no round has another key for it. See attention/hashing.py.
    Example: `Hashed(rounds=2, buckets=8, window=16)`.
    """

    rounds: Size
    buckets: Size
    window: Size
    needs: ClassVar[str | None] = "hashes"

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        _check_even(self.buckets, "hashed")

    def superset(self) -> Pattern:
        return Causal()

    def bind(self, side: SideInputs) -> Predicate:
        table_BHRP = _hashes(side)

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            at = hash_lookup(table_BHRP, b, h)
            allowed = (q == k) & (at(self.rounds, q) == 1)  # no round has another key
            for number in range(self.rounds):
                back = at(number, q) - at(number, k)
                allowed = allowed | ((back > 0) & (back <= self.window))  # eq. W26
            return allowed

        return allows


class Chunked(BoundPattern, Value, frozen=True):
    """Reformer's attention as published: in each of `rounds`, positions sorted by bucket are cut into pieces of `chunk`, and a query
    attends to its own and the one before. Later tokens move their borders, so even if not `bidirectional` they change which earlier
    keys a query attends to: language models are refused unless `leaks` is True. Several numbers of `buckets` are multiplied.
    Example: `Chunked(rounds=2, buckets=8, chunk=16)`.
    """

    rounds: Size
    buckets: Size | tuple[Size, ...]
    chunk: Size
    bidirectional: bool = False
    leaks: bool = False
    needs: ClassVar[str | None] = "hashes"
    stable: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Value.__post_init__(self)
        if not self.factors:
            raise ValueError("chunked.buckets has no numbers; give at least one, such as 8")
        for size in self.factors:
            _check_even(size, "chunked")

    @property
    def factors(self) -> tuple[int, ...]:
        """The numbers of buckets whose product there are."""
        return self.buckets if isinstance(self.buckets, tuple) else (self.buckets,)

    def superset(self) -> Pattern:
        return Full() if self.bidirectional else Causal()

    def bind(self, side: SideInputs) -> Predicate:
        table_BHRP = _hashes(side)

        def allows(b: Index, h: Index, q: Index, k: Index) -> Any:
            at = hash_lookup(table_BHRP, b, h)
            allowed = q != q
            for number in range(self.rounds):
                chunk, previous = at(number, q), at(self.rounds + number, q)
                for row in {number, (number - 1) % self.rounds}:
                    allowed = allowed | (at(row, k) == chunk) | (at(row, k) == previous)
            allowed = allowed & (q != k) if self.bidirectional else allowed & (k < q)
            return allowed | ((q == k) & (at(2 * self.rounds, q) == 1))

        return allows


class Visible(Pattern, Value, frozen=True):
    """Keys that are neither padding nor empty memory slots. Every pattern implies it; it exists to be named and drawn.

    Example: `Causal() & Visible()`.
    """

    needs: ClassVar[str | None] = "visible"

    def allows(self, b: Index, h: Index, q: Index, k: Index) -> Any:
        return (k >= 0) & ((q <= k) | (q > k))


def strided(stride: int) -> tuple[Pattern, Pattern]:  # eq. W21
    """Child et al. 2019: the last `stride` positions, and every `stride`-th one before; for data with a period (images, sound).

    Returns the two patterns. Example: `strided(16)`.
    """
    return Causal() & Window(stride), Causal() & Stride(stride)


def fixed(stride: int, columns: int, skip: int = 0) -> tuple[Pattern, Pattern]:  # eq. W22
    """Child et al. 2019: the same block of `stride` positions, and the last `columns` of every block without the final `skip`; for text.
    Several heads can have different columns: each skips another number of the last ones. Returns the two patterns.
    Example: `fixed(16, 4)`.
    """
    return Causal() & Block(stride), Causal() & Summary(stride, columns, skip)


def cell(p: Index, columns: int, height: int, width: int) -> tuple[Index, Index]:
    """Returns row and column of position p in an image that is split into blocks of `height` x `width`; `width` divides `columns`.

    Block-raster order: the blocks go from left to right and then downwards, and inside a block the positions go row by row. With
    blocks of one whole row this is raster order.
    """
    block, inside, across = p // (height * width), p % (height * width), columns // width
    return block // across * height + inside // width, block % across * width + inside % width


def _check_even(buckets: int, name: str) -> None:
    if buckets % 2:
        raise ValueError(
            f"{name}.buckets is {buckets}: half of them are the opposite directions of the others; give an even number"
        )


def _hashes(side: SideInputs) -> Tensor:
    if side.hashes is None:
        raise ValueError("the patterns hashed and chunked need hashed keys: use them in a model, which hashes its keys")
    return side.hashes


def hash_lookup(table_BHRP: Tensor, b: Index, h: Index) -> Any:
    """Returns a function (row, position) -> the entry in that row of the table of hashes."""
    b, h, last = b % table_BHRP.shape[0], h % table_BHRP.shape[1], table_BHRP.shape[3]
    return lambda row, position: table_BHRP[b, h, row, position % last]  # padding has position -1, the last column


@lru_cache(maxsize=16)
def _adjacency(graph: Graph, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the cached table must serve training too
        edges = torch.tensor(graph.edges or [(0, 0)], device=device)
        size = int(edges.max()) + 1
        table_NN = torch.zeros(size, size, dtype=torch.bool, device=device)
        if graph.edges:
            table_NN[edges[:, 0], edges[:, 1]] = True
        return table_NN[None]
