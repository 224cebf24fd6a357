"""Probes a model with a segment memory as it reads a long text: segment by segment, each with the memory of those before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from everyformer.attention.context import Probe
from everyformer.network.cache import Cache
from everyformer.network.network import Network, Output
from everyformer.task.attention_maps import ProbedSide
from everyformer.task.probe_input import ProbeInput


@torch.no_grad()
def probe_segments(network: Network, inputs: ProbeInput, length: int, products: bool = False) -> ProbedSide:
    """Reads one example in segments of `length` tokens. The weights are those over all of its positions: 0 for keys that the memory
    does not hold."""
    (token_BT,) = inputs.inputs
    total = token_BT.shape[1]
    cache, probes, outputs = Cache(segment_memory=True), list[Probe](), list[Output]()
    for start in range(0, total, length):
        probes.append(Probe(records_products=products))
        output = network(token_BT[:, start : start + length], cache=cache, probe=probes[-1])
        cache = output.cache
        outputs.append(output)
    whole = Probe(
        weights=_joined([one.weights for one in probes], length, total),
        products=_joined([one.products for one in probes], length, total),
        spans=[torch.cat(parts, dim=2) for parts in zip(*(one.spans for one in probes), strict=True)],
        gates=[
            {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
            for parts in zip(*(one.gates for one in probes), strict=True)
        ],
    )
    joined = replace(outputs[0], hidden=torch.cat([one.hidden for one in outputs], dim=1), cache=cache)
    if isinstance(joined.logits, Tensor):
        joined = replace(joined, logits=torch.cat([one.logits for one in outputs], dim=1))
    return ProbedSide("", network, whole, list(inputs.labels), joined)


def _joined(segments: Sequence[Sequence[Tensor]], length: int, total: int) -> list[Tensor]:
    """The weights of every layer over all positions: the keys of a segment are the last ones up to its end."""
    layers = []
    for parts in zip(*segments, strict=True):
        whole_BHTT = parts[0].new_zeros(*parts[0].shape[:2], total, total)
        for number, part_BHQK in enumerate(parts):
            start = number * length
            end = start + part_BHQK.shape[2]
            whole_BHTT[:, :, start:end, end - part_BHQK.shape[3] : end] = part_BHQK
        layers.append(whole_BHTT)
    return layers
