"""Heads that share keys and values, and norms of queries and keys: their equations, every kernel, and the size of the cache."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from everyformer import Cache
from everyformer.attention.attend import attend
from everyformer.attention.context import Context
from everyformer.attention.four_term import FourTerm
from everyformer.attention.norm import LayerNorm, RMSNorm
from everyformer.attention.parse import parse
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import Alibi, ImageBias, Rotary, ScoreMod, ScoreModModule, Shaw, T5Bias
from everyformer.attention.span import Span
from everyformer.network.multi_head_attention import Attention
from tests.network import close, model, ready, tokens
from tests.spec import attention as spec
from tests.spec import network as network_spec

WIDTH, HEADS, LENGTH, E = 12, 6, 41, 4
CLOSE = {"rtol": 0.0, "atol": 1e-11}
CPU = torch.device("cpu")


def literal(heads: Any, x_TD: Tensor, groups: int, eps: float | None, scale: float | None) -> Tensor:
    """The output of the heads by the equation, before it is merged."""
    q, k, v = heads.qkv.weight.split((heads.queries, heads.keys, heads.values))
    w_q, w_k, w_v = (w.unflatten(0, (n, -1)).mT for w, n in ((q, HEADS), (k, groups), (v, groups)))
    if eps is None:
        outputs = spec.grouped_heads(x_TD, w_q, w_k, w_v, scale=scale)
    else:
        norm_q, norm_k = (
            partial(network_spec.rms_norm, gamma=norm.weight, eps=eps) for norm in (heads.q_norm, heads.k_norm)
        )
        outputs = spec.grouped_heads(x_TD, w_q, w_k, w_v, norm_q, norm_k, scale)
    return torch.cat(outputs, dim=-1)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("key_heads", [1, 2, 3, 6])
@pytest.mark.parametrize("widths", [(None, None), (4, 3)])
def test_grouped_heads_are_their_equation(widths, key_heads, eps, scale):
    norm = None if eps is None else RMSNorm(eps)
    value = Standard(HEADS, *widths, merge_bias=False, key_heads=key_heads, qk_norm=norm, scale=scale)
    heads: Any = ready(value.build(WIDTH))
    x_BTD = torch.randn(1, 5, WIDTH)
    q, k, v = heads.project(x_BTD)
    assert (q.shape[1], k.shape[1], v.shape[1]) == (HEADS, key_heads, key_heads)
    y_BTD = heads.merge(attend(q, k, v, scale=heads.scale))
    expected = literal(heads, x_BTD[0], key_heads, eps, scale) @ heads.out.weight.T
    torch.testing.assert_close(y_BTD[0], expected, **CLOSE)


def draw(heads: int = HEADS, key_heads: int = 2, queries: int = LENGTH) -> tuple[Tensor, ...]:
    shapes = ((heads, queries, E), (key_heads, LENGTH, E), (key_heads, LENGTH, E))
    return tuple(torch.randn(2, *shape).requires_grad_() for shape in shapes)


SCORE_MODS: list[tuple[ScoreMod, ...]] = [
    (),
    (Rotary(), Alibi()),
    (Shaw(3),),
    (T5Bias(8, 16),),
    (ImageBias(7, 6),),
    (FourTerm(8),),
    (FourTerm(8, max_distance=3), Span(9, ramp=3, start=0.4)),
]


def build(score_mods: tuple[ScoreMod, ...]) -> list[ScoreModModule]:
    return [score_mod.build(HEADS, E, E) for score_mod in score_mods]


def output_and_gradients(
    qkv: tuple[Tensor, ...], modules: list[ScoreModModule], text: str, kernel: str
) -> list[Tensor]:
    y = attend(*qkv, parse(text), modules, kernel=kernel)
    direction = torch.linspace(-1, 1, y.numel()).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y * direction).sum(), qkv)]


@pytest.mark.parametrize("kernel", ["reference", "sdpa", "blocked"])
@pytest.mark.parametrize("score_mods", SCORE_MODS, ids=repr)
@pytest.mark.parametrize("text", ["causal", "causal & (window(4) | stride(7))", "by_head(causal & window(6), full)"])
def test_a_kernel_with_shared_keys_equals_the_reference_with_repeated_keys(text, score_mods, kernel):
    for queries in (LENGTH, 1):
        (q, k, v), modules = draw(queries=queries), build(score_mods)
        repeated = [x.detach().repeat_interleave(3, dim=1).requires_grad_() for x in (k, v)]
        expected = output_and_gradients((q, *repeated), modules, text, "reference")
        expected[2:] = [x.unflatten(1, (2, 3)).sum(2) for x in expected[2:]]
        for one, two in zip(output_and_gradients((q, k, v), modules, text, kernel), expected, strict=True):
            torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.parametrize("text, kernel", [("causal & block(8)", "tiled"), ("causal & window(5)", "flex")])
def test_the_kernels_for_whole_passes_take_shared_keys(text, kernel):
    qkv = [x.detach()[:, :, :40] for x in draw()]
    found, expected = (attend(*qkv, parse(text), kernel=name) for name in (kernel, "reference"))
    torch.testing.assert_close(found, expected, **CLOSE)


class Doubled(ScoreModModule):
    """A module of a user, which knows nothing of shared keys: each head has a factor of its own."""

    def transform(self, q_BHQE: Tensor, k_BHKE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return q_BHQE, k_BHKE * torch.arange(1.0, HEADS + 1)[:, None, None]


def test_a_score_modification_that_does_not_know_of_shared_keys_gets_repeated_ones():
    q, k, v = draw()
    repeated = [x.repeat_interleave(3, dim=1) for x in (k, v)]
    expected = attend(q, *repeated, parse("causal"), [Doubled()])
    torch.testing.assert_close(attend(q, k, v, parse("causal"), [Doubled()]), expected, **CLOSE)


def test_heads_that_cannot_share_keys_equally_are_refused():
    with pytest.raises(ValueError, match="6 query heads cannot share 4 key heads equally; give a number of key heads"):
        attend(*draw(key_heads=4))


@pytest.mark.parametrize("norm", [None, RMSNorm(), LayerNorm()])
def test_the_cache_holds_the_key_heads_only_and_continues_exactly(norm):
    network = ready(model(form=Standard(6, 4, 4, key_heads=2, qk_norm=norm), score_mods=(Rotary(),)))
    x_BT, cache, found = tokens(3, 10), Cache(), []
    for piece in x_BT.split([4, 1, 5], dim=1):
        output = network(piece, cache=cache)
        cache = output.cache
        found.append(output.hidden)
    close(torch.cat(found, dim=1), network(x_BT).hidden)
    attentions = [one for one in network.value.body.sublayers() if isinstance(one, Attention)]
    elements = sum(x.numel() for entry in cache.entries for x in entry.tensors)
    layers = len(network.body.layers)
    assert (
        attentions and elements == layers * 2 * 3 * 2 * 10 * 4
    )  # keys and values, sequences, key heads, positions, width
