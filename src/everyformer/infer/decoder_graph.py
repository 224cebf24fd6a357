"""Graphs with the cache as inputs and outputs, for generation by programs that have no everyformer.

    decoder   tokens, past, cross -> logits, present     past is what the call before returned as present
    encoder   source -> cross                            of an encoder-decoder: keys and values of the source, computed once

Each tensor of a cache is an input and an output: the keys, values and buckets of an attention, the inputs of a convolution, the last
state of a recurrence. Before the first call it is empty. The cache of a model with a segment memory always has as many slots as
the memory, and their positions: -1 is an empty slot, to which nothing attends.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from everyformer.attention.context import Positions
from everyformer.infer.signature import NamedInput, Signature, arguments, inputs_of, limits_of, outputs_of, reads_of
from everyformer.network.cache import Cache, EncoderKV, Entry, Growing, KVCache, LayerInputs, RecurrentState
from everyformer.network.embed import Tokens
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.network import EncoderOutput, Network, PairNetwork
from everyformer.network.output_head import Classify, Regress

PARTS: dict[type, tuple[str, ...]] = {  # the names of the tensors of an entry
    KVCache: ("keys", "values", "buckets"),
    LayerInputs: ("inputs",),
    RecurrentState: ("state",),
    EncoderKV: ("keys", "values"),
}


@dataclass(frozen=True)
class Slot:
    """One tensor of a cache: the number and kind of its entry, its axes, and its dtype."""

    name: str
    entry: int
    kind: type
    axes: tuple[str | int, ...]
    dtype: torch.dtype
    fill: int = 0  # before the first call


def no_decoder_reason(value: Model | EncoderDecoder) -> str | None:
    """Why a model has no graph with a cache, or None if it has one."""
    decoder, is_pair = (value.decoder, True) if isinstance(value, EncoderDecoder) else (value, False)
    if not decoder.cache_kinds() or any(isinstance(head, Classify | Regress) for head in decoder.outputs):
        return "it reads a sequence as a whole"
    if read := reads_of(decoder) & {"documents", "edges", "prefix"}:
        return f"its pattern reads {' and '.join(sorted(read))}, which belong to a whole sequence"
    if is_pair and not isinstance(decoder.embed, Tokens):
        return "its decoder does not read tokens"
    if "encoder_output" in reads_of(decoder) and not is_pair:
        return "it attends to the output of an encoder, which it does not have"
    return None


class CachedCall:
    """The calls of a network with a cache, as functions of named tensors."""

    def __init__(self, network: Network | PairNetwork):
        self.network = network
        self.decoder: Network = network.decoder if isinstance(network, PairNetwork) else network
        self.value = self.decoder.value
        self.memory = None if self.value.memory is None else self.value.memory.length
        self.kinds = [type(entry) for entry in self.decoder.body.new_entries(False)]
        has_keys = any(kind in (KVCache, LayerInputs) for kind in self.kinds)
        reads_positions = self.value.position or any(layer.position for layer in self.value.body.layers)
        self.counts = self.memory is not None if has_keys else bool(reads_positions)
        self.slots = list(self._slots())

    def signature(self) -> Signature:
        """The inputs and outputs of the decoder."""
        inputs = inputs_of(self.value, "")
        if isinstance(self.network, PairNetwork):
            inputs += tuple(one for one in inputs_of(self.network.value.encoder, "source_") if "visible" in one.name)
        of_cache = tuple(NamedInput(one.name, one.dtype, one.axes, _meaning(one)) for one in self.slots)
        present = {
            _present(one.name): tuple("past + length" if axis == "past" else axis for axis in one.axes)
            for one in self.slots
            if one.kind is not EncoderKV
        }
        limits = limits_of(self.value, "")
        limits |= {"past": limits["length"]} if limits else {}
        return Signature(inputs + of_cache, outputs_of(self.value) + tuple(present), limits, present)

    def encoder_signature(self) -> Signature:
        """The inputs of the encoder, and its outputs, which are inputs of the decoder."""
        assert isinstance(self.network, PairNetwork)
        encoder = self.network.value.encoder
        cross = {one.name: one.axes for one in self.slots if one.kind is EncoderKV}
        return Signature(inputs_of(encoder, "source_"), tuple(cross), limits_of(encoder, "source_"), cross)

    def encode(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The keys and values of the source, of each attention to it."""
        assert isinstance(self.network, PairNetwork)
        source, options = arguments(self.network.value.encoder, given, "source_")
        encoded = self.network.encode(source, visible=options["visible"])
        token_B1 = torch.zeros_like(encoded.x_BSD[:, :1, 0], dtype=torch.long)
        entries = self._run(token_B1, Cache(), encoded)[1].entries
        return tuple(x for entry in entries if isinstance(entry, EncoderKV) for x in entry.tensors)

    def decode(self, given: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The logits and the tensors of the next cache."""
        inputs, _ = arguments(self.value, given, "")
        logits, cache = self._run(inputs, self._cache(given), self._encoder_output(given))
        return (*logits, *(x for slot, x in self._tensors(cache) if slot.kind is not EncoderKV))

    def start(self, batch: int = 1) -> dict[str, Tensor]:
        """The cache before the first call."""
        sizes: dict[str | int, Any] = {"batch": batch, "past": 0}
        return {
            one.name: torch.full([sizes.get(axis, axis) for axis in one.axes], one.fill, dtype=one.dtype)
            for one in self.slots
            if one.kind is not EncoderKV
        }

    def example(self, batch: int, length: int, earlier: int) -> dict[str, Tensor]:
        """The inputs of the decoder after `earlier` random positions."""
        of_tokens = Signature(inputs_of(self.value, ""), (), limits_of(self.value, ""))
        of_source: dict[str, Tensor] = {}
        if isinstance(self.network, PairNetwork):
            signature = self.encoder_signature()
            source = signature.example(batch, length)
            of_source = dict(zip(signature.outputs, self.encode(source), strict=True))
            of_source |= {name: x for name, x in source.items() if name == "source_visible"}
        before = self.decode(of_tokens.example(batch, earlier) | of_source | self.start(batch))
        names = [slot.name for slot in self.slots if slot.kind is not EncoderKV]
        past = {name: x.contiguous() for name, x in zip(names, before[-len(names) :], strict=True)}
        return of_tokens.example(batch, length, seed=1) | of_source | past

    def _run(self, inputs: Tensor, cache: Cache, encoded: EncoderOutput | None) -> tuple[tuple[Tensor, ...], Cache]:
        output = self.decoder(inputs, cache=cache, encoder_output=encoded)
        logits = output.hidden if output.logits is None else output.logits
        return logits if isinstance(logits, tuple) else (logits,), output.cache

    def _slots(self) -> Iterator[Slot]:
        """From the sizes of a small call."""
        self.slots = []
        batch, length = 2, 1
        inputs = Signature(inputs_of(self.value, ""), (), {}).example(batch, length)
        encoded = EncoderOutput(torch.zeros(batch, 1, self.value.width)) if EncoderKV in self.kinds else None
        with torch.no_grad():
            cache = self._run(arguments(self.value, inputs, "")[0], Cache(), encoded)[1]
        for number, (entry, kind) in enumerate(zip(cache.entries, self.kinds, strict=True)):
            for part, x in zip(PARTS[kind], entry.tensors, strict=False):
                axes: list[str | int] = ["batch", *x.shape[1:]]
                if isinstance(entry, Growing) and kind is not RecurrentState:
                    axes[entry.axis] = self.memory or "past"
                elif kind is EncoderKV:
                    axes[2] = "source_length"
                name = f"{'cross' if kind is EncoderKV else 'past'}_{number}_{part}"
                yield Slot(name, number, kind, tuple(axes), x.dtype)
        if self.counts:
            yield Slot("past_positions", -1, Positions, ("batch", self.memory or "past"), torch.int64, -1)

    def _tensors(self, cache: Cache) -> Iterator[tuple[Slot, Tensor]]:
        """The tensors of a cache that the next call reads, in the order of the slots."""
        found = [x for entry in cache.entries for x in entry.tensors]
        if self.counts:
            assert cache.position_BK is not None
            found.append(cache.position_BK)
        for slot, x in zip(self.slots, found, strict=True):
            yield slot, x[:, -1:] if slot.kind is RecurrentState else x

    def _cache(self, given: dict[str, Tensor]) -> Cache:
        tensors: list[tuple[Tensor, ...]] = [
            tuple(given[slot.name] for slot in self.slots if slot.entry == number) for number in range(len(self.kinds))
        ]
        entries: tuple[Entry, ...] = tuple(kind(some) for kind, some in zip(self.kinds, tensors, strict=True))
        position_BK = given.get("past_positions")
        length = 0 if position_BK is None else position_BK.shape[1]
        for entry in entries:
            if isinstance(entry, KVCache | LayerInputs):
                length = entry.tensors[0].shape[entry.axis]
        if position_BK is not None:
            torch._check(position_BK.shape[1] == length)  # a graph takes the sizes of two inputs for different ones
        return Cache(length, entries, position_BK, max_length=self.memory, model=self.value)

    def _encoder_output(self, given: dict[str, Tensor]) -> EncoderOutput | None:
        """What the decoder reads of the encoder if it has its keys and values: the shape, and what is padding."""
        if not isinstance(self.network, PairNetwork):
            return None
        keys = next(given[slot.name] for slot in self.slots if slot.kind is EncoderKV)
        shape = (keys.shape[0], keys.shape[2], self.value.width)
        return EncoderOutput(keys.new_zeros(shape), given.get("source_visible"))


def _present(name: str) -> str:
    return name.replace("past_", "present_", 1)


def _meaning(slot: Slot) -> str:
    if slot.kind is EncoderKV:
        return "what the encoder returned under this name"
    return f"{_present(slot.name)} of the call before"
