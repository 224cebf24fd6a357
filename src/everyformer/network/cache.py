"""The past: what earlier calls leave for later ones. Immutable: it goes in, and a new one comes out.

A model called with `past=Past()` returns a past that holds the keys and values of every attention it ran; called again
with it, it sees those as if all had been one sequence. Holes (padding) keep their place and stay unseen.

`Past(hidden=True)` holds what entered each layer instead, with the gradient stopped: the segment memory of Transformer-XL
(Dai et al. 2019), h~_{tau+1}^{n-1} = [SG(h_tau^{n-1}); h_{tau+1}^{n-1}], from which keys and values are computed in each call.
While the weights stand still that is the same as the keys at more cost; in training it is how they learn from the past.
Recurrent layers leave what they knew after each position, in both kinds of past: the last of it is all they need, the
others are there to roll back to. While a network is training only the last of each call is left.
Departures: W's text takes the memory from the same layer; the paper's formula, and this, from the one below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from everyformer.network.embed import describe

FAR = 1 << 62  # no position


@dataclass(frozen=True)
class KVCache:
    """The keys and values of one attention. `fixed` ones belong to another sequence (cross-attention) and do not grow.

    Where keys are hashed, the bucket of each comes with them, so that it is found only once.
    """

    k_BHKE: Tensor
    v_BHKE: Tensor
    fixed: bool = False
    bucket_BHKR: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        found = (self.k_BHKE, self.v_BHKE)
        return found if self.bucket_BHKR is None else (*found, self.bucket_BHKR)

    def each(self, change: Callable[[Tensor], Tensor]) -> KVCache:
        k, v, *bucket = map(change, self.tensors)
        return KVCache(k, v, self.fixed, *bucket)

    def append(self, new: KVCache) -> KVCache:
        shapes = [[(*x.shape[:2], x.shape[3]) for x in keys.tensors] for keys in (self, new)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the past has keys or values of the shape {tuple(self.k_BHKE.shape)}, the new ones {tuple(new.k_BHKE.shape)} "
                "(batch, heads, positions, head width), or hashed otherwise: it is of another model; begin with Past()"
            )
        k, v, *bucket = (torch.cat(pair, dim=2) for pair in zip(self.tensors, new.tensors, strict=True))
        return KVCache(k, v, False, *bucket)


@dataclass(frozen=True)
class LayerInputs:
    """What entered one sublayer, before its norm. A segment memory learns nothing through it."""

    x_BMD: Tensor
    fixed = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x_BMD,)

    def each(self, change: Callable[[Tensor], Tensor]) -> LayerInputs:
        return LayerInputs(change(self.x_BMD))

    def append(self, x_BTD: Tensor) -> LayerInputs:
        if self.x_BMD.shape[::2] != x_BTD.shape[::2]:
            raise ValueError(
                f"the past has layers' inputs of the shape {tuple(self.x_BMD.shape)}, the new ones {tuple(x_BTD.shape)} (batch, "
                "positions, width): it is of another model; begin with Past()"
            )
        return LayerInputs(torch.cat((self.x_BMD, x_BTD), dim=1))


@dataclass(frozen=True)
class RecurrentState:
    """What a recurrent layer knew after each of the last positions. The last of them holds all that came before."""

    x_BMD: Tensor
    fixed = False

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.x_BMD,)

    def each(self, change: Callable[[Tensor], Tensor]) -> RecurrentState:
        return RecurrentState(change(self.x_BMD))


Entry = KVCache | LayerInputs | RecurrentState


@dataclass(frozen=True)
class Cache:
    """One entry for every executed sublayer that looks at others, and where their keys stand (None: key j at j)."""

    length: int = 0
    layers: tuple[Entry, ...] = ()
    position_BK: Tensor | None = None
    document_BK: Tensor | None = None
    hidden: bool = False  # hold what entered the layers, not their keys
    holes: bool = False  # may some of it be padding?

    @property
    def batch(self) -> int | None:
        """How many sequences it is of, or None while it is empty."""
        return self.layers[0].tensors[0].shape[0] if self.layers else None

    def reorder(self, index_B: Tensor) -> Cache:
        """The past of other sequences of the batch: for beam search, or to drop finished ones."""
        if not isinstance(index_B, Tensor):
            raise ValueError(f"reorder takes a tensor of whole numbers, not a {type(index_B).__name__}")
        if index_B.dim() != 1 or index_B.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"reorder takes a list of whole numbers, not {index_B.dtype} of {tuple(index_B.shape)}")
        if len(index_B) == 0:
            raise ValueError("reorder by nothing leaves no sequence; when the last has ended, stop")
        if self.batch and not 0 <= int(index_B.min()) <= int(index_B.max()) < self.batch:
            raise ValueError(
                f"cannot reorder by {index_B.tolist()}: the past has {self.batch} sequences; give 0 to {self.batch - 1}"
            )
        return self._each(lambda x: x.index_select(0, index_B), batch=True)

    def reset(self, row_B: Tensor) -> Cache:
        """The past in which the marked sequences of the batch begin anew; the others go on.

        What was theirs is 0 and stands at position -1, an empty slot that nobody sees. Within one call, `documents` and the
        pattern same_document keep what follows a boundary from seeing what was before it.
        """
        fits = isinstance(row_B, Tensor) and row_B.dtype == torch.bool and row_B.dim() == 1
        if not fits or self.batch not in (None, len(row_B)):
            raise ValueError(
                f"reset takes booleans, one for each of the {self.batch or 0} sequences of the past, not {describe(row_B)}"
            )
        if any(one.fixed for one in self.layers):
            raise ValueError("this past has the keys of a source, which a reset cannot change; begin with Past()")
        if bool(row_B.all()):
            return Cache(hidden=self.hidden)
        if not self.layers or not bool(row_B.any()):
            return self
        position_BK = self.position_BK
        if position_BK is None:
            position_BK = torch.arange(self.length, device=row_B.device)[None]
        position_BK = torch.where(row_B[:, None], -1, position_BK)
        layers = tuple(
            one.each(lambda x: x.masked_fill(row_B.view(-1, *[1] * (x.dim() - 1)), 0)) for one in self.layers
        )
        return replace(self, layers=layers, position_BK=position_BK, holes=True)

    def roll_back(self, count: int) -> Cache:
        """The past without its last `count` positions."""
        if not 0 <= count <= self.length:
            raise ValueError(f"cannot roll back {count} positions: the past has {self.length}; give 0 to {self.length}")
        keep, kept = self.length - count, [one.x_BMD.shape[1] for one in self.layers if isinstance(one, RecurrentState)]
        if count and kept and min(kept) < self.length and count >= min(kept):
            raise ValueError(
                f"cannot roll back {count} positions: what a recurrent layer knew before the last {min(kept)} is gone, because "
                "in training only the end of each call is kept; call eval() first"
            )
        if keep == 0 and self.position_BK is not None:
            first_B = self.position_BK.masked_fill(self.position_BK < 0, FAR).min(1).values  # FAR: it has only holes
            if bool(((first_B > 0) & (first_B < FAR)).any()):
                raise ValueError(
                    "cannot roll back all of a past that does not begin at position 0, because it was trimmed or initialized "
                    "elsewhere: nothing would say where the next token stands; keep at least 1"
                )
        return replace(self._each(lambda x: x.narrow(axis := _time(x), 0, x.shape[axis] - count)), length=keep)

    def trim(self, length: int) -> Cache:
        """The past without all but its last `length` positions. Exact where the pattern sees no further back.

        What is kept stays at its positions: a window slides over the sequence, the sequence does not move. Where there
        are holes, as much is kept as the sequence with the most of them needs.
        """
        if length < 1:
            raise ValueError(f"cannot trim a past to {length} positions; keep at least 1")
        drop = max(0, self.length - length)
        if drop and self.holes and self.position_BK is not None:
            seen_BK = self.position_BK >= 0
            left_BK = seen_BK.sum(1, keepdim=True) - seen_BK.cumsum(1)  # how many are left after this one
            drop = int(((left_BK >= length) | (seen_BK.cumsum(1) == 0)).sum(1).min())
        if drop == 0:
            return self
        full = self
        if self.position_BK is None:
            device = self.layers[0].tensors[0].device if self.layers else None
            full = replace(self, position_BK=torch.arange(self.length, device=device)[None])
        left = self.length - drop
        return replace(
            full._each(lambda x: x.narrow(axis := _time(x), max(0, x.shape[axis] - left), min(left, x.shape[axis]))),
            length=left,
        )

    def tensors(self) -> dict[str, Tensor]:
        """A segment memory as tensors with a row for each sequence, to be saved; `from_tensors` reads them."""
        assert self.hidden and self.document_BK is None and self.batch is not None
        kinds = ["state" if isinstance(entry, RecurrentState) else "layer" for entry in self.layers]
        found = {
            f"{kind}.{number}": entry.tensors[0]
            for number, (kind, entry) in enumerate(zip(kinds, self.layers, strict=True))
        }
        if self.position_BK is None:
            return found
        return found | {"holes" if self.holes else "position": self.position_BK.expand(self.batch, -1)}

    @staticmethod
    def from_tensors(found: Mapping[str, Tensor]) -> Cache:
        layers: list[Entry] = []
        while (number := len(layers)) < sum("." in name for name in found):
            state = found.get(f"state.{number}")
            layers.append(LayerInputs(found[f"layer.{number}"]) if state is None else RecurrentState(state))
        position_BK = (
            found["position"][:1] if "position" in found else found.get("holes")
        )  # one row for all, as it was made
        length = layers[0].tensors[0].shape[1] if position_BK is None else position_BK.shape[1]
        return Cache(length, tuple(layers), position_BK, hidden=True, holes="holes" in found)

    def _each(self, change: Callable[[Tensor], Tensor], batch: bool = False) -> Cache:
        """The same past with every tensor changed; keys of another sequence only when the batch changes."""

        def table(x: Tensor | None) -> Tensor | None:
            shared = batch and x is not None and x.shape[0] == 1 != self.batch  # one row for all sequences
            return x if x is None or shared else change(x)

        layers = tuple(one if one.fixed and not batch else one.each(change) for one in self.layers)
        return replace(self, layers=layers, position_BK=table(self.position_BK), document_BK=table(self.document_BK))


def _time(x: Tensor) -> int:
    """The axis of positions: keys have heads before it."""
    return 2 if x.dim() == 4 else 1
