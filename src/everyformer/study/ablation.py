"""Switches attention heads off, to see what depends on them.

with without_heads(network, [("", 0, 3)]):           # head 3 of the first layer
    network(token_BT)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from everyformer.attention.projection import ProjectionModule
from everyformer.network.multi_head_attention import AttentionModule, CrossAttentionModule
from everyformer.network.network import Network, PairNetwork
from everyformer.task.attention_maps import PARTS

Head = tuple[str, int, int]  # part ("" of a single network, or encoder, decoder, cross), layer, head


@contextmanager
def without_heads(network: Network | PairNetwork, heads: Iterable[Head]) -> Iterator[None]:
    """The outputs of some heads count as 0 where heads are merged. A repeated layer loses them in all its steps."""
    chosen: dict[ProjectionModule, set[int]] = {}
    for part, layer, head in heads:
        projections = [
            layer.heads for layer in attention_layers(network, part) if isinstance(layer.heads, ProjectionModule)
        ]
        if not projections:
            raise ValueError(f"the model has no attention heads in {part or 'its layers'} that can be switched off")
        projection = projections[layer % len(projections)]
        if not 0 <= head < projection.heads or layer < 0:
            raise ValueError(f"layer {layer} has no head {head}; it has the heads 0 to {projection.heads - 1}")
        chosen.setdefault(projection, set()).add(head)
    with ExitStack() as stack:
        for projection, off in chosen.items():
            stack.enter_context(_replaced_merge(projection, off))
        yield


def attention_layers(network: Network | PairNetwork, part: str = "") -> list[nn.Module]:
    """The attentions of a network, or of a part of a pair, in the order of its layers."""
    parts = ("",) if isinstance(network, Network) else PARTS
    if part not in parts:
        raise ValueError(f"the model has no part {part[:50]!r}; the parts are {', '.join(map(repr, parts))}")
    kind: type[nn.Module] = CrossAttentionModule if part == "cross" else AttentionModule
    side = network if isinstance(network, Network) else network.encoder if part == "encoder" else network.decoder
    layers = side.body.layer_modules()
    return [sublayer for layer in layers for sublayer in layer.sublayers if isinstance(sublayer, kind)]


@contextmanager
def _replaced_merge(projection: ProjectionModule, off: set[int]) -> Iterator[None]:
    kept_H11 = torch.tensor([[[float(head not in off)]] for head in range(projection.heads)])
    merge = projection.merge

    def merge_kept(kept_H11: Tensor, y_BHTE: Tensor) -> Tensor:
        return merge(y_BHTE * kept_H11.to(y_BHTE))

    projection.merge = partial(merge_kept, kept_H11)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del projection.merge  # the class's own is found again
