"""Soft caps and sinks: their equations in every kernel, or a refusal with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config

from everyformer.attention.attend import KERNELS, UnsupportedKernel, attend, choose
from everyformer.attention.context import Context, Probe
from everyformer.attention.kernels.request import Request
from everyformer.attention.parse import parse
from everyformer.attention.score_mod import Alibi, ScoreModModule
from everyformer.attention.softmax import Sinks, SoftCap
from everyformer.network.cache import Cache
from everyformer.network.output_head import Language
from tests.network import close, model, ready, tokens
from tests.spec import score_mods as spec

HEADS, KEY_HEADS, E, LENGTH = 4, 2, 6, 41
TEXTS = ["causal", "full", "causal & window(5)", "causal & ~window(3)", "causal & (window(4) | stride(7))"]


def modules(cap: bool, sinks: bool, alibi: bool) -> list[ScoreModModule]:
    values = [Alibi()] * alibi + [SoftCap(0.7)] * cap + [Sinks()] * sinks
    built = [value.build(HEADS, E, E) for value in values]
    for module in built:
        for weight in module.parameters():
            torch.nn.init.normal_(weight)
    return built


def draw(queries: int = LENGTH) -> list[Tensor]:
    shapes = ((HEADS, queries), (KEY_HEADS, LENGTH), (KEY_HEADS, LENGTH))
    return [torch.randn(2, *shape, E).requires_grad_() for shape in shapes]


def results(qkv: list[Tensor], text: str, mods: list[ScoreModModule], kernel: str) -> list[Tensor]:
    y = attend(*qkv, parse(text), mods, kernel=kernel)
    direction = torch.linspace(-1, 1, y.numel()).view(y.shape)
    weights = [*qkv, *(weight for module in mods for weight in module.parameters())]
    return [y.detach(), *torch.autograd.grad((y * direction).sum(), weights)]


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("cap, sinks", [(True, False), (False, True), (True, True)])
def test_the_reference_is_the_equation(cap, sinks, alibi):
    mods, (q, k, v) = modules(cap, sinks, alibi), [x.detach()[:, :, :6] for x in draw()]
    logit_H = mods[-1].logit_H.tolist() if sinks else [None] * HEADS
    i, j = torch.arange(6)[:, None], torch.arange(6)
    for text in ("causal", "causal & ~window(3)"):
        y = attend(q, k, v, parse(text), mods, kernel="reference")
        for b in range(2):
            for h in range(HEADS):
                bias_TT = -mods[0].slope_H[h] * (i - j).abs() if alibi else torch.zeros(6, 6)
                one = (q[b, h], k[b, h // 2], v[b, h // 2], 0.7 if cap else None, logit_H[h], bias_TT)
                close(y[b, h], spec.soft_cap_and_sink(*one, parse(text).mask(6)[0]))


@pytest.mark.parametrize("kernel", ["sdpa", "blocked"])
@pytest.mark.parametrize("cap, sinks", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("text", TEXTS)
def test_kernels_equal_the_reference(text, cap, sinks, kernel):
    for queries, alibi in ((LENGTH, True), (5, False), (1, True)):
        mods, qkv = modules(cap, sinks, alibi), draw(queries)
        if cap and kernel == "sdpa":
            with pytest.raises(
                UnsupportedKernel, match="a soft cap changes the scores, which it does not store; use ref"
            ):
                attend(*qkv, parse(text), mods, kernel=kernel)
            continue
        expected = results(qkv, text, mods, "reference")
        for one, two in zip(results(qkv, text, mods, kernel), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


@pytest.mark.parametrize("text", ["causal", "causal & ~window(3)"])
def test_flex_equals_the_reference(text):
    mods, qkv = modules(True, True, True), [x.detach() for x in draw()]
    found, expected = (attend(*qkv, parse(text), mods, kernel=kernel).detach() for kernel in ("flex", "reference"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kernel", ["fused", "tiled"])
@pytest.mark.parametrize("cap, sinks", [(True, False), (False, True)])
def test_kernels_with_a_softmax_of_their_own_refuse(kernel, cap, sinks):
    with pytest.raises(
        UnsupportedKernel, match="a soft cap or sinks change the softmax, which is built into it; use bl"
    ):
        attend(*draw(), parse("causal & window(5)"), modules(cap, sinks, False), kernel=kernel)


def test_auto_takes_the_reference_for_a_soft_cap_and_sdpa_for_sinks():
    request = Request.of(parse("causal"), 8, 8, HEADS)
    for options, name in (({"soft_cap": 1.0}, "reference"), ({"sink_H": torch.zeros(HEADS)}, "sdpa")):
        changed = Request(**(vars(request) | options))
        assert choose(changed, "auto") is KERNELS[name]


def test_weights_of_a_head_with_a_sink_sum_to_less_than_one():
    (q, k, v), probe = draw(), Probe()
    attend(q, k, v, parse("causal"), modules(False, True, False), context=Context.of(LENGTH, LENGTH, probe=probe))
    total_BHQ = probe.weights[0].sum(-1)
    assert (total_BHQ < 1).all() and (total_BHQ > 0).all()


def test_the_cap_is_that_of_gemma_unless_given():
    assert SoftCap().cap == Gemma2Config().attn_logit_softcapping


@pytest.mark.parametrize("cap", [False, True])
def test_two_caps_or_two_lists_of_sinks_are_refused(cap):
    with pytest.raises(ValueError, match="one soft cap and one list of sinks at most; leave the others out"):
        attend(*draw(), parse("causal"), modules(cap, not cap, False) * 2)


@pytest.mark.parametrize("pattern", ["causal", "causal & window(3)", "hashed(2, 4, 2)"])
def test_a_cache_is_exact(pattern):
    network = ready(model(pattern, score_mods=(SoftCap(0.7), Sinks()), outputs=(Language(soft_cap=2.0),)))
    x_BT, cache, found = tokens(3, 10), Cache(), []
    for piece in x_BT.split([4, 1, 5], dim=1):
        output = network(piece, cache=cache)
        cache = output.cache
        found.append(output.logits)
    close(torch.cat(found, dim=1), network(x_BT).logits)
    if pattern.startswith("hashed"):
        close(network(x_BT, kernel="hashed").logits, network(x_BT, kernel="reference").logits)


def test_capped_logits_are_their_equation():
    plain, capped = (ready(model(outputs=(Language(soft_cap=cap),))) for cap in (None, 1.5))
    x_BT = tokens()
    close(capped(x_BT).logits, 1.5 * torch.tanh(plain(x_BT).logits / 1.5))
