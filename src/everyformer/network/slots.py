"""A cache of fixed size for decoding: keys and values stand in slots, and a new token changes no shape.

    slots = Slots.of(network, output.cache, 1024)      # from the cache of the prompt
    logits = slots.step(token_B1)                      # one token for each sequence; may be recorded as a CUDA graph

Each sequence writes its next keys into its next slot, and a table holds the position of every slot, -1 for an empty one. Attention
reads positions, not indices, so the order of the slots is free: a layer that attends no farther back than it has slots uses the
oldest one next, and the cost of a token stays constant there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Call, Context, Positions, SideInputs
from everyformer.network.cache import NO_POSITION, Cache, Entry, KVCache, RecurrentState
from everyformer.network.fused_step import Plan, fused_step
from everyformer.network.network import EncoderOutput, Network

MULTIPLE = 32  # slots that a CPU adds at once


def room(length: int, fewest: int, device: torch.device) -> int:
    """Returns the number of slots for sequences of this length, some of them free.

    On a GPU a power of two, because every number of slots needs a recorded step. A CPU reads the free slots too, so there are few:
    an eighth of all at most, or 32.
    """
    if device.type != "cpu":
        return max(fewest, 1 << (length - 1).bit_length())
    step = max(MULTIPLE, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


@dataclass
class Table:
    """The slots of some attentions: the position of each, -1 if it is empty, and where each sequence writes its next token.

    An attention that reaches back over a distance has no more slots than it can read, rounded up to a power of two, so that
    few tables are needed.
    """

    position_BS: Tensor
    slot_B: Tensor
    ring: int  # the number of slots after which the first is used again

    @staticmethod
    def empty(rows: int, capacity: int, device: torch.device) -> Table:
        slot_B = torch.zeros(rows, dtype=torch.long, device=device)
        return Table(torch.full((rows, capacity), -1, device=device), slot_B, capacity)

    @property
    def capacity(self) -> int:
        return self.position_BS.shape[1]

    def put(self, index: Tensor, position_BK: Tensor) -> Tensor:
        """Takes up the last positions of sequences in these rows. Returns where they stand in the table that was given."""
        keep = min(self.capacity, position_BK.shape[1])
        # In the order of their positions, the empty ones last. Of those with a token the last ones are kept.
        order_BK = position_BK.masked_fill(position_BK < 0, NO_POSITION).argsort(dim=1, stable=True)
        start_B1 = ((position_BK >= 0).sum(1, keepdim=True) - keep).clamp(min=0)
        last_BK = order_BK.gather(1, start_B1 + torch.arange(keep, device=index.device))
        self.position_BS[index] = -1
        self.position_BS[index, :keep] = position_BK.gather(1, last_BK)
        self.slot_B[index] = (self.position_BS[index] >= 0).sum(1) % self.ring
        return last_BK

    def take_over(self, other: Table) -> None:
        """Takes up the rows of another table. If that has fewer slots, none of them was written twice."""
        rows, capacity = other.position_BS.shape
        self.position_BS[:rows, :capacity] = other.position_BS
        grew = capacity < self.capacity
        self.slot_B[:rows] = (other.position_BS >= 0).sum(1) if grew else other.slot_B

    def view(self, rows: int, capacity: int) -> Table:
        return Table(self.position_BS[:rows, :capacity], self.slot_B[:rows], self.ring)


@dataclass(frozen=True)
class SlotKV(KVCache):
    """The keys and values of one attention, in slots. `append` writes into them."""

    table: int = 0
    at: tuple[Tensor, slice, Tensor] | None = None  # row, heads and slot of the next token of each sequence
    positions: Positions | None = None  # of the slots

    def append(self, new: KVCache) -> KVCache:
        assert self.at is not None
        for buffer, x in zip(self.tensors, new.tensors, strict=True):
            buffer[self.at] = x[:, :, 0].to(buffer.dtype)
        return self

    def placed(self, context: Context) -> Context:
        assert self.positions is not None
        return context if context.positions is self.positions else replace(context, positions=self.positions)


@dataclass
class Slots:
    """The state of decoding: one row for each sequence. `step` changes it in place."""

    network: Network
    entries: list[Entry]
    tables: list[Table]  # the first has the most slots
    next_B1: Tensor  # the position of the next token
    encoder_output: EncoderOutput | None = None
    kernel: str = "auto"
    fused: bool = False  # whether network/fused_step.py computes a step
    plan: Plan | None = field(default=None, init=False, repr=False)  # of the fused steps

    @property
    def rows(self) -> int:
        return self.next_B1.shape[0]

    @property
    def capacity(self) -> int:
        return self.tables[0].capacity

    @staticmethod
    def of(network: Network, cache: Cache, capacity: int, *, rows: int | None = None, **options: Any) -> Slots:
        """The slots of a cache, for its sequences and as many more as `rows` has beyond them.

        If the cache holds more positions than there are slots, the last ones are kept.
        """
        if cache.batch is None:
            raise ValueError("the cache is empty; call the network on the prompts first")
        slots = Slots._empty(network, cache.entries, capacity, rows or cache.batch, **options)
        slots.put(range(cache.batch), cache)
        return slots

    @staticmethod
    def _empty(network: Network, like: Sequence[Entry], capacity: int, rows: int, **options: Any) -> Slots:
        """Empty slots for entries of these kinds; that of an encoder output is taken as it is, because nothing is added to it."""
        device = next(network.parameters()).device
        distances = network.body.max_distances()
        sizes = [
            capacity if one is None or not isinstance(entry, KVCache) else min(capacity, 1 << one.bit_length())
            for one, entry in zip(distances, like, strict=True)
        ]
        numbers = {size: number for number, size in enumerate(sorted({capacity, *sizes}, reverse=True))}
        entries: list[Entry] = []
        for entry, size in zip(like, sizes, strict=True):
            if isinstance(entry, KVCache):
                buffers = (x.new_zeros(rows, x.shape[1], size, x.shape[3]) for x in entry.tensors)
                entries.append(SlotKV(tuple(buffers), table=numbers[size]))
            else:
                fresh = isinstance(entry, RecurrentState)
                entries.append(entry.map(lambda x: x.new_zeros(rows, 1, x.shape[2])) if fresh else entry)
        tables = [Table.empty(rows, size, device) for size in numbers]
        return Slots(network, entries, tables, torch.zeros(rows, 1, dtype=torch.long, device=device), **options)

    def put(self, rows: Sequence[int], cache: Cache) -> None:
        """Writes the sequences of a cache into these rows; what was there is forgotten."""
        index = torch.tensor(list(rows), device=self.next_B1.device)
        position_BK = cache.position_BK
        if position_BK is None:
            position_BK = torch.arange(cache.length, device=index.device)[None]
        position_BK = position_BK.expand(len(index), -1)
        self.next_B1[index] = position_BK.amax(1, keepdim=True) + 1
        lasts = [table.put(index, position_BK) for table in self.tables]
        for entry, new in zip(self.entries, cache.entries, strict=True):
            for buffer, x in zip(entry.tensors, new.tensors, strict=True):
                if isinstance(entry, SlotKV):
                    # A cache may have forgotten the first keys, which no query can attend to.
                    last_BK = (lasts[entry.table] - (cache.length - x.shape[2])).clamp(min=0)
                    at_BHKE = last_BK[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
                    buffer[index] = 0
                    buffer[index, :, : last_BK.shape[1]] = x.gather(2, at_BHKE).to(buffer.dtype)
                elif isinstance(entry, RecurrentState):
                    buffer[index] = x[:, -1:].to(buffer.dtype)

    def move(self, source: int, target: int) -> None:
        """Moves the sequence of one row into another one."""
        for x in (*self.state(), *(x for entry in self.entries if isinstance(entry, SlotKV) for x in entry.tensors)):
            x[target] = x[source]

    def grown(self, capacity: int, rows: int | None = None) -> Slots:
        """These slots with more of them, before any of the first table was written twice, and with more rows."""
        grown = Slots._empty(self.network, self.entries, capacity, rows or self.rows, **self._options())
        grown.next_B1[: self.rows] = self.next_B1
        pairs = list(zip(grown.entries, self.entries, strict=True))
        sources = {one.table: old.table for one, old in pairs if isinstance(one, SlotKV) and isinstance(old, SlotKV)}
        for number, table in enumerate(grown.tables):
            table.take_over(self.tables[sources.get(number, 0)])
        for entry, old in pairs:
            for buffer, x in zip(entry.tensors, old.tensors, strict=True):
                if isinstance(entry, SlotKV):
                    buffer[: self.rows, :, : x.shape[2]] = x
                elif isinstance(entry, RecurrentState):
                    buffer[: self.rows] = x
        return grown

    def of_rows(self, index_B: Tensor) -> Slots:
        """The slots of some rows, copied."""
        entries: list[Entry] = [entry.map(lambda x: x[index_B]) for entry in self.entries]
        tables = [Table(one.position_BS[index_B], one.slot_B[index_B], one.ring) for one in self.tables]
        source = None if self.encoder_output is None else self.encoder_output.of_rows(index_B)
        options = self._options() | {"encoder_output": source}
        return Slots(self.network, entries, tables, self.next_B1[index_B], **options)

    def view(self, rows: int, capacity: int) -> Slots:
        """The first rows and slots, in the same memory. A step of the view writes into these slots too."""
        entries: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, SlotKV):
                entries.append(SlotKV(tuple(x[:rows, :, :capacity] for x in entry.tensors), table=entry.table))
            else:
                entries.append(entry.map(lambda x: x[:rows]) if isinstance(entry, RecurrentState) else entry)
        tables = [table.view(rows, capacity) for table in self.tables]
        return Slots(self.network, entries, tables, self.next_B1[:rows], **self._options())

    def _options(self) -> dict[str, Any]:
        return {"encoder_output": self.encoder_output, "kernel": self.kernel, "fused": self.fused}

    def step(self, inputs: Any, logits: bool = True) -> Any:
        """The logits of every output head after one more token of each sequence; changes the state.

        With `logits` False a `LogitMap` where a head has one.
        """
        network = self.network
        x_BTD = network.embed(inputs)
        for table in self.tables:
            table.position_BS.scatter_(1, table.slot_B[:, None], self.next_B1)
        # A token after the prompt attends to every earlier one, so no prefix adds to that.
        prefix_B = torch.zeros_like(self.next_B1[:, 0]) if "prefix" in network.reads else None
        side = SideInputs(prefix=prefix_B, tokens=inputs if "tokens" in network.reads else None)
        context = Context(self._positions(0, x_BTD.device), side, Call(self.kernel))
        context = replace(context, encoder=network.encoder_context(self.encoder_output, x_BTD, context))
        x_BTD = network.add_positions(x_BTD, context)
        if self.fused:
            self.plan = self.plan or Plan(network, self.entries)
            predicted = fused_step(self.plan, x_BTD, context, self.tables, logits)
        else:
            predicted = network.predict(self._body(x_BTD, context), logits=logits)
        self.next_B1 += 1
        for table in self.tables:
            table.slot_B.add_(1).remainder_(table.ring)
        return predicted

    def _body(self, x_BTD: Tensor, context: Context) -> Tensor:
        """The output of the layers, which append to the entries."""
        row_B = torch.arange(self.rows, device=x_BTD.device)
        others = (self._positions(number, x_BTD.device) for number in range(1, len(self.tables)))
        all_positions = [context.positions, *others]
        entries = [
            replace(
                entry,
                at=(row_B, slice(None), self.tables[entry.table].slot_B),
                positions=all_positions[entry.table],
            )
            if isinstance(entry, SlotKV)
            else entry
            for entry in self.entries
        ]
        x_BTD, new = self.network.body(x_BTD, context, entries)
        for entry, after in zip(self.entries, new or (), strict=True):
            if isinstance(entry, RecurrentState):
                entry.tensors[0].copy_(after.tensors[0][:, -1:])
        return x_BTD

    def _positions(self, number: int, device: torch.device) -> Positions:
        """The positions of a table's slots, and of the new token."""
        table = self.tables[number]
        return Positions(1, table.capacity, device, self.next_B1, table.position_BS)

    def state(self) -> list[Tensor]:
        """The tensors that a step changes, besides keys and values."""
        recurrent = [x for entry in self.entries if isinstance(entry, RecurrentState) for x in entry.tensors]
        return [self.next_B1, *(x for table in self.tables for x in (table.position_BS, table.slot_B)), *recurrent]
