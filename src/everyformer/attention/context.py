"""The context of one forward pass: the positions of queries and keys, side inputs by position, and the options of the call.

`Positions` has the positions of queries and keys, `SideInputs` has what patterns and score modifications look up by position, and
`Call` has the options of the call and what its layers share. A `Context` has all three, for one sublayer.

The queries are the last Q of the K positions. This covers the cache and the segment memory. Padding and empty memory slots have
position -1 and no query attends to them, so their number changes nothing. Positions count visible tokens only, so a sequence has
the same positions on whichever side its padding is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from everyformer.attention.has_data import can_read, is_exporting, is_transformed

if TYPE_CHECKING:
    from everyformer.attention.pattern import Pattern

T = TypeVar("T")


@dataclass
class Probe:
    """Records a forward pass: pass one to a model and read the attention weights of every layer from it.

    Each list is in the order of execution. A probed pass computes its attention with the reference kernel, because the fast
    kernels never hold the weights.

    records_weights    whether weights are recorded; with False, the fast kernels stay in use
    records_layers     whether `layers` are recorded, and `records_products` whether `products` are
    logits             with False, output heads with a vocabulary return a `LogitMap`, which is not computed yet
    weights            B, H, Q, K of each self-attention
    cross_weights      B, H, Q, S of each cross-attention
    products           B, H, Q, K of each self-attention: scale q_i . k_j
    buckets            B, H, R, K of each attention that hashes: the bucket of each key
    gates              B, T, D by name, of each gated residual; `cell_gates` of each LSTM
    state_weights      B, D, Q, K of each LSTM: of inputs in each feature of its state
    halts              B, T, N of each halting depth or sublayer: the weight of each step
    spans              B, H, Q of each attention with adaptive spans
    layers             B, T, D of every layer but the last
    Example: `network(token_BT, probe=Probe())`.
    """

    records_weights: bool = True
    records_layers: bool = False
    records_products: bool = False
    logits: bool = True
    weights: list[Tensor] = field(default_factory=list)
    cross_weights: list[Tensor] = field(default_factory=list)
    products: list[Tensor] = field(default_factory=list)
    buckets: list[Tensor] = field(default_factory=list)
    gates: list[dict[str, Tensor]] = field(default_factory=list)
    cell_gates: list[dict[str, Tensor]] = field(default_factory=list)
    state_weights: list[Tensor] = field(default_factory=list)
    halts: list[Tensor] = field(default_factory=list)
    spans: list[Tensor] = field(default_factory=list)
    layers: list[Tensor] = field(default_factory=list)


class Call:
    """The options of one call, and what its layers share: memoized tensors and auxiliary losses.

    Not a dataclass, because FSDP2 copies those, with the lists that the layers fill, for each layer.
    """

    def __init__(
        self,
        kernel: str = "auto",
        probe: Probe | None = None,
        losses: list[tuple[str, Tensor]] | None = None,
        layer_outputs: list[Tensor] | None = None,
    ):
        self.kernel, self.probe = kernel, probe
        self.losses = [] if losses is None else losses  # auxiliary losses by name, in the order of execution
        self.layer_outputs = layer_outputs  # a list to be filled with the output of every layer, or None
        self.memo: dict[Any, Any] = {}  # see `Context.memo`

    def without_memo(self) -> Call:
        return Call(self.kernel, self.probe, self.losses, self.layer_outputs)

    @staticmethod
    def of(kernel: str, probe: Probe | None) -> Call:
        """A call that records what the probe asks for. Only a probe that records weights rules out the fast kernels."""
        if not isinstance(probe, Probe | None):
            raise ValueError(f"probe is a {type(probe).__name__}: give a Probe(), which records the pass")
        weights = probe if probe is not None and probe.records_weights else None
        return Call(kernel, weights, layer_outputs=[] if probe is not None and probe.records_layers else None)


@dataclass(frozen=True)
class Positions:
    """The positions of queries and keys. With None, key j has position j and query i has position K - Q + i."""

    queries: int
    keys: int
    device: torch.device
    query_BQ: Tensor | None = None
    key_BK: Tensor | None = None

    @property
    def in_order(self) -> bool:
        """Whether nothing is padded, shifted or dropped, so that positions are indices, known without reading data."""
        return self.query_BQ is None and self.key_BK is None

    def query_at(self, b: Tensor, i: Tensor) -> Tensor:
        """The position of the query with index i."""
        if self.query_BQ is not None:
            return self.query_BQ[b % self.query_BQ.shape[0], i]
        return self.key_at(b, i + (self.keys - self.queries))

    def key_at(self, b: Tensor, j: Tensor) -> Tensor:
        """The position of the key with index j."""
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

    def table_size(self) -> int:
        """The number of columns of a table by position: at least one more than the last position."""
        # Inside vmap, and while a graph is recorded, positions cannot be read. They are below the number of keys there.
        if self.key_BK is None or is_exporting():
            return self.keys
        if not (torch.compiler.is_compiling() or can_read(self.key_BK)):
            return self.keys
        return int(self.key_BK.max()) + 1

    def visible_BQ(self) -> Tensor | None:
        """Which queries are not padding, or None if none is."""
        return None if self.in_order else self.query_positions() >= 0

    def indices(self, batch: int, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The indices b, h, i, j, shaped so that arithmetic on them broadcasts to B, H, Q, K."""
        sizes = (batch, heads, self.queries, self.keys)
        b, h, i, j = (
            torch.arange(size, device=self.device).view([-1 if axis == number else 1 for axis in range(4)])
            for number, size in enumerate(sizes)
        )
        return b, h, i, j

    def crop(self, distance: int) -> Positions:
        """The positions without the first keys that are farther than the distance from every query."""
        count = self._too_far(distance)
        return self if count == 0 else replace(self, keys=self.keys - count, key_BK=self.key_positions()[:, count:])

    def _too_far(self, distance: int) -> int:
        """The number of leading keys that are too far away for every query; never a query itself."""
        before = self.keys - self.queries
        if self.in_order:
            return max(0, before - distance)
        if self.query_BQ is not None or self.key_BK is None or (is_transformed() and not can_read(self.key_BK)):
            return 0
        query_BQ = self.key_BK[:, before:]
        nearest_B1 = torch.where(query_BQ >= 0, query_BQ, query_BQ.max()).amin(1, keepdim=True)
        hidden_BM = self.key_BK[:, :before] < (nearest_B1 - distance).clamp(min=0)
        return int(hidden_BM.all(0).long().cumprod(0).sum())


