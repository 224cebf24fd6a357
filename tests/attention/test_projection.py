"""The forms of multi-head attention against their sources' equations, each other, and their counted costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from everyformer.attention.attend import attend
from everyformer.attention.context import Context, EncoderContext
from everyformer.attention.norm import RMSNorm
from everyformer.attention.projection import (
    Asymmetric,
    Narrow,
    ParameterFree,
    Projection,
    ProjectionModule,
    Shared,
    Sliced,
    Standard,
    Sum,
    Symmetric,
    Wide,
)
from everyformer.network.feedforward import FeedForward
from everyformer.network.multi_head_attention import CrossAttention
from tests.spec import attention as spec

WIDTH, HEADS, TIME = 12, 3, 5
CLOSE = {"rtol": 0.0, "atol": 1e-12}
FORMS: list[Projection] = [
    ParameterFree(),
    Symmetric(4),
    Asymmetric(4),
    Standard(HEADS),
    Standard(HEADS, key_width=2, value_width=5, bias=True),
    Standard(HEADS, key_heads=1, qk_norm=RMSNorm(), scale=0.3),
    Shared(HEADS),
    Shared(HEADS, key_width=2, value_width=5, bias=True, merge_bias=True),
    Wide(HEADS),
    Sliced(HEADS),
    Narrow(HEADS),
    Sum(HEADS),
    Sum(HEADS, rank=2),
]
each_form = pytest.mark.parametrize("form", FORMS, ids=repr)


def run(heads: ProjectionModule, x_BTD: Tensor, source_BSD: Tensor | None = None) -> Tensor:
    """One attention: project, attend, merge."""
    q_BHQE = heads.query(x_BTD)
    k_BHKE, v_BHKE = heads.keys_values(x_BTD if source_BSD is None else source_BSD)
    return heads.merge(attend(q_BHQE, k_BHKE, v_BHKE, scale=heads.scale))


def matrices(heads: Any) -> tuple[Tensor, Tensor, Tensor]:
    """W_q, W_k, W_v of each head as Thickstun (source T) writes them, d x k."""
    sizes = (heads.queries, heads.keys, heads.values)
    q, k, v = heads.qkv.weight.split(sizes)
    return tuple(w.unflatten(0, (heads.heads, -1)).transpose(1, 2) for w in (q, k, v))


@pytest.mark.spec(1)
def test_parameter_free_attention_is_its_equation() -> None:
    x_BTD = torch.randn(2, TIME, WIDTH)
    y_BTD = run(ParameterFree().build(WIDTH), x_BTD)
    for x_TD, y_TD in zip(x_BTD, y_BTD, strict=True):
        torch.testing.assert_close(y_TD, spec.parameter_free(x_TD), **CLOSE)
        # The orientation of Katsaros (source K) is the transpose: tokens as columns, A normalised over columns.
        torch.testing.assert_close(y_TD.T, spec.parameter_free_columns(x_TD.T), **CLOSE)


@each_form
@pytest.mark.spec(2)
def test_attention_is_equivariant_and_its_pooled_output_invariant(form: Projection) -> None:
    heads, x_BTD, order = form.build(WIDTH), torch.randn(2, TIME, WIDTH), torch.tensor([3, 0, 4, 1, 2])
    straight, permuted = run(heads, x_BTD), run(heads, x_BTD[:, order])
    torch.testing.assert_close(permuted, straight[:, order], **CLOSE)
    torch.testing.assert_close(permuted.mean(1), straight.mean(1), **CLOSE)
    assert (permuted - straight).abs().max() > 1e-3


@pytest.mark.spec(3)
def test_symmetric_attention_scales_by_the_projected_width() -> None:
    heads: Any = Symmetric(4).build(WIDTH)
    x_BTD = torch.randn(1, TIME, WIDTH)
    u_RD = heads.qkv.weight
    q, k, _ = heads.project(x_BTD)
    assert torch.equal(q, k)
    torch.testing.assert_close(run(heads, x_BTD)[0], spec.symmetric(x_BTD[0], u_RD), **CLOSE)
    printed = spec.symmetric(x_BTD[0], u_RD * (4 / WIDTH) ** 0.25)  # Katsaros (source K) divides by sqrt(D)
    assert (run(heads, x_BTD)[0] - printed).abs().max() > 1e-3


@pytest.mark.spec(4)
def test_asymmetric_attention_is_its_equation() -> None:
    heads: Any = Asymmetric(4).build(WIDTH)
    x_BTD = torch.randn(1, TIME, WIDTH)
    u_q, u_k = heads.qkv.weight.split(4)
    torch.testing.assert_close(run(heads, x_BTD)[0], spec.asymmetric(x_BTD[0], u_q, u_k), **CLOSE)


@pytest.mark.spec(5)
@pytest.mark.parametrize("form", [Standard(1), Standard(HEADS)], ids=repr)
def test_projections_are_equation_1(form: Projection) -> None:
    heads, x_BTD = form.build(WIDTH), torch.randn(1, TIME, WIDTH)
    for projected_BHTE, w_HDE in zip(heads.project(x_BTD), matrices(heads), strict=True):
        for h, w_DE in enumerate(w_HDE):
            for i in range(TIME):
                torch.testing.assert_close(projected_BHTE[0, h, i], w_DE.T @ x_BTD[0, i], **CLOSE)


@each_form
@pytest.mark.spec(5)
def test_projecting_together_equals_projecting_separately(form: Projection) -> None:
    heads, x_BTD = form.build(WIDTH), torch.randn(2, TIME, WIDTH)
    assert heads.heads == form.heads
    apart = (heads.query(x_BTD), *heads.keys_values(x_BTD))
    for one, two in zip(heads.project(x_BTD), apart, strict=True):
        torch.testing.assert_close(one, two, **CLOSE)


@pytest.mark.spec(6, 8, 13)
@pytest.mark.parametrize("widths", [{}, {"key_width": 2, "value_width": 5}], ids=["d_k = d_v", "d_k != d_v"])
def test_standard_is_equation_3_and_the_concat_form(widths: dict[str, int]) -> None:
    heads: Any = Standard(HEADS, merge_bias=False, **widths).build(WIDTH)
    x_BTD = torch.randn(1, TIME, WIDTH)
    outputs = spec.head_outputs(x_BTD[0], x_BTD[0], *matrices(heads))
    w_o_FD = heads.out.weight.T
    torch.testing.assert_close(run(heads, x_BTD)[0], spec.concat_form(outputs, w_o_FD), **CLOSE)
    w_c_HED = w_o_FD.unflatten(0, (HEADS, -1))
    torch.testing.assert_close(run(heads, x_BTD)[0], spec.sum_of_projected_heads(outputs, w_c_HED), **CLOSE)


@pytest.mark.spec(10)
def test_wide_is_the_code_of_its_source() -> None:
    heads: Any = Wide(HEADS).build(WIDTH)
    x_BTD = torch.randn(2, TIME, WIDTH)
    queries, keys, values = heads.qkv.weight.chunk(3)
    expected = spec.wide(x_BTD, queries, keys, values, heads.out.weight, heads.out.bias)
    torch.testing.assert_close(run(heads, x_BTD), expected, **CLOSE)


@pytest.mark.spec(11)
def test_sliced_and_narrow_are_their_equations() -> None:
    x_BTD = torch.randn(1, TIME, WIDTH)
    sliced: Any = Sliced(HEADS).build(WIDTH)
    expected = spec.sliced(x_BTD[0], *sliced.qkv_3HEE) @ sliced.out.weight.T + sliced.out.bias
    torch.testing.assert_close(run(sliced, x_BTD)[0], expected, **CLOSE)
    narrow: Any = Narrow(HEADS).build(WIDTH)
    expected = spec.sliced(x_BTD[0], *narrow.qkv_3HEE.expand(-1, HEADS, -1, -1))
    torch.testing.assert_close(run(narrow, x_BTD)[0], expected, **CLOSE)


@pytest.mark.spec(12)
@pytest.mark.parametrize("rank", [None, 2])
def test_sum_form_is_its_equation(rank: int | None) -> None:
    heads: Any = Sum(HEADS, rank=rank).build(WIDTH)
    x_BTD = torch.randn(1, TIME, WIDTH)
    q, k, u_v = heads.qkv.weight.split((heads.queries, heads.keys, heads.values))
    v_HDD = heads.out.weight.T.unflatten(0, (HEADS, -1)).transpose(1, 2)
    if rank:  # V_h = U_h U_{v,h}
        v_HDD = v_HDD @ u_v.unflatten(0, (HEADS, -1))
    wanted_DT = spec.sum_form(x_BTD[0].T, q.unflatten(0, (HEADS, -1)), k.unflatten(0, (HEADS, -1)), v_HDD)
    torch.testing.assert_close(run(heads, x_BTD)[0], wanted_DT.T, **CLOSE)


@pytest.mark.spec(14)
@torch.no_grad()
def test_the_forms_agree_with_tied_weights() -> None:
    x_BTD, size = torch.randn(2, TIME, WIDTH), WIDTH // HEADS
    concat: Any = Standard(HEADS, merge_bias=False).build(WIDTH)
    full: Any = Sum(HEADS).build(WIDTH)
    low: Any = Sum(HEADS, rank=size).build(WIDTH)
    wide: Any = Wide(HEADS).build(WIDTH)
    w_q, w_k, w_v = matrices(concat)
    w_o_HED = concat.out.weight.T.unflatten(0, (HEADS, size))

    low.load_state_dict(concat.state_dict())
    full.qkv.weight.copy_(concat.qkv.weight[: 2 * WIDTH])
    full.out.weight.copy_((w_v @ w_o_HED).flatten(0, 1).T)
    # A wide head contains a narrow one in its first features; the others are zero. Its larger scale is undone in q and k.
    for number, (w_HDE, factor) in enumerate(((w_q, HEADS**0.25), (w_k, HEADS**0.25), (w_v, 1.0))):
        rows_HED = torch.zeros(HEADS, WIDTH, WIDTH)
        rows_HED[:, :size] = w_HDE.transpose(1, 2) * factor
        wide.qkv.weight[number * HEADS * WIDTH : (number + 1) * HEADS * WIDTH] = rows_HED.flatten(0, 1)
    wide.out.bias.zero_()
    wide.out.weight.zero_().unflatten(1, (HEADS, WIDTH))[:, :, :size] = w_o_HED.permute(2, 0, 1)

    expected = run(concat, x_BTD)
    for other in (full, low, wide):
        torch.testing.assert_close(run(other, x_BTD), expected, **CLOSE)


@pytest.mark.spec(15)
@pytest.mark.parametrize("source", [3, 8])
def test_cross_attention_over_a_sequence_of_another_length(source: int) -> None:
    heads: Any = Standard(HEADS, merge_bias=False).build(WIDTH)
    x_BTD, source_BSD = torch.randn(1, TIME, WIDTH), torch.randn(1, source, WIDTH)
    outputs = spec.head_outputs(x_BTD[0], source_BSD[0], *matrices(heads))
    expected = spec.concat_form(outputs, heads.out.weight.T)
    torch.testing.assert_close(run(heads, x_BTD, source_BSD)[0], expected, **CLOSE)
    layer = CrossAttention(Standard(HEADS, merge_bias=False)).build(WIDTH)
    layer.heads.load_state_dict(heads.state_dict())
    context = Context.of(TIME, source, x_BTD.device)
    context = replace(context, encoder=EncoderContext(source_BSD, context))
    torch.testing.assert_close(layer(x_BTD, context, None)[0][0], expected, **CLOSE)


D, H, R = 24, 4, 5


@pytest.mark.spec(3, 4, 10, 11, 12)
@pytest.mark.parametrize(
    ("form", "count"),
    [
        (ParameterFree(), 0),
        (Symmetric(R), R * D),
        (Asymmetric(R), 2 * R * D),
        (Standard(H), 4 * D**2 + D),
        (Standard(H, bias=True), 4 * D**2 + 4 * D),
        (Standard(H, key_heads=2), 3 * D**2 + D),
        (Standard(H, key_heads=1, bias=True, merge_bias=False), 2 * (D**2 + D * D // H) + D + 2 * D // H),
        (Standard(H, 10, 10, key_heads=2, qk_norm=RMSNorm()), 2 * (H + 2) * 10 * D + D + 2 * 10),
        (Wide(H), 4 * H * D**2 + D),
        (Shared(H), 3 * D**2),
        (Shared(H, merge_bias=True), 3 * D**2 + D),
        (Sliced(H), 3 * D**2 // H + D**2 + D),
        (Narrow(H), 3 * (D // H) ** 2),
        (Sum(H), 2 * D**2 + H * D**2),
        (Sum(H, rank=R), 2 * D**2 + 2 * H * R * D),
    ],
    ids=repr,
)
def test_parameter_counts(form: Projection, count: int) -> None:
    assert sum(p.numel() for p in form.build(D).parameters()) == count


@pytest.mark.spec(16)
def test_cost_depends_on_the_heads_only_with_full_rank_values() -> None:
    time = D  # Katsaros (source K): where D ~ N, the feed-forward net dominates
    x_BTD = torch.randn(1, time, D)

    def cost(form: Projection) -> int:
        """Multiplications of the N x N part, counted while it runs; a multiplication and an addition are two FLOPs."""
        heads = form.build(D)
        q, k, v = heads.project(x_BTD)
        with FlopCounterMode(display=False) as counter:
            attend(q, k, v, scale=heads.scale, kernel="reference")
        return counter.get_total_flops() // 2

    for heads in (1, 2, 4, 8):
        assert cost(Standard(heads)) == 2 * D * time**2
        assert cost(Sum(heads)) == (1 + heads) * D * time**2
    net = FeedForward(4 * D).build(D)
    with FlopCounterMode(display=False) as counter:
        net(x_BTD, Context.of(time, time), None)
    assert counter.get_total_flops() // 2 == 8 * time * D**2 > cost(Standard(H))


@pytest.mark.spec(11)
@pytest.mark.parametrize(
    ("form", "divisor", "multiple"),
    [
        (Standard(5), 4, 25),
        (Sliced(5), 4, 25),
        (Narrow(5), 4, 25),
        (Sum(5), 4, 25),
        (Sum(7), 6, 21),
        (Sum(40), 24, 40),
        (Sum(90), 24, 90),
    ],
)
def test_a_width_that_the_heads_do_not_divide_is_refused_with_the_nearest_ones(
    form: Any, divisor: int, multiple: int
) -> None:
    reason = (
        f"width of 24 does not divide into {form.heads} heads; "
        f"take for example heads={divisor}, or a width of {multiple}$"
    )
    with pytest.raises(ValueError, match=reason):
        form.build(D)


@pytest.mark.parametrize(("heads", "key_heads", "divisor"), [(4, 3, 2), (4, 5, 4), (4, 9, 4), (3, 2, 1)])
def test_key_heads_that_the_heads_cannot_share_are_refused_with_the_nearest_divisor(
    heads: int, key_heads: int, divisor: int
) -> None:
    reason = (
        f"heads={heads} cannot share key_heads={key_heads} equally; take a divisor, for example key_heads={divisor}$"
    )
    with pytest.raises(ValueError, match=reason):
        Standard(heads, key_heads=key_heads).build(D)


@pytest.mark.parametrize("form", [Sliced(2), Narrow(2)], ids=repr)
def test_matrices_of_slices_are_uniform_up_to_the_root_of_their_width(form: Projection) -> None:
    weight: Any = dict(form.build(200).named_parameters())["qkv_3HEE"].detach() * 100**0.5
    assert (weight.min().item(), weight.max().item()) == pytest.approx((-1, 1), abs=0.01) and weight.abs().max() <= 1
    assert weight.mean().item() == pytest.approx(0, abs=0.02)
