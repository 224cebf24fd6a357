"""What networks return."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from everyformer.network.cache import Cache
from everyformer.network.generator import Replaced
from everyformer.network.inputs import check_visible


@dataclass(frozen=True)
class Output:
    """What a network returns. Example: `isinstance(network(token_BT), Output)`.

    hidden     B, T, D: the output of the last layer
    logits     of the output head, or a tuple if there are several
    cache      the cache for the next call, if the call had one
    aux        auxiliary losses by name, to be added to the loss
    replaced   what a generator replaced
    """

    hidden: Tensor
    logits: Any = None
    cache: Cache | None = None
    aux: dict[str, Tensor] = field(default_factory=dict)
    replaced: Replaced | None = None

    def logits_of(self, index: int) -> Any:
        """The logits of one of the output heads."""
        return self.logits[index] if isinstance(self.logits, tuple) else self.logits


@dataclass(frozen=True)
class EncoderOutput:
    """An encoded source sequence, to which cross-attention attends. Example: `pair.decode(token_BT, EncoderOutput(x_BSD))`.

    `x_BSD` has a vector for each position, `visible_BS` is False at padding (None: there is none), and `aux` holds auxiliary
    losses of the encoder by name.
    """

    x_BSD: Tensor
    visible_BS: Tensor | None = None
    aux: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.x_BSD.dim() != 3:
            raise ValueError(f"an encoder output has the shape batch, time, width, not {tuple(self.x_BSD.shape)}")
        check_visible(self.visible_BS, self.x_BSD.shape[0], self.x_BSD.shape[1])

    def of_rows(self, index_B: Tensor) -> EncoderOutput:
        """The output of other sequences of the batch, as `Cache.reorder` takes them."""
        visible_BS = None if self.visible_BS is None else self.visible_BS[index_B]
        return EncoderOutput(self.x_BSD[index_B], visible_BS)