@dataclass(frozen=True)
class SideInputs:
    """Inputs of a call besides the tokens, by position. All of them are optional.

    documents      B, P whole numbers: the document of each position, for the pattern `same_document`
    edges          N, N or B, N, N booleans: True where i attends to j, for the pattern `graph`
    segments       B, T whole numbers: the segment of each token (BERT's sentences A and B)
    hashes         B, H, rows, P: the bucket ranks of the keys, for `hashed` and `chunked`; computed by the attention
    prefix         B whole numbers: how many of the first positions are the prefix, for the pattern `prefix` without a length
    replacement    a `Replacement`, with which the model's generator first replaces masked tokens (network/generator.py)
    query_inputs   B, Q, D: the vectors from which queries are projected, for score modifications that read them
    tokens         B, T: the tokens of the call, for sublayers that read them; the network sets them
    embedded       B, T, D: the input of the stack, for layers with a shortcut; the stack sets it
    Example: `build("bert", "tiny")(token_BT, side_inputs=SideInputs(segments=segment_BT))`.
    """

    documents: Tensor | None = None
    edges: Tensor | None = None
    segments: Tensor | None = None
    hashes: Tensor | None = None
    query_inputs: Tensor | None = None
    prefix: Tensor | None = None
    replacement: Any = None
    tokens: Tensor | None = None
    embedded: Tensor | None = None


