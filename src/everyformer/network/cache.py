"""The cache: what earlier calls of a network leave for later ones. It is immutable: it is passed in, and a new one is returned.

    output = network(tokens, cache=Cache())              # starts a cache
    output = network(more_tokens, cache=output.cache)    # continues: the same outputs as one call with all the tokens

A cache has one entry for every executed sublayer that needs earlier positions. What an entry holds is the sublayer's choice:

    KVCache         the keys and values of an attention
    LayerInputs     the inputs of a sublayer, before its norm (segment memory; causal convolutions)
    RecurrentState  the state of a recurrent sublayer after each position
    EncoderKV       the keys and values of the encoder output, for cross-attention

`Cache(segment_memory=True)` is the segment memory of Transformer-XL (Dai et al. 2019): attention keeps the inputs of its layer,
detached, instead of keys and values: h~_{tau+1}^{n-1} = [SG(h_tau^{n-1}); h_{tau+1}^{n-1}]. Keys and values are computed from them
in each call with the weights of that call, so the projections are trained on the memory too. While the weights do not change the
outputs equal those of a key-value cache, which is cheaper; generation and evaluation use that.

A recurrent sublayer continues from its last state; earlier states are there for `roll_back`. In training mode only the last state
of each call is kept. Padding keeps its position in the cache and no query attends to it.

Departures: the text of Weng 2020 (source W) takes the memory from the same layer. The formula of the paper, and this, take it
from the layer below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from everyformer.attention.context import Context
from everyformer.attention.has_data import can_read, is_transformed
from everyformer.network.describe import describe
from everyformer.network.room import Tail, appended
from everyformer.value import Size, Value

NO_POSITION = 1 << 62


class SegmentMemory(Value, frozen=True):
    """A model's choice to attend to the `length` positions before each segment, in training and afterwards (Dai et al. 2019).

    Example: `SegmentMemory(512)`.
    """

    length: Size


@dataclass(frozen=True)
class Growing:
    """An entry to which each call adds its positions."""

    grows: ClassVar[bool] = True
    axis: ClassVar[int] = 1  # of the positions
    tensors: tuple[Tensor, ...] = ()
    tail: Tail | None = field(default=None, compare=False, repr=False, kw_only=True)  # the free space after them

    def map(self, change: Callable[[Tensor], Tensor]) -> Self:
        return replace(self, tensors=tuple(map(change, self.tensors)), tail=None)

    def cut(self, keep: int, drop: int) -> Self:
        """Without the last `drop` positions, and of the others the last `keep`. Nothing is copied."""
        if not self.tensors:
            return self
        tail = None if self.tail is None else Tail(self.tail.room, self.tail.end - drop)
        return replace(self, tensors=tuple(_cut(x, self.axis, keep, drop) for x in self.tensors), tail=tail)

    def extended(self, new: tuple[Tensor, ...]) -> Self:
        """With new positions at the end."""
        tensors, tail = appended(self.tensors, new, self.axis, self.tail) if self.tensors else (new, None)
        return replace(self, tensors=tensors, tail=tail)


@dataclass(frozen=True)
class KVCache(Growing):
    """The keys and values of one attention. An attention that hashes its keys keeps their buckets too."""

    axis: ClassVar[int] = 2
    tensors: tuple[Tensor, ...] = ()  # keys B, H, K, E; values B, H, K, E'; buckets B, H, K, R where there are some

    @property
    def k_BHKE(self) -> Tensor:
        return self.tensors[0]

    @property
    def v_BHKE(self) -> Tensor:
        return self.tensors[1]

    @property
    def bucket_BHKR(self) -> Tensor | None:
        return self.tensors[2] if len(self.tensors) > 2 else None

    def placed(self, context: Context) -> Context:
        """The context of the keys that are here: the last ones."""
        return context.of_last_keys(self.k_BHKE.shape[2])

    def append(self, new: KVCache) -> KVCache:
        if not self.tensors:
            return new
        shapes = [[(*x.shape[:2], x.shape[3]) for x in entry.tensors] for entry in (self, new)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"the cache has keys of the shape {tuple(self.k_BHKE.shape)} (batch, heads, positions, head width), the new keys have "
                f"{tuple(new.k_BHKE.shape)}, or their values or hashes differ: it is the cache of another model; start with Cache()"
            )
        return self.extended(new.tensors)


@dataclass(frozen=True)
class EncoderKV:
    """The keys and values of an encoder output. They are computed once and do not grow."""

    grows: ClassVar[bool] = False
    tensors: tuple[Tensor, ...] = ()  # keys B, H, S, E; values B, H, S, E'
    source: Tensor | None = field(default=None, compare=False, repr=False)  # the encoder output itself, B, S, D

    def map(self, change: Callable[[Tensor], Tensor]) -> EncoderKV:
        return EncoderKV(tuple(map(change, self.tensors)), None if self.source is None else change(self.source))

    def is_of(self, x_BSD: Tensor) -> bool:
        """Whether these are the keys of this encoder output. True where the data cannot be read."""
        if self.source is None or self.source is x_BSD:
            return True
        if self.source.shape != x_BSD.shape or self.source.dtype != x_BSD.dtype:
            return False
        return not (can_read(x_BSD) and can_read(self.source)) or torch.equal(self.source, x_BSD)


@dataclass(frozen=True)
class LayerInputs(Growing):
    """The inputs of one sublayer before its norm, detached in a segment memory."""

    tensors: tuple[Tensor, ...] = ()  # B, M, D
    detached: bool = False
    normalize: Callable[[Tensor], Tensor] | None = field(default=None, compare=False, repr=False)  # the residual's norm

    def append(self, x_BTD: Tensor) -> LayerInputs:
        x_BTD = x_BTD.detach() if self.detached else x_BTD  # eq. W11
        if self.tensors and self.tensors[0].shape[::2] != x_BTD.shape[::2]:
            raise ValueError(
                f"the cache has layer inputs of the shape {tuple(self.tensors[0].shape)} (batch, positions, width), the new ones have "
                f"{tuple(x_BTD.shape)}: it is the cache of another model; start with Cache()"
            )
        return replace(self.extended((x_BTD,)), normalize=None)

    def rows(self, start: int) -> Tensor | None:
        """The inputs from the index `start` on, as the sublayer reads them: normalized. None if there are none."""
        if not self.tensors or start >= self.tensors[0].shape[1]:
            return None
        x_BMD = self.tensors[0][:, start:]
        return x_BMD if self.normalize is None else self.normalize(x_BMD)


@dataclass(frozen=True)
class RecurrentState(Growing):
    """The state of a recurrent sublayer after each of the last positions, detached in a segment memory."""

    tensors: tuple[Tensor, ...] = ()  # B, M, C
    detached: bool = False

    @property
    def last_BC(self) -> Tensor | None:
        """The state to continue from. None: the initial state."""
        return self.tensors[0][:, -1] if self.tensors and self.tensors[0].shape[1] else None

    def append(self, state_BTC: Tensor, every_position: bool) -> RecurrentState:
        """With the states of all new positions, or with the last one alone, which then replaces the earlier ones."""
        state_BTC = state_BTC.detach() if self.detached else state_BTC
        if not every_position:
            return replace(self, tensors=(state_BTC,), tail=None)
        as_new = self.tensors and self.tensors[0].dtype != state_BTC.dtype
        before = self.map(lambda x: x.to(state_BTC.dtype)) if as_new else self
        return before.extended((state_BTC,))


Entry = KVCache | LayerInputs | RecurrentState | EncoderKV


@dataclass(frozen=True)
class Cache:
    """The `entries` of `length` positions, one of every executed sublayer that keeps one. Start with `Cache()`; each output has the next.

    position_BK      the positions of what the entries hold, `document_BK` their documents. None: index j is position j, one document
    max_length       the number of positions kept. Default: the length of the model's segment memory, without the positions that no
                     sublayer can read; everything if the model has no segment memory
    segment_memory   keep detached layer inputs instead of keys and values
    has_padding      whether padding is among the tokens; the empty slots of a sequence that started anew come before them
    model            the value of the network that made it. None: not known
    forget           drop the keys that their layer cannot read any more; such a cache cannot be rolled back
    Example: `network(token_BT, cache=Cache()).cache`.
    """

    length: int = 0
    entries: tuple[Entry, ...] = ()
    position_BK: Tensor | None = None
    document_BK: Tensor | None = None
    max_length: int | None = None
    segment_memory: bool = False
    has_padding: bool = False
    model: Any = field(default=None, compare=False, repr=False)
    forget: bool = False

    def __post_init__(self) -> None:
        if not is_count(self.length):
            raise ValueError(
                f"a cache of the length {self.length!r}: start with Cache(), and continue with the last output's"
            )
        if self.max_length is not None and not is_count(self.max_length):
            raise ValueError(
                f"max_length of a cache is {self.max_length!r}; give a whole number, or None to keep everything"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"a cache of at most {self.max_length} positions holds nothing; give 1 or more, or None")

    @property
    def batch(self) -> int | None:
        """The number of sequences, or None if the cache is empty."""
        return next((x.shape[0] for entry in self.entries for x in entry.tensors), None)

    def reorder(self, index_B: Tensor) -> Cache:
        """The cache of other sequences of the batch: for beam search, or to drop finished sequences."""
        if not isinstance(index_B, Tensor):
            raise ValueError(f"reorder takes a tensor of indices, not a {type(index_B).__name__}")
        if index_B.dim() != 1 or index_B.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"reorder takes a list of indices, not {index_B.dtype} of the shape {tuple(index_B.shape)}"
            )
        if len(index_B) == 0:
            raise ValueError("reorder with no index leaves no sequence; stop when the last sequence has ended")
        if self.batch and not 0 <= int(index_B.min()) <= int(index_B.max()) < self.batch:
            raise ValueError(
                f"cannot reorder by {index_B.tolist()}: the cache has {self.batch} sequences; give 0 to {self.batch - 1}"
            )
        if can_read(index_B) and index_B.tolist() == list(range(self.batch or 0)):
            return self  # nothing moves, so nothing is copied
        return self._map(lambda x: x.index_select(0, index_B))

    def reset(self, row_B: Tensor) -> Cache:
        """The cache in which the marked sequences start anew. The others continue.

        The marked rows are set to 0 and to position -1, so that no query attends to them. For a boundary within one call use
        side inputs `documents` and the pattern `same_document`.
        """
        fits = isinstance(row_B, Tensor) and row_B.dtype == torch.bool and row_B.dim() == 1
        if not fits or self.batch not in (None, len(row_B)):
            raise ValueError(
                f"reset takes booleans, one for each of the {self.batch or 0} sequences of the cache, not {describe(row_B)}"
            )
        if any(not entry.grows for entry in self.entries):
            raise ValueError(
                "this cache has the keys of an encoder output, which a reset cannot change; start with Cache()"
            )
        if bool(row_B.all()):
            return Cache(max_length=self.max_length, segment_memory=self.segment_memory, forget=self.forget)
        if self.batch is None or not bool(row_B.any()):
            return self
        position_BK = self.position_BK
        if position_BK is None:
            position_BK = torch.arange(self.length, device=row_B.device)[None]
        position_BK = torch.where(row_B[:, None], -1, position_BK)
        entries = tuple(
            entry.map(lambda x: x.masked_fill(row_B.view(-1, *[1] * (x.dim() - 1)), 0)) for entry in self.entries
        )
        return replace(self, entries=entries, position_BK=position_BK)

    def roll_back(self, count: int) -> Cache:
        """The cache without its last `count` positions."""
        if not is_count(count) or not 0 <= count <= self.length:
            raise ValueError(
                f"cannot roll back {count!r} positions: the cache has {self.length}; give 0 to {self.length}"
            )
        if count and self.forget:
            reason = "Cache(forget=True) drops the keys that they read; start with Cache()"
            raise ValueError(f"cannot roll back {count} positions: {reason}")
        keep = self.length - count
        states = [x.shape[1] for entry in self.entries if isinstance(entry, RecurrentState) for x in entry.tensors]
        if count and states and min(states) < self.length and count >= min(states):
            raise ValueError(
                f"cannot roll back {count} positions: a recurrent state is kept for the last {min(states)} only, because in training "
                "mode a call keeps its last state alone; call network.eval() first"
            )
        if keep == 0 and self.position_BK is not None:
            first_B = self.position_BK.masked_fill(self.position_BK < 0, NO_POSITION).min(1).values
            if bool(((first_B > 0) & (first_B < NO_POSITION)).any()):
                raise ValueError(
                    "cannot roll back all of a cache that does not start at position 0, because it was trimmed or started at an "
                    "offset: the position of the next token would be lost; keep at least 1"
                )
        return self._cut(keep, count)

    def trim(self, length: int) -> Cache:
        """The cache with its last `length` positions only. Exact if no pattern of the model attends farther back.

        Positions do not change: a window slides over the sequence. Every sequence keeps its last `length` tokens, however many
        the padding of the others leaves room for: of the rest, the slots that all sequences can spare are dropped, and no query
        attends to the others.
        """
        if not is_count(length) or length < 1:
            raise ValueError(f"cannot trim a cache to {length!r} positions; keep at least 1, a whole number")
        if self.length <= length:
            return self
        full = self
        if self.position_BK is None:
            device = next((x.device for entry in self.entries for x in entry.tensors), None)
            full = replace(self, position_BK=torch.arange(self.length, device=device)[None])
        elif self.has_padding:
            full = replace(self, position_BK=self.position_BK.masked_fill(self._later() >= length, -1))
        return full._cut(self.length - self._spare(length), 0)

    def without_far_keys(self, distances: Sequence[int | None]) -> Cache:
        """The cache in which the keys of each entry reach back over a distance only (None: to the start)."""
        keep = {distance: self.length - self._spare(max(1, distance)) for distance in distances if distance is not None}
        entries = tuple(
            entry.cut(keep[distance], 0) if isinstance(entry, KVCache) and distance is not None else entry
            for entry, distance in zip(self.entries, distances, strict=True)
        )
        return replace(self, entries=entries)

    def _later(self) -> Tensor:
        """The number of tokens after each position."""
        assert self.position_BK is not None
        visible_BK = self.position_BK >= 0
        return visible_BK.sum(1, keepdim=True) - visible_BK.cumsum(1)

    def _spare(self, length: int) -> int:
        """How many of the first positions are not among the last `length` tokens of any sequence."""
        if self.length <= length or not self.has_padding:
            return max(0, self.length - length)
        assert self.position_BK is not None
        drop_B = ((self._later() >= length) | ((self.position_BK >= 0).cumsum(1) == 0)).sum(1)
        return 0 if is_transformed() and not can_read(drop_B) else int(drop_B.min())

    def state_dict(self) -> dict[str, Tensor]:
        """A segment memory as tensors with one row per sequence, to be saved. `from_state_dict` reads them."""
        assert self.segment_memory and self.document_BK is None and self.batch is not None
        names = {LayerInputs: "inputs", RecurrentState: "state"}
        found = {f"{names[type(entry)]}.{i}": entry.tensors[0] for i, entry in enumerate(self.entries)}
        position_BK = self.position_BK
        if position_BK is None:
            lengths = [x.shape[1] for x in found.values()]
            if max(lengths) == self.length:
                return found
            # In training mode a recurrent net keeps one state, which does not show how many positions were before it.
            position_BK = torch.arange(self.length, device=next(iter(found.values())).device)[None]
        return found | {"padded_position" if self.has_padding else "position": position_BK.expand(self.batch, -1)}

    @staticmethod
    def from_state_dict(found: Mapping[str, Tensor], max_length: int | None = None) -> Cache:
        """The segment memory that `state_dict` wrote."""
        kept: tuple[Entry, ...] = tuple(
            LayerInputs((found[f"inputs.{i}"],), True)
            if f"inputs.{i}" in found
            else RecurrentState((found[f"state.{i}"],), True)
            for i in range(sum("." in name for name in found))
        )
        position_BK = found.get("position", found.get("padded_position"))
        length = (
            max(x.shape[1] for entry in kept for x in entry.tensors) if position_BK is None else position_BK.shape[1]
        )
        return Cache(length, kept, position_BK, None, max_length, True, "padded_position" in found)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Cache:
        """The cache with every tensor changed, by a change of the batch."""

        def table(x: Tensor | None) -> Tensor | None:
            return x if x is None or x.shape[0] == 1 != self.batch else change(x)  # one row for all sequences

        entries = tuple(entry.map(change) for entry in self.entries)
        return replace(self, entries=entries, position_BK=table(self.position_BK), document_BK=table(self.document_BK))

    def _cut(self, keep: int, drop: int) -> Cache:
        """The cache without its last `drop` positions, and of the others the last `keep`."""

        def table(x_BK: Tensor | None) -> Tensor | None:
            end = self.length - drop
            return None if x_BK is None else x_BK.narrow(1, end - keep, keep)

        def cut(entry: Entry) -> Entry:
            if isinstance(entry, Growing):
                return entry.cut(keep, drop)
            # An entry of your own has the positions on the axis after the batch, or after the heads.
            return entry.map(lambda x: _cut(x, 2 if x.dim() == 4 else 1, keep, drop)) if entry.grows else entry

        entries = tuple(map(cut, self.entries))
        tables: dict[str, Any] = {"position_BK": table(self.position_BK), "document_BK": table(self.document_BK)}
        return replace(self, length=keep, entries=entries, **tables)


def is_count(x: Any) -> bool:
    """Whether this is a whole number; a symbolic one of torch.compile too, but no boolean."""
    return isinstance(x, int | torch.SymInt) and not isinstance(x, bool)


def _cut(x: Tensor, axis: int, keep: int, drop: int) -> Tensor:
    end = x.shape[axis] - drop
    start = max(0, end - keep)
    return x.narrow(axis, start, end - start)
