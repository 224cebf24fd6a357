"""A cache of fixed size for decoding: keys and values stand in slots, and a new token changes no shape.

    slots = Slots.of(network, output.cache, 1024)      # from the cache of the prompt
    logits = slots.step(token_B1)                      # one token for each sequence; may be recorded as a CUDA graph

Each sequence writes its next keys into its next slot, and a table holds the position of every slot, -1 for an empty one. Attention
reads positions, not indices, so the order of the slots is free: where no layer attends farther back than the number of slots, the
next slot is the oldest, and the cost of a token stays constant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Call, Context, Positions, SideInputs
from everyformer.network.cache import Cache, Entry, KVCache, RecurrentState
from everyformer.network.network import EncoderOutput, Network


@dataclass(frozen=True)
class SlotKV(KVCache):
    """The keys and values of one attention, in slots. `append` writes into them."""

    at: tuple[Tensor, slice, Tensor] | None = None  # row, heads and slot of the next token of each sequence

    def append(self, new: KVCache) -> KVCache:
        assert self.at is not None
        for buffer, x in zip(self.tensors, new.tensors, strict=True):
            buffer[self.at] = x[:, :, 0].to(buffer.dtype)
        return self


@dataclass
class Slots:
    """The state of decoding. `step` changes it in place."""

    network: Network
    entries: list[Entry]
    position_BS: Tensor  # of each slot, -1 if it is empty
    next_B1: Tensor  # the position of the next token
    slot_B: Tensor
    encoder_output: EncoderOutput | None = None
    kernel: str = "auto"

    @property
    def capacity(self) -> int:
        return self.position_BS.shape[1]

    @staticmethod
    def of(network: Network, cache: Cache, capacity: int, **options: Any) -> Slots:
        """The slots of a cache. If it holds more positions than there are slots, the last ones are kept."""
        if cache.batch is None:
            raise ValueError("the cache is empty; call the network on the prompts first")
        device = next(network.parameters()).device
        position_BK = (
            torch.arange(cache.length, device=device)[None] if cache.position_BK is None else cache.position_BK
        )
        position_BK = position_BK.expand(cache.batch, -1)
        keep = min(capacity, cache.length)
        # In the order of their positions, empty ones first: the last ones are kept, and the next slot follows them.
        order_BK = position_BK.argsort(dim=1, stable=True)[:, cache.length - keep :]
        position_BS = position_BK.new_full((cache.batch, capacity), -1)
        position_BS[:, :keep] = position_BK.gather(1, order_BK)
        slot_B = torch.full((cache.batch,), keep % capacity, dtype=torch.long, device=device)

        def in_slots(x_BHKE: Tensor) -> Tensor:
            buffer = x_BHKE.new_zeros(*x_BHKE.shape[:2], capacity, x_BHKE.shape[3])
            index = order_BK[:, None, :, None].expand(*x_BHKE.shape[:2], -1, x_BHKE.shape[3])
            buffer[:, :, :keep] = x_BHKE.gather(2, index)
            return buffer

        entries: list[Entry] = []
        at = (torch.arange(cache.batch, device=device), slice(None), slot_B)
        for entry in cache.entries:
            if isinstance(entry, KVCache):
                entries.append(SlotKV(tuple(map(in_slots, entry.tensors)), at))
            elif isinstance(entry, RecurrentState):
                entries.append(entry.map(lambda x_BMC: x_BMC[:, -1:].clone()))
            else:
                entries.append(entry)
        next_B1 = position_BK.amax(1, keepdim=True) + 1
        return Slots(network, entries, position_BS, next_B1, slot_B, **options)

    def grown(self, capacity: int) -> Slots:
        """These slots with more of them, before any was written twice."""
        cache = Cache(self.capacity, tuple(self._plain()), self.position_BS, has_padding=True)
        grown = Slots.of(self.network, cache, capacity, encoder_output=self.encoder_output, kernel=self.kernel)
        grown.next_B1 = self.next_B1
        return grown

    def step(self, inputs: Any) -> Tensor:
        """The logits of every output head after one more token of each sequence; changes the state."""
        network = self.network
        x_BTD = network.embed(inputs)
        self.position_BS.scatter_(1, self.slot_B[:, None], self.next_B1)
        positions = Positions(1, self.capacity, x_BTD.device, self.next_B1, self.position_BS)
        context = Context(positions, SideInputs(), Call(self.kernel))
        context = replace(context, encoder=network.encoder_context(self.encoder_output, x_BTD, context))
        x_BTD = network.add_positions(x_BTD, context)
        x_BTD, new = network.body(x_BTD, context, self.entries)
        for entry, after in zip(self.entries, new or (), strict=True):
            if isinstance(entry, RecurrentState):
                entry.tensors[0].copy_(after.tensors[0][:, -1:])
        self.next_B1 += 1
        self.slot_B.copy_((self.slot_B + 1) % self.capacity)
        return network.predict(x_BTD)

    def state(self) -> list[Tensor]:
        """The tensors that a step changes, besides keys and values."""
        recurrent = [x for entry in self.entries if isinstance(entry, RecurrentState) for x in entry.tensors]
        return [self.position_BS, self.next_B1, self.slot_B, *recurrent]

    def _plain(self) -> list[Entry]:
        return [KVCache(entry.tensors) if isinstance(entry, SlotKV) else entry for entry in self.entries]
