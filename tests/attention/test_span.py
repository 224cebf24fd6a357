"""What short spans save: no visible key is left out, and keys that no query can attend to are not computed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention import attend as attend_module
from everyformer.attention import span as span_module
from everyformer.attention.attend import UnsupportedKernel, attend
from everyformer.attention.context import Call, Context, Positions, Probe, SideInputs
from everyformer.attention.kernels import blocked
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Causal, Window
from everyformer.attention.score_mod import Rotary, ScoreMod, Shaw
from everyformer.attention.span import DynamicSpan, Span, coarse, windows
from everyformer.study.cost import CostCounter
from tests.spec import score_mods as spec

BATCH, HEADS, WIDTH, WIDE = 2, 3, 4, 6
CPU = torch.device("cpu")


@pytest.fixture
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows as small as the spans, so that few positions show what is left out."""
    monkeypatch.setattr(span_module, "coarse", lambda size: max(1, size))


def built(score_mod: ScoreMod, spans: tuple[float, ...] = (0.0, 2.5, 6.2)) -> Any:
    module: Any = score_mod.build(HEADS, WIDTH, WIDTH)
    with torch.no_grad():
        for weight in module.parameters():
            weight.normal_()
        if isinstance(score_mod, Span):
            module.fraction_H.copy_(torch.tensor(spans) / score_mod.max_span)
        if isinstance(score_mod, DynamicSpan):
            module.b_H.copy_(torch.tensor([-3.0, -2.0, -1.0]))
            module.v_HD.mul_(0.3)
    return module


def draw(queries: int, keys: int) -> list[Tensor]:
    return [torch.randn(BATCH, HEADS, length, WIDTH, requires_grad=True) for length in (queries, keys, keys)]


def holes(keys: int) -> Tensor:
    """Positions of two sequences, one with padding on its left, one with padding in the middle."""
    seen_BK = torch.ones(BATCH, keys, dtype=torch.bool)
    seen_BK[0, :5] = seen_BK[1, keys - 12 : keys - 4] = False
    return torch.where(seen_BK, seen_BK.long().cumsum(1) - 1, -1)


