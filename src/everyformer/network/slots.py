"""A cache of fixed size for decoding: keys and values stand in slots, and a new token changes no shape.

    slots = Slots.of(network, output.cache, 1024)      # from the cache of the prompt
    logits = slots.step(token_B1)                      # one token for each sequence; may be recorded as a CUDA graph

Each sequence writes its next keys into its next slot, and a table holds the position of every slot, -1 for an empty one. Attention
reads positions, not indices, so the order of the slots is free: where no layer attends farther back than the number of slots, the
next slot is the oldest, and the cost of a token stays constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Call, Context, Positions, SideInputs
from everyformer.network.cache import NO_POSITION, Cache, Entry, KVCache, RecurrentState
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
    """The state of decoding: one row for each sequence. `step` changes it in place."""

    network: Network
    entries: list[Entry]
    position_BS: Tensor  # of each slot, -1 if it is empty
    next_B1: Tensor  # the position of the next token
    slot_B: Tensor  # of the next token
    ring: int  # the number of slots after which the first is used again
    encoder_output: EncoderOutput | None = None
    kernel: str = "auto"

    @property
    def rows(self) -> int:
        return self.position_BS.shape[0]

    @property
    def capacity(self) -> int:
        return self.position_BS.shape[1]

    @staticmethod
    def of(network: Network, cache: Cache, capacity: int, *, rows: int | None = None, **options: Any) -> Slots:
        """The slots of a cache, for its sequences and as many more as `rows` has beyond them.

        If the cache holds more positions than there are slots, the last ones are kept.
        """
        if cache.batch is None:
            raise ValueError("the cache is empty; call the network on the prompts first")
        rows, device = rows or cache.batch, next(network.parameters()).device
        position_BS, next_B1 = (
            torch.full((rows, capacity), -1, device=device),
            torch.zeros(rows, 1, device=device).long(),
        )
        slot_B = torch.zeros(rows, dtype=torch.long, device=device)
        entries = [_empty(entry, rows, capacity) for entry in cache.entries]
        slots = Slots(network, entries, position_BS, next_B1, slot_B, capacity, **options)
        slots.put(range(cache.batch), cache)
        return slots

    def put(self, rows: Sequence[int], cache: Cache) -> None:
        """Writes the sequences of a cache into these rows; what was there is forgotten."""
        index = torch.tensor(list(rows), device=self.slot_B.device)
        position_BK = cache.position_BK
        if position_BK is None:
            position_BK = torch.arange(cache.length, device=index.device)[None]
        position_BK = position_BK.expand(len(index), -1)
        keep = min(self.capacity, cache.length)
        # In the order of their positions, the empty ones last. Of those with a token the last ones are kept.
        order_BK = position_BK.masked_fill(position_BK < 0, NO_POSITION).argsort(dim=1, stable=True)
        start_B1 = ((position_BK >= 0).sum(1, keepdim=True) - keep).clamp(min=0)
        last_BK = order_BK.gather(1, start_B1 + torch.arange(keep, device=index.device))
        self.position_BS[index] = -1
        self.position_BS[index, :keep] = position_BK.gather(1, last_BK)
        self.slot_B[index] = (self.position_BS[index] >= 0).sum(1) % self.ring
        self.next_B1[index] = position_BK.amax(1, keepdim=True) + 1
        for entry, new in zip(self.entries, cache.entries, strict=True):
            for buffer, x in zip(entry.tensors, new.tensors, strict=True):
                if isinstance(entry, SlotKV):
                    at_BHKE = last_BK[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
                    buffer[index] = 0
                    buffer[index, :, :keep] = x.gather(2, at_BHKE).to(buffer.dtype)
                elif isinstance(entry, RecurrentState):
                    buffer[index] = x[:, -1:].to(buffer.dtype)

    def move(self, source: int, target: int) -> None:
        """Moves the sequence of one row into another one."""
        for x in (*self.state(), *(x for entry in self.entries if isinstance(entry, SlotKV) for x in entry.tensors)):
            x[target] = x[source]

    def grown(self, capacity: int, rows: int | None = None) -> Slots:
        """These slots with more of them, before any was written twice, and with more rows."""
        rows = rows or self.rows
        cache = Cache(self.capacity, tuple(self._plain()), self.position_BS, has_padding=True)
        options = {"encoder_output": self.encoder_output, "kernel": self.kernel}
        grown = Slots.of(self.network, cache, capacity, rows=rows, **options)
        grown.next_B1[: self.rows] = self.next_B1
        return grown

    def view(self, rows: int, capacity: int) -> Slots:
        """The first rows and slots, in the same memory. A step of the view writes into these slots too."""
        entries: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, SlotKV):
                entries.append(SlotKV(tuple(x[:rows, :, :capacity] for x in entry.tensors)))
            else:
                entries.append(entry.map(lambda x: x[:rows]) if isinstance(entry, RecurrentState) else entry)
        here = (self.position_BS[:rows, :capacity], self.next_B1[:rows], self.slot_B[:rows])
        return Slots(self.network, entries, *here, self.ring, self.encoder_output, self.kernel)

    def step(self, inputs: Any, logits: bool = True) -> Any:
        """The logits of every output head after one more token of each sequence; changes the state.

        With `logits` False a `LogitMap` where a head has one.
        """
        network = self.network
        at = (torch.arange(self.rows, device=self.slot_B.device), slice(None), self.slot_B)
        entries = [SlotKV(entry.tensors, at=at) if isinstance(entry, SlotKV) else entry for entry in self.entries]
        x_BTD = network.embed(inputs)
        self.position_BS.scatter_(1, self.slot_B[:, None], self.next_B1)
        positions = Positions(1, self.capacity, x_BTD.device, self.next_B1, self.position_BS)
        # A token after the prompt attends to every earlier one, so no prefix adds to that.
        prefix_B = torch.zeros_like(self.slot_B) if "prefix" in network.reads else None
        context = Context(positions, SideInputs(prefix=prefix_B), Call(self.kernel))
        context = replace(context, encoder=network.encoder_context(self.encoder_output, x_BTD, context))
        x_BTD = network.add_positions(x_BTD, context)
        x_BTD, new = network.body(x_BTD, context, entries)
        for entry, after in zip(self.entries, new or (), strict=True):
            if isinstance(entry, RecurrentState):
                entry.tensors[0].copy_(after.tensors[0][:, -1:])
        self.next_B1 += 1
        self.slot_B.copy_((self.slot_B + 1) % self.ring)
        return network.predict(x_BTD, logits=logits)

    def state(self) -> list[Tensor]:
        """The tensors that a step changes, besides keys and values."""
        recurrent = [x for entry in self.entries if isinstance(entry, RecurrentState) for x in entry.tensors]
        return [self.position_BS, self.next_B1, self.slot_B, *recurrent]

    def _plain(self) -> list[Entry]:
        return [KVCache(entry.tensors) if isinstance(entry, SlotKV) else entry for entry in self.entries]


def _empty(entry: Entry, rows: int, capacity: int) -> Entry:
    """An entry of the same kind for these rows; that of an encoder output as it is, because nothing is added to it."""
    if isinstance(entry, KVCache):
        return SlotKV(tuple(x.new_zeros(rows, x.shape[1], capacity, x.shape[3]) for x in entry.tensors))
    return entry.map(lambda x: x.new_zeros(rows, 1, x.shape[2])) if isinstance(entry, RecurrentState) else entry