@dataclass(frozen=True)
class EncoderContext:
    """The encoder's output as cross-attention reads it, with the positions of its keys."""

    x_BSD: Tensor
    context: Context


@dataclass(frozen=True)
class Context:
    """What a sublayer reads besides its input and its cache entry. Example: `Context.of(queries=8, keys=8)`.

    positions      of the queries and keys
    side           the side inputs of the call
    call           its options, and what its layers share
    encoder        the encoder output, for cross-attention
    max_distance   no query of this attention attends to a key farther away. None: not known
    """

    positions: Positions
    side: SideInputs
    call: Call = field(compare=False, repr=False)
    encoder: EncoderContext | None = None
    max_distance: int | None = None

    @staticmethod
    def of(
        queries: int,
        keys: int,
        device: torch.device | str = "cpu",
        *,
        query_BQ: Tensor | None = None,
        key_BK: Tensor | None = None,
        kernel: str = "auto",
        probe: Probe | None = None,
        **side: Tensor | None,
    ) -> Context:
        """The context of one attention by itself; `side` are the fields of `SideInputs`."""
        positions = Positions(queries, keys, torch.device(device), query_BQ, key_BK)
        return Context(positions, SideInputs(**side), Call(kernel, probe))

    def within(self, distance: int) -> int:
        """The distance, or a smaller one if no query attends to a key that far away."""
        if is_exporting():  # the number of keys is open
            return distance
        if self.max_distance is not None:
            distance = min(distance, self.max_distance)
        return min(distance, self.positions.keys - 1) if self.positions.in_order else distance

    def crop(self, distance: int) -> Context:
        """The context without the first keys that are farther than the distance from every query."""
        positions = self.memo(("crop", distance), lambda: self.positions.crop(distance))
        return self if positions is self.positions else replace(self, positions=positions)

    def of_last_keys(self, count: int) -> Context:
        """The context of the last `count` keys, where a cache holds no others."""
        here, first = self.positions, self.positions.keys - count
        if first == 0:
            return self

        def make() -> Positions:
            return replace(here, keys=count, key_BK=here.key_positions()[:, first:])

        return replace(self, positions=self.memo(("last_keys", count), make))

    def of_new_keys(self) -> Context:
        """The context in which the keys are those of the positions of the queries, which a cache is about to take up."""

        def make() -> Positions:
            here = self.positions
            return replace(here, keys=here.queries, query_BQ=None, key_BK=here.query_positions())

        return replace(self, positions=self.memo(("new_keys",), make))

    def with_hashes(self, hashes: Tensor) -> Context:
        """The context of one attention that hashes its keys. Masks depend on the hashes, so it has a memo of its own."""
        return replace(self, side=replace(self.side, hashes=hashes), call=self.call.without_memo())

    def mask(self, pattern: Pattern, batch: int, heads: int) -> Tensor:
        """The pattern as booleans that broadcast to B, H, Q, K. Computed once for each pattern of a call."""

        def make() -> tuple[Pattern, Tensor]:
            b, h, i, j = self.positions.indices(batch, heads)
            q, k = self.positions.query_at(b, i), self.positions.key_at(b, j)
            allowed = pattern.bind(self.side)(b, h, q, k)
            return pattern, allowed if self.positions.key_BK is None else allowed & (k >= 0)

        # The pattern is kept beside its mask, so that no other object gets its id.
        return self.memo(("mask", id(pattern), batch, heads), make)[1]

    def memo(self, key: tuple[Hashable, ...], make: Callable[[], T]) -> T:
        """Returns what `make` returns, computed once for all attentions of a call that have these positions."""
        # The positions are kept beside the result, so that no other object gets their id.
        key = (id(self.positions), *key)
        if is_exporting():  # the sizes in it are symbols, which have no hash
            key = (repr(key),)
        if key not in self.call.memo:
            self.call.memo[key] = (make(), self.positions)
        memoized: T = self.call.memo[key][0]
        return memoized
