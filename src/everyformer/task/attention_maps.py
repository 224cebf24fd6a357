"""Attention weights of a network on one example, by layer and head.

    inputs = run.task.inference.probe_input(run.network, "To be")
    attention_maps(run.network, inputs).weight_LHQK

The arrays come from a `Probe`; `everyformer.study.attention_pictures` draws them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from everyformer.attention.context import Probe
from everyformer.network.network import Network, PairNetwork
from everyformer.network.repeat import Halt, Repeat
from everyformer.task.probe_input import GraphNodes, ImageCells, ProbeInput
from everyformer.value import nearest

GROUPS = 4  # into which the elements of a recurrent state are averaged
CLASS_TOKEN = "[class]"  # the label of a class token that the network adds
PARTS = ("encoder", "decoder", "cross")  # the attentions of an encoder-decoder


@dataclass(frozen=True)
class AttentionMaps:
    """The attention weights of a network on one example."""

    weight_LHQK: Sequence[Tensor]  # one tensor per layer
    queries: Sequence[str]  # labels of the queries
    keys: Sequence[str]
    title: str
    column: str = "head"  # label of the columns
    row: str = "layer"  # label of the rows
    image: ImageCells | None = None  # of which the keys read cells
    graph: GraphNodes | None = None  # whose nodes are queries and keys
    first: tuple[int, int] = (0, 0)  # the numbers of the first layer and of the first head


@dataclass(frozen=True)
class AttentionWeights:
    """The attention of a text: `weights`, of each layer an array H, Q, K, and the labels of its `queries` and `keys`.

    Example: `isinstance(everyformer.load("runs/first").attention("To be"), AttentionWeights)`.
    """

    weights: list[NDArray[np.float32]]  # heads, queries, keys; one array per layer
    queries: list[str]  # the tokens that attend
    keys: list[str]  # the tokens that are attended to


@dataclass(frozen=True)
class ProbedSide:
    """What a probe recorded of a network, or of the encoder or decoder of a pair."""

    name: str  # "", "encoder" or "decoder"
    network: Network
    probe: Probe
    labels: Sequence[str]  # of the positions; padding follows them
    output: Any = None  # of the network: an `Output`, or of an encoder an `EncoderOutput`

    @property
    def row(self) -> str:
        """What the entries of the probe's lists are: layers, or steps of one layer."""
        body = self.network.value.body
        return "step" if isinstance(body, Repeat | Halt) and len(body.layers) == 1 else "layer"


@torch.no_grad()
def probe(network: Network | PairNetwork, inputs: ProbeInput, products: bool = False) -> list[ProbedSide]:
    """Run a network on one example. Returns what was recorded: of the network, or of its encoder and its decoder. With `products`, the
    products of queries and keys too."""
    if isinstance(network, Network):
        recorded = Probe(records_products=products)
        output = network(*inputs.inputs, **inputs.options, probe=recorded)
        labels = [CLASS_TOKEN] * network.value.class_token + list(inputs.labels)
        return [ProbedSide("", network, recorded, labels, output)]
    (source, target), options = inputs.inputs, dict(inputs.options)
    probes = (Probe(records_products=products), Probe(records_products=products))
    visible, offset = options.pop("source_visible", None), options.get("position_offset")
    encoded = network.encode(source, visible=visible, position_offset=offset, probe=probes[0])
    output = network.decode(target, encoded, **options, probe=probes[1])
    source_labels = inputs.source_labels or [str(index) for index in range(source.shape[1])]
    return [
        ProbedSide("encoder", network.encoder, probes[0], source_labels, encoded),
        ProbedSide("decoder", network.decoder, probes[1], inputs.labels, output),
    ]


def attention_maps(network: Network | PairNetwork, inputs: ProbeInput, part: str | None = None) -> AttentionMaps:
    """Returns the attention weights of a network on one example. `part` is one of PARTS; default for a pair: cross.

    For a recurrent network they are the weights w of earlier inputs in its state (`everyformer.network.lstm`). Each element
    of the state counts as a head; the elements are sorted by their mean distance and averaged in groups.
    Raises ValueError if the network has no such weights.
    """
    return maps_of(probe(network, inputs), inputs, part)


def maps_of(sides: Sequence[ProbedSide], inputs: ProbeInput, part: str | None = None) -> AttentionMaps:
    """Returns the attention weights of what a probe recorded, as `attention_maps` does."""
    if len(sides) == 1:
        if part is not None:
            raise ValueError(f"the model has no encoder, so {part} is not a part of it; leave --part out")
        return _single_maps(sides[0], inputs)
    part = part or "cross"
    if part not in PARTS:
        raise ValueError(f"no part of an encoder-decoder is named {part!r}; {nearest(part, PARTS)}")
    encoder, decoder = sides
    if part == "cross":
        title = "cross-attention: rows are positions of the decoder, columns of the encoder"
        maps = _cropped(decoder.probe.cross_weights, decoder.labels, encoder.labels)
        return AttentionMaps(maps, decoder.labels, encoder.labels, title, row=decoder.row)
    side = encoder if part == "encoder" else decoder
    title = f"self-attention of the {part}: rows are queries, columns are keys"
    maps = _cropped(side.probe.weights, side.labels, side.labels)
    image = inputs.image if part == "decoder" else None
    return AttentionMaps(maps, side.labels, side.labels, title, row=side.row, image=image)


def _single_maps(side: ProbedSide, inputs: ProbeInput) -> AttentionMaps:
    maps, labels = _cropped(side.probe.weights or side.probe.state_weights, side.labels, side.labels), side.labels
    body = side.network.value.body
    if not maps:
        kinds = ", ".join(dict.fromkeys(type(one).__name__ for one in body.sublayers()))
        raise ValueError(
            f"a model of {kinds} has no attention weights to draw; give a run of a model with attention, or of lstm"
        )
    if not any(body.patterns()):
        title = "weights of earlier inputs in the state: rows are positions, columns inputs; groups from short to long distance"
        return AttentionMaps([grouped(weight_DQK) for weight_DQK in maps], labels, labels, title, "group")
    image = inputs.image
    if image is not None and side.network.value.class_token:
        cell_P2 = torch.cat((torch.full((int(side.network.value.class_token), 2), -1), image.cell_P2))
        image = ImageCells(image.pixel_CYX, cell_P2, image.size, query=0)
    title = "attention weights: rows are queries, columns are keys"
    return AttentionMaps(maps, labels, labels, title, row=side.row, image=image, graph=inputs.graph)


def _cropped(weights: Sequence[Tensor], queries: Sequence[str], keys: Sequence[str]) -> list[Tensor]:
    """The weights of the first sequence, H, Q, K each, without padding."""
    return [weight_BHQK[0, :, : len(queries), : len(keys)].float().cpu() for weight_BHQK in weights]


def grouped(weight_HQK: Tensor, groups: int = GROUPS) -> Tensor:
    """Means over groups of heads of about equal size, sorted by the mean distance of their weights."""
    queries, keys = weight_HQK.shape[1:]
    distance_QK = (torch.arange(queries)[:, None] - torch.arange(keys)).abs()
    order_H = ((weight_HQK * distance_QK).sum((1, 2)) / weight_HQK.sum((1, 2))).argsort()
    return torch.stack([part_HQK.mean(0) for part_HQK in weight_HQK[order_H].tensor_split(min(groups, len(order_H)))])
