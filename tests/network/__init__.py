"""Small models for the tests of this folder and its neighbours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from everyformer import (
    Attention,
    CrossAttention,
    EncoderDecoder,
    FeedForward,
    Layer,
    Model,
    NoResidual,
    Pattern,
    PreNorm,
    ScoreMod,
    Stack,
    Standard,
    Sublayer,
    Tokens,
    parse,
)

VOCABULARY = 17


def model(
    pattern: str | Pattern | None = "causal",
    *,
    form: Any = Standard(2),
    score_mods: tuple[ScoreMod, ...] = (),
    net: Sublayer | None = FeedForward(12),
    cross: Attention | CrossAttention | None = None,
    layers: int = 2,
    residual: Any = PreNorm(),
    width: int = 8,
    embed: Any = Tokens(VOCABULARY),
    **more: Any,
) -> Model:
    """A model of a few numbers; without a pattern it has no attention."""
    pattern = parse(pattern) if isinstance(pattern, str) else pattern
    attention = None if pattern is None else Attention(form, pattern, score_mods)
    if isinstance(cross, Attention):
        cross = CrossAttention(cross.heads, cross.pattern, cross.dropout)
    sublayers = tuple(one for one in (attention, cross, net) if one is not None)
    return Model(width=width, embed=embed, body=Stack(layers, (Layer(sublayers),), residual), **more)


def stack(layers: int, *sublayers: Any, residual: Any = NoResidual()) -> Stack:
    """Layers of these sublayers."""
    return Stack(layers, (Layer(sublayers),), residual)


def ready(value: Model | EncoderDecoder | nn.Module, seed: int = 0) -> Any:
    """Built, in float64 and evaluation mode, with every weight changed so that no norm is the identity."""
    torch.manual_seed(seed)
    network = value if isinstance(value, nn.Module) else value.build()
    with torch.no_grad():
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return network.double().eval()


def tokens(batch: int = 2, length: int = 6, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def placed(network: Any, inputs: Any, **options: Any) -> Tensor:
    """The input of the body: the embedded tokens with their positions."""
    seen: list[Tensor] = []
    handle = network.body.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    network(inputs, **options)
    handle.remove()
    return seen[0]


def close(one: Tensor, two: Tensor, limit: float = 1e-10) -> None:
    """Asserts equal shapes, and equal values up to float64 rounding."""
    assert one.shape == two.shape, (one.shape, two.shape)
    assert (one - two).abs().max() < limit