@pytest.mark.spec(97)
@pytest.mark.parametrize("z", [-7.5, -4.0, 0.0, 0.3, 5.0, 9.2, 12.0, 30.0])
@pytest.mark.parametrize("step", [1, 64])
def test_the_window_of_a_head_covers_its_span(z: float, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key with m > 0 and at most S away is in the head's window; with windows of any size, no other is."""
    if step == 1:
        monkeypatch.setattr(span_module, "coarse", lambda size: max(1, size))
    score_mod = Span(12, ramp=4)
    pattern = built(score_mod, (z, 1.0, 2.0)).visible_keys(None)
    assert isinstance(pattern.for_head(0), Window)
    for distance in range(40):
        shown = bool(spec.soft_mask(torch.tensor(z), 4, distance) > 0) and distance <= 12
        window = bool(pattern.allows(torch.tensor(0), torch.tensor(0), torch.tensor(50), torch.tensor(50 - distance)))
        assert window >= shown
        assert step > 1 or distance == 0 or window == shown  # a window has at least the query itself


def test_a_nan_span_hides_nothing() -> None:
    pattern = built(Span(12, ramp=4), (math.nan, math.inf, 2.0)).visible_keys(None)
    assert [pattern.for_head(head) for head in range(2)] == [Window(13)] * 2


def test_where_spans_cannot_be_read_the_window_is_the_largest() -> None:
    found = []

    def read(z_H: Tensor) -> Tensor:
        found.append(windows(z_H, Span(12, ramp=4)))
        return z_H

    torch.func.vmap(read)(torch.ones(2, HEADS))
    assert found == [Window(13)]


@pytest.mark.parametrize("score_mod", [Span(12, ramp=4), DynamicSpan(WIDE, 12, ramp=4)], ids=["fixed", "dynamic"])
def test_a_probe_records_the_spans_of_an_attention_once(score_mod: ScoreMod) -> None:
    context = Context.of(5, 5, CPU, probe=(probe := Probe()), query_inputs=torch.randn(BATCH, 5, WIDE))
    attend(*draw(5, 5), Causal(), [built(score_mod)], context=context)
    assert [tuple(spans.shape) for spans in probe.spans] == [(BATCH, HEADS, 5)]


@pytest.mark.usefixtures("fine")
def test_a_plan_takes_all_spans_to_be_as_long_as_it_assumes_and_says_how_they_may_grow() -> None:
    fixed, dynamic = built(Span(100, ramp=3, start=0.25)), built(DynamicSpan(WIDE, 100, ramp=3, start=0.5)).train()
    context = Context.of(5, 5, CPU, query_inputs=torch.randn(BATCH, 5, WIDE))
    for module, grows in ((fixed, "spans of 25, at most 100"), (dynamic, "spans of 50, at most 100")):
        assert module.grows == grows
        for assumed, size in ((20.0, 23), (400.0, 101)):
            module.assumed_span = assumed
            assert module.visible_keys(context) == Window(size)


@pytest.mark.spec(97)
def test_window_sizes_are_few_and_close_to_the_spans() -> None:
    sizes = [coarse(n) for n in range(1, 8193)]
    assert all(n <= size <= max(64, 1.25 * n + 64) for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) <= 24 and sizes == sorted(sizes)


SCORE_MODS = [
    pytest.param((Span(8, ramp=3),), id="span"),
    pytest.param((Rotary(), Shaw(8, future=False), Span(8, ramp=3)), id="span-with-distances"),
    pytest.param((DynamicSpan(WIDE, 8, ramp=3), Shaw(5)), id="dynamic"),
    pytest.param((), id="window-alone"),
]


@pytest.mark.spec(97)
@pytest.mark.usefixtures("fine")
@pytest.mark.parametrize("score_mods", SCORE_MODS)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("queries", [1, 5])
def test_keys_that_no_query_attends_to_are_not_read(
    score_mods: tuple[ScoreMod, ...], padded: bool, queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDPA gets few of the keys, and outputs and gradients equal the reference."""
    modules, qkv, keys = [built(score_mod) for score_mod in score_mods], draw(queries, 40), 40
    context = Context.of(
        queries, keys, CPU, key_BK=holes(keys) if padded else None, query_inputs=torch.randn(BATCH, queries, WIDE)
    )
    pattern = Causal() if score_mods else parse("causal & window(6)")
    expected = attend(*qkv, pattern, modules, context=context, kernel="reference")
    given: list[int] = []
    fused = F.scaled_dot_product_attention

    def spy(q: Tensor, k: Tensor, *others: Any, **options: Any) -> Tensor:
        given.append(k.shape[2])
        return fused(q, k, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    computed = attend(*qkv, pattern, modules, context=replace(context, call=Call()), kernel="sdpa")
    torch.testing.assert_close(computed, expected, rtol=0, atol=1e-12)
    assert given[0] <= queries + 8 + 8 * padded < keys  # at most max_span before the first query, and the padding
    weights = [*qkv, *(weight for module in modules for weight in module.parameters())]
    direction = torch.randn_like(expected)
    one, two = (
        torch.autograd.grad((y * direction).sum(), weights, allow_unused=True, materialize_grads=True)
        for y in (computed, expected)
    )
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.spec(97)
def test_short_spans_choose_the_blocked_kernel_and_cost_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """From all of 1,024 positions to 64: another kernel, the same output, a fraction of the operations and bytes."""
    score_mods: list[Any] = [built(Shaw(1024, future=False)), built(Span(1024, ramp=32))]
    qkv = [x.detach()[:1] for x in draw(1024, 1024)]
    chosen: list[str] = []
    original = attend_module.choose

    def spy(*request: Any) -> Any:
        chosen.append(original(*request).__name__.rpartition(".")[2])
        return original(*request)

    monkeypatch.setattr(attend_module, "choose", spy)
    tallies: dict[float, CostCounter] = {}
    for part in (1.0, 30 / 1024):
        torch.nn.init.constant_(score_mods[1].fraction_H, part)
        attend(*qkv, Causal(), score_mods)  # the plan is computed once
        with CostCounter(CPU) as tallies[part]:
            computed = attend(*qkv, Causal(), score_mods)
        torch.testing.assert_close(computed, attend(*qkv, Causal(), score_mods, kernel="sdpa"), rtol=0, atol=1e-12)
    assert chosen == ["sdpa"] * 3 + ["blocked"] * 2 + ["sdpa"]
    long, short = tallies.values()
    assert short.flops < 0.25 * long.flops and short.peak < 0.25 * long.peak


@pytest.mark.spec(95)
def test_clamp_keeps_spans_between_zero_and_max_span() -> None:
    module = built(Span(8, ramp=3), (-1.0, 3.0, 9.0))
    module.clamp_()
    torch.testing.assert_close(module.fraction_H.detach(), torch.tensor([0.0, 3 / 8, 1.0]))


@pytest.mark.spec(96)
def test_the_cost_of_a_dynamic_span_is_its_mean_over_heads_and_tokens() -> None:
    """lambda / M sum_h z, on average over the tokens that are not padding."""
    module, x_BQD, key_BK = built(DynamicSpan(WIDE, 8, cost=0.5)), torch.randn(BATCH, 20, WIDE), holes(20)
    context = Context.of(20, 20, CPU, key_BK=key_BK, query_inputs=x_BQD)
    spans = [
        spec.dynamic_span(x_BQD[b, i], module.v_HD[h], module.b_H[h], 8)
        for b, i in (key_BK >= 0).nonzero().tolist()
        for h in range(HEADS)
    ]
    torch.testing.assert_close(module.penalty(context), 0.5 * sum(spans) / len(spans))
    torch.testing.assert_close(
        module.penalty(replace(context, positions=Positions(20, 20, CPU))),
        0.5 * module._spans(context).mean(),
        rtol=0,
        atol=0,
    )


def test_a_dynamic_span_without_query_inputs_is_refused() -> None:
    with pytest.raises(ValueError, match="give a context with query_inputs="):
        attend(*draw(3, 3), Causal(), [built(DynamicSpan(WIDE, 8))])


@pytest.mark.spec(93)
def test_spans_are_accurate_in_low_precision() -> None:
    """In bfloat16 the mask at a distance of 1,000 is that of float32: only the result is rounded."""
    module = built(Span(2000, ramp=32), (990.0, 995.5, 1000.0))
    at = [torch.tensor(n) for n in (0, 1, 0, 0)]
    computed = {}
    for dtype in (torch.float64, torch.bfloat16):
        q = torch.zeros(1, HEADS, 1, WIDTH, dtype=dtype)
        context = Context.of(1, 1, CPU, query_BQ=torch.tensor([[1010]]), key_BK=torch.tensor([[0]]))
        computed[dtype] = module.bias(q, q, 1.0, context)(*at).detach()
    assert computed[torch.bfloat16].dtype == torch.bfloat16
    assert math.isclose(computed[torch.float64], math.log((32 + 995.5 - 1010) / 32), rel_tol=1e-6)
    torch.testing.assert_close(computed[torch.bfloat16], computed[torch.float64].bfloat16())


@pytest.mark.parametrize("score_mod", [Span(12, 3), DynamicSpan(WIDE, 12, 3)], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("empty", [0, 5], ids=["full memory", "empty slots"])
@pytest.mark.parametrize("piece", [1 << 24, 200], ids=["whole", "recomputed"])
def test_published_spans_over_a_segment_memory_are_gathered(
    monkeypatch: pytest.MonkeyPatch, score_mod: ScoreMod, empty: int, piece: int
) -> None:
    """Spans with relative positions; the memory was trimmed, so the index of a key is not its position. Gradients are equal."""
    monkeypatch.setattr(blocked, "PIECE", piece)
    queries, keys = 40, 64
    key_BK = torch.arange(keys).repeat(BATCH, 1) + torch.tensor([[100], [700]])
    key_BK[1, :empty] = -1
    x_BQD = torch.randn(BATCH, queries, WIDE)
    modules, tensors = [built(Shaw(12, future=False)), built(score_mod)], draw(queries, keys)
    weights = [*tensors, *(weight for module in modules for weight in module.parameters())]
    results = []
    for kernel in ("reference", "blocked"):
        context = Context(Positions(queries, keys, CPU, key_BK=key_BK), SideInputs(query_inputs=x_BQD), Call(kernel))
        output = attend(*tensors, Causal() & ~Window(1), modules, context=context)
        results.append((output, *torch.autograd.grad(output.square().sum(), weights, allow_unused=True)))
    torch.testing.assert_close(results[1], results[0])


def test_keys_with_a_gap_between_them_are_not_gathered_by_distance() -> None:
    key_BK = holes(24)[1:].expand(BATCH, -1) + 50 * (holes(24)[1:] >= 0)
    context = Context(Positions(8, 24, CPU, key_BK=key_BK), SideInputs(), Call("blocked"))
    with pytest.raises(UnsupportedKernel, match="do not follow each other"):
        attend(*draw(8, 24), Causal() & Window(4), context=context)
    with pytest.raises(UnsupportedKernel, match="the index of a key is not its position"):
        attend(*draw(8, 24), parse("causal & stride(4)"), context=context)
