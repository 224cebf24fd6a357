"""Checks of the arguments of one call of a network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everyformer.attention.attend import UnsupportedKernel
from everyformer.attention.context import SideInputs
from everyformer.network.cache import Cache, EncoderKV
from everyformer.network.embed import Mixed
from everyformer.network.output import EncoderOutput

if TYPE_CHECKING:
    from everyformer.network.network import Network


def check_call(
    network: Network,
    side: SideInputs,
    cache: Cache | None,
    encoder_output: EncoderOutput | None,
    batch: int,
    kernel: str,
) -> None:
    if not isinstance(side, SideInputs):
        raise ValueError(
            f"side_inputs is a {type(side).__name__}: give SideInputs(documents=..., edges=..., segments=..., prefix=...)"
        )
    if not isinstance(encoder_output, EncoderOutput | None):
        raise ValueError(
            f"encoder_output is a {type(encoder_output).__name__}: give an EncoderOutput, as encode() returns it"
        )
    given = {
        "documents": side.documents,
        "edges": side.edges,
        "prefix": side.prefix,
        "encoder_output": encoder_output,
    }
    for name, x in given.items():
        if x is not None and name not in network.reads:
            raise ValueError(f"{name} is given, but nothing in the model reads it; leave it out")
    if (
        kernel not in ("auto", "reference")
        and not any(network.value.body.patterns())
        and "encoder_output" not in network.reads
    ):
        raise UnsupportedKernel(f"kernel={kernel} computes attention, but the model has none; use auto or reference")
    if cache is not None:
        _check_cache(network, cache, batch, encoder_output)


def _check_cache(network: Network, cache: Cache, batch: int, encoder_output: EncoderOutput | None) -> None:
    if not isinstance(cache, Cache):
        raise ValueError(f"cache is a {type(cache).__name__}: give Cache() to start, then the last output's cache")
    if network.class_token is not None:
        raise ValueError("a model with a class token needs its whole sequence in one call; call it without cache=")
    if isinstance(network.value.embed, Mixed):
        raise ValueError("a mixed sequence needs all its parts in one call; call it without cache=")
    if cache.batch not in (None, batch):
        raise ValueError(
            f"the cache has {cache.batch} sequences, the input {batch}; reorder the cache, or start with Cache()"
        )
    known = not cache.entries or cache.model is network.value
    expected = [] if known else [type(entry) for entry in network.body.new_entries(cache.segment_memory)]
    if not known and [type(entry) for entry in cache.entries] != expected:
        raise ValueError(
            f"the cache has {len(cache.entries)} entries, this model has {len(expected)}, or they are of other kinds: it is the "
            "cache of another model; start with Cache()"
        )
    first = next((entry for entry in cache.entries if isinstance(entry, EncoderKV)), None)
    if encoder_output is None or first is None:
        return
    lengths = (next((x.shape[2] for x in first.tensors), None), encoder_output.x_BSD.shape[1])
    if lengths[0] not in (None, lengths[1]):
        raise ValueError(
            f"the cache is that of an encoder output of {lengths[0]} positions, but this one has {lengths[1]}; start with Cache()"
        )
    if not first.is_of(encoder_output.x_BSD):
        raise ValueError(
            "the cache has the keys of another encoder output of the same length; start with Cache() for a new source"
        )
