"""The past: what earlier calls leave for later ones. Immutable: it goes in, and a new one comes out.

A model called with `past=Past()` returns a past that holds the keys and values of every attention it ran; called again
with it, it sees those as if all had been one sequence. Holes (padding) keep their place and stay unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Keys:
    """The keys and values of one attention. `fixed` ones belong to another sequence (cross-attention) and do not grow."""

    k_BHKE: Tensor
    v_BHKE: Tensor
    fixed: bool = False

    def append(self, k_BHTE: Tensor, v_BHTE: Tensor) -> Keys:
        return Keys(torch.cat((self.k_BHKE, k_BHTE), dim=2), torch.cat((self.v_BHKE, v_BHTE), dim=2))


@dataclass(frozen=True)
class Past:
    """One entry for every executed attention, and where their keys stand (None: key j at position j)."""

    length: int = 0
    layers: tuple[Keys, ...] = ()
    position_BK: Tensor | None = None
    document_BK: Tensor | None = None

    def reorder(self, index_B: Tensor) -> Past:
        """The past of other sequences of the batch: for beam search, or to drop finished ones."""
        return self._each(lambda x: x.index_select(0, index_B), batch=True)

    def roll_back(self, count: int) -> Past:
        """The past without its last `count` positions."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot roll back {count} positions: the past has {self.length}; give 0 to {self.length}")
        keep = self.length - count
        return replace(self._each(lambda x: x[:, :, :keep] if x.dim() == 4 else x[:, :keep]), length=keep)

    def trim(self, length: int) -> Past:
        """The past without all but its last `length` positions. Exact where the pattern sees no further back.

        What is kept stays at its positions: a window slides over the sequence, the sequence does not move.
        """
        if length < 1:
            raise ValueError(f"cannot trim a past to {length} positions; keep at least 1")
        drop = max(0, self.length - length)
        if drop == 0:
            return self
        full = self
        if self.position_BK is None:
            device = self.layers[0].k_BHKE.device if self.layers else None
            full = replace(self, position_BK=torch.arange(self.length, device=device)[None])
        return replace(full._each(lambda x: x[:, :, drop:] if x.dim() == 4 else x[:, drop:]), length=self.length - drop)

    def _each(self, change: Callable[[Tensor], Tensor], batch: bool = False) -> Past:
        """The same past with every tensor changed; keys of another sequence only when the batch changes."""

        def table(x: Tensor | None) -> Tensor | None:
            return x if x is None or (batch and x.shape[0] == 1) else change(x)

        layers = tuple(
            keys if keys.fixed and not batch else Keys(change(keys.k_BHKE), change(keys.v_BHKE), keys.fixed)
            for keys in self.layers
        )
        return replace(self, layers=layers, position_BK=table(self.position_BK), document_BK=table(self.document_BK))
