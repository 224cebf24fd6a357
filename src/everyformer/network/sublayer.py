"""Sublayers: what a layer is made of.

A sublayer is a value that builds a module

    (x_BTD, context, entry) -> (y_BTD, entry)

x is the sublayer's input, `context` holds positions, side inputs and the options of the call, and `entry` is what the sublayer
keeps in the cache: the one it returned in the last call, `new_entry()` in the first, None if nothing is to be kept. Attention,
cross-attention, feed-forward nets, convolutions and recurrent nets are sublayers, and so is a class of your own that inherits
from `Sublayer` and `Value`. The residual wraps any sublayer, and Stack, Repeat and Halt repeat any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import ClassVar

from torch import Tensor, nn

from everyformer.attention.context import Context
from everyformer.attention.pattern import Pattern
from everyformer.network.cache import Entry

Execution = Callable[[Tensor], tuple[Tensor, Entry | None]]


class Sublayer:
    """A value that builds a `SublayerModule`, and says what a model must know of it. The defaults describe a pointwise net.

    Example: `class Mean(Sublayer, Value, frozen=True)`.
    """

    __slots__ = ()
    carries: ClassVar[str | None] = (
        None  # what it keeps in a cache, in words: "key-value cache", "recurrent state", ...
    )

    def build(self, width: int) -> SublayerModule:
        """Returns the module for a model of this width."""
        raise NotImplementedError

    def mixes_positions(self) -> bool:
        """Whether the output at a position depends on other positions of the sequence."""
        return False

    def attends_to_future(self) -> bool:
        """Whether the output at a position depends on later positions."""
        return False

    def patterns(self) -> tuple[Pattern, ...]:
        """The patterns of self-attention."""
        return ()

    def reads(self) -> set[str]:
        """The inputs of a call that it reads: "documents", "edges", "encoder_output", "tokens"."""
        return set()

    def whole_sequence_reason(self, before: int, batch: int, context: Context) -> str | None:
        """Why one of the first `before` positions depends on a later one in this context, if `attends_to_future`."""
        return f"the outputs of {type(self).__name__} depend on later positions"

    def position_limit(self) -> int | None:
        """The number of positions it can handle, or None if any."""
        return None

    def illegal_reasons(self, width: int) -> Iterator[str]:
        """The reasons why it cannot be built at this width, each with a remedy."""
        yield from ()


class SublayerModule(nn.Module):
    """A module (x, context, entry) -> (y, entry). Only `forward` has to be defined, and `new_entry` if it keeps something.

    Example: `class MeanModule(SublayerModule)`.
    """

    pointwise: ClassVar[bool] = (
        False  # whether the output at a position depends on this position alone (and the encoder output)
    )
    updates: ClassVar[bool] = False  # whether `update` is defined
    gathers: bool = False  # whether `gather` is defined too

    def forward(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> tuple[Tensor, Entry | None]:
        """Returns the output B, T, D, and the cache entry with these positions (None: nothing is kept)."""
        raise NotImplementedError

    def execution(self, context: Context, entry: Entry | None) -> Execution:
        """One execution as a function of the input alone. A reversible stack calls it a second time in the backward pass."""
        return lambda x_BTD: self(x_BTD, context, entry)

    def new_entry(self, segment_memory: bool = False) -> Entry | None:
        """The entry of an empty cache, or None if the sublayer keeps nothing."""
        return None

    def max_distance(self) -> int | None:
        """How many positions back its entry must reach with the weights as they are. None: to the start."""
        return 0

    def output_map(self) -> nn.Linear | None:
        """The linear map that ends the residual branch, which some initializations scale by the depth."""
        return None

    def update(self, x_BTD: Tensor, context: Context, entry: Entry | None) -> Entry:
        """The entry after these positions, without computing their outputs."""
        raise NotImplementedError

    def gather(self, x_BQD: Tensor, context: Context, entry: Entry) -> Tensor:
        """The outputs at some positions, given the entry that `update` returned for all of them."""
        raise NotImplementedError
