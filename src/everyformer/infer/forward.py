"""The calls of a network during generation: they need the logits of the last token alone, and on a CPU use packed weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Probe
from everyformer.network.cache import Cache
from everyformer.network.linear_cross_entropy import LogitMap
from everyformer.network.network import Network, evaluating
from everyformer.network.packed import Packed
from everyformer.network.slots import Slots

WORTHWHILE = 32  # calls from which on packing the weights costs less than it saves


class Forward:
    """A network whose next logits are asked for again and again. `packed` None packs the weights where that is worth it."""

    def __init__(self, network: Network, head: int, calls: int, packed: bool | None = None):
        self.network, self.head = network, head
        self.wanted = packed if packed is not None else calls >= WORTHWHILE
        self.packed: Packed | None = None

    def __call__(
        self, inputs: Any, cache: Cache | None, *, last: bool = True, **options: Any
    ) -> tuple[Tensor, Cache | None]:
        """The logits B, V after the last token, or with `last` False those of all tokens B, T, V, and the cache."""
        probe = options.pop("probe", None)
        probe = Probe(records_weights=False, logits=False) if probe is None else probe
        with self.used():
            output = self.network(inputs, cache=cache, probe=probe, **options)
            return self.logits(output.logits_of(self.head), last), output.cache

    def next_logits(self, slots: Slots, token_B1: Tensor) -> Tensor:
        """The logits B, 1, V after one more token of each sequence in slots. Call it inside `used`."""
        found = slots.step(token_B1, logits=False)
        return self.logits(found[self.head] if isinstance(found, tuple) else found, last=False)

    def logits(self, found: LogitMap | Tensor, last: bool = True) -> Tensor:
        """The logits of the head, of the last token or of all."""
        if isinstance(found, Tensor):
            return found[:, -1] if last else found
        found = replace(found, hidden=found.hidden[:, -1]) if last else found
        return found.logits() if self.packed is None else self.packed.logits(found)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the block the network is in evaluation mode, without gradients, and computes with packed weights."""
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self.network.training:
                stack.enter_context(evaluating(self.network))
            if self.wanted and self.packed is None:
                self.packed = Packed(self.network)
            if self.packed is not None:
                stack.enter_context(self.packed.used())
            yield
