"""The scene of one forward pass: where its queries and keys stand, and what is known of each position.

The queries are the last Q of the K positions; that one sentence covers the cache and the memory. Padding and empty
memory slots stand at position -1 and are seen by nobody, so how many there are changes nothing. Positions are counted
over what is visible, so a sequence has the same positions wherever its padding lies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from everyformer.attention.pattern import Pattern

T = TypeVar("T")


@dataclass
class Probe:
    """Watches a forward pass: give one to a model and read the attention weights of every layer from it.

    A pass that is watched computes its attention by the reference kernel, because the fast ones never hold weights.
    """

    weights: list[Tensor] = field(default_factory=list)  # BHQK of each attention, in the order of execution
    halts: list[Tensor] = field(
        default_factory=list
    )  # BTN of each halting depth or layer: what each step weighs in the output
    spans: list[Tensor] = field(default_factory=list)  # BHQ of each attention that has them: how far a query looks


@dataclass(frozen=True)
class Context:
    """What one attention knows besides q, k and v. `None` positions mean: key j stands at j, query i at K - Q + i."""

    queries: int
    keys: int
    device: torch.device
    query_BQ: Tensor | None = None
    key_BK: Tensor | None = None
    document_BP: Tensor | None = None  # the document of each position, for SameDocument
    edges_BNN: Tensor | None = None  # who is joined to whom, for Graph without edges of its own
    place_BHRP: Tensor | None = None  # where each position stands by its hash, in rows, for Hashed and Chunked
    kernel: str = "auto"
    probe: Probe | None = None
    hidden: bool = False  # the past keeps what enters a layer, not its keys
    x_BQD: Tensor | None = None  # what the queries are made of, for rules that read it
    max_distance: int | None = None  # no query sees a key further away than this, as far as that is known
    layers: list[Tensor] | None = field(
        default=None, compare=False, repr=False
    )  # where asked for, what leaves each layer
    costs: list[tuple[str, Tensor]] = field(
        default_factory=list, compare=False, repr=False
    )  # what layers and rules add to the loss, by name
    made: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)  # see `once`
    shorter: dict[int, Context] = field(
        default_factory=dict, compare=False, repr=False
    )  # by distance, without what is further

    @property
    def in_place(self) -> bool:
        """Nothing is padded, moved or dropped: positions are plain index arithmetic, known without a look at data."""
        return self.query_BQ is None and self.key_BK is None

    def query_at(self, b: Tensor, i: Tensor) -> Tensor:
        """The position of query number i."""
        if self.query_BQ is not None:
            return self.query_BQ[b % self.query_BQ.shape[0], i]
        return self.key_at(b, i + (self.keys - self.queries))

    def key_at(self, b: Tensor, j: Tensor) -> Tensor:
        """The position of key number j."""
        return j if self.key_BK is None else self.key_BK[b % self.key_BK.shape[0], j]

    def query_positions(self) -> Tensor:
        """B or 1, Q."""
        if self.query_BQ is not None:
            return self.query_BQ
        if self.key_BK is None:
            return torch.arange(self.keys - self.queries, self.keys, device=self.device)[None]
        return self.key_BK[:, self.keys - self.queries :]

    def key_positions(self) -> Tensor:
        """B or 1, K."""
        if self.key_BK is not None:
            return self.key_BK
        return torch.arange(self.keys, device=self.device)[None]

    def visible_BQ(self) -> Tensor | None:
        """Which queries are real, or None when all are."""
        return None if self.in_place else self.query_positions() >= 0

    def within(self, distance: int) -> int:
        """The distance, or less where no query sees a key so far away."""
        if self.max_distance is not None:
            distance = min(distance, self.max_distance)
        return min(distance, self.keys - 1) if self.in_place else distance

    def crop(self, distance: int) -> Context:
        """The scene without the first keys that stand further than the distance from every query; the others stay there."""
        if distance not in self.shorter:
            count = self._beyond(distance)
            if count == 0:
                return self
            key_BK = self.key_positions()[:, count:]
            self.shorter[distance] = replace(self, keys=self.keys - count, key_BK=key_BK, made={}, shorter={})
        # What is made once is kept from attention to attention, what only this one knows is not.
        return replace(self.shorter[distance], x_BQD=self.x_BQD, max_distance=self.max_distance)

    def _beyond(self, distance: int) -> int:
        """How many of the first keys are too far away for every query; never a query itself."""
        before = self.keys - self.queries
        if self.in_place:
            return max(0, before - distance)
        if self.query_BQ is not None or self.key_BK is None:
            return 0
        query_BQ = self.key_BK[:, before:]
        nearest_B1 = torch.where(query_BQ >= 0, query_BQ, query_BQ.max()).amin(1, keepdim=True)
        unseen_BM = self.key_BK[:, :before] < (nearest_B1 - distance).clamp(min=0)
        return int(unseen_BM.all(0).long().cumprod(0).sum())

    def indices(self, batch: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """b, h, i, j, shaped so that arithmetic on them broadcasts to B, H, Q, K."""
        sizes = (batch, heads, self.queries, self.keys)
        b, h, i, j = (
            torch.arange(size, device=self.device).view([-1 if axis == place else 1 for axis in range(4)])
            for place, size in enumerate(sizes)
        )
        return b, h, i, j

    def mask(self, pattern: Pattern, batch: int, heads: int) -> Tensor:
        """Who sees whom as booleans that broadcast to B, H, Q, K. Computed once per scene and pattern."""

        def make() -> tuple[Pattern, Tensor]:
            b, h, i, j = self.indices(batch, heads)
            q, k = self.query_at(b, i), self.key_at(b, j)
            seen = pattern.allows(b, h, q, k, self)
            return pattern, seen if self.key_BK is None else seen & (k >= 0)

        # The pattern is kept beside its mask, so its id stays its own.
        return self.once(("mask", id(pattern), batch, heads), make)[1]

    def once(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """What is the same in every attention of a pass, made by the first that asks."""
        if key not in self.made:
            self.made[key] = make()
        found: T = self.made[key]
        return found
