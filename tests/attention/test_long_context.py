"""Score modifications of the long-context papers in every kernel, forward and backward.

Transformer-XL's four terms (Dai et al. 2019), folded and clamped; adaptive and dynamic span (Sukhbaatar et al. 2019).
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everyformer.attention.attend import attend
from everyformer.attention.context import Context
from everyformer.attention.four_term import FourTerm, four_term_scores
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Causal, Full
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import ScoreMod
from everyformer.attention.span import DynamicSpan, Span, SpanModule
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.residual import PreNorm
from everyformer.value import from_json, to_json
from tests.spec import attention
from tests.spec import score_mods as spec

CLOSE = {"rtol": 0.0, "atol": 1e-10}
CPU = torch.device("cpu")
BATCH, HEADS, WIDTH, VALUES, WIDE = 2, 3, 4, 5, 6
SIZES = [(9, 9), (4, 9), (1, 9)]
KERNELS = ["reference", "sdpa", "blocked"]


def draw(queries: int, keys: int) -> tuple[Tensor, ...]:
    shapes = ((queries, WIDTH), (keys, WIDTH), (keys, VALUES))
    return tuple(torch.randn(BATCH, HEADS, *shape).requires_grad_() for shape in shapes)


def large(score_mod: ScoreMod) -> Any:
    """Returns the module with vectors large enough for every term to count."""
    module = score_mod.build(HEADS, WIDTH, VALUES)
    for weight in module.parameters():
        nn.init.normal_(weight)
    return module


def literal_scores(score_mod: Any, q: Tensor, k: Tensor, b: int, h: int, first: int = 0) -> Tensor:
    w_r_ED = score_mod.w_r.weight.unflatten(0, (HEADS, WIDTH))[h]
    return spec.transformer_xl_scores(
        q[b, h], k[b, h], w_r_ED, score_mod.u_HE[h], score_mod.v_HE[h], first, score_mod.max_distance
    )


def literal_relative(score_mod: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The four terms, causal, one query at a time."""
    first, outputs = k.shape[2] - q.shape[2], torch.zeros(BATCH, HEADS, q.shape[2], VALUES)
    for b, h in product(range(BATCH), range(HEADS)):
        score_QK = literal_scores(score_mod, q, k, b, h, first)
        for i, score_K in enumerate(score_QK):
            allowed = first + i + 1
            outputs[b, h, i] = attention.softmax(score_K[:allowed]) @ v[b, h, :allowed]
    return outputs


def literal_span(score_mod: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, max_span, ramp = k.shape[2] - q.shape[2], score_mod.value.max_span, score_mod.value.ramp

    def span(b: int, h: int) -> Tensor:
        if isinstance(score_mod, SpanModule):
            return max_span * score_mod.fraction_H[h]
        x_QD = inputs(q.shape[2])[b]
        return torch.stack([spec.dynamic_span(x_D, score_mod.v_HD[h], score_mod.b_H[h], max_span) for x_D in x_QD])

    return torch.stack(
        [
            torch.stack(
                [spec.adaptive_span(q[b, h], k[b, h], v[b, h], span(b, h), ramp, max_span, first) for h in range(HEADS)]
            )
            for b in range(BATCH)
        ]
    )


def inputs(queries: int) -> Tensor:
    """Returns the input vectors of the queries, for score modifications that read them."""
    return torch.randn(BATCH, queries, WIDE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def context(queries: int, keys: int) -> Context:
    return Context.of(queries, keys, CPU, query_inputs=inputs(queries))


def module_of(score_mod: ScoreMod) -> Any:
    """Returns a large module with spans of all lengths, none of which ends on a key."""
    module: Any = large(score_mod)
    if isinstance(score_mod, Span):
        nn.init.uniform_(module.fraction_H)
    return module


each_score_mod = pytest.mark.parametrize(
    ("score_mod", "literal"),
    [
        pytest.param(FourTerm(8), literal_relative, id="four-term", marks=pytest.mark.spec(38)),
        pytest.param(
            FourTerm(8, max_distance=3), literal_relative, id="four-term-clamped", marks=pytest.mark.spec(38, 88)
        ),
        pytest.param(Span(4, ramp=3), literal_span, id="adaptive-span", marks=pytest.mark.spec(93, 94)),
        pytest.param(DynamicSpan(6, 5, ramp=3), literal_span, id="dynamic-span", marks=pytest.mark.spec(93, 94, 96)),
    ],
)


@each_score_mod
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_a_score_mod_equals_its_equation_with_gradients(
    score_mod: ScoreMod, literal: Any, kernel: str, queries: int, keys: int
) -> None:
    module, qkv = module_of(score_mod), draw(queries, keys)
    weights = [*qkv, *module.parameters()]
    y = attend(*qkv, Causal(), [module], context=context(queries, keys), kernel=kernel)
    expected = literal(module, *qkv)
    torch.testing.assert_close(y, expected, **CLOSE)
    direction = torch.randn_like(y)
    computed, true = (torch.autograd.grad((output * direction).sum(), weights) for output in (y, expected))
    for one, two in zip(computed, true, strict=True):
        torch.testing.assert_close(one, two, **CLOSE)


@each_score_mod
def test_a_score_mod_equals_its_equation_in_flex(score_mod: ScoreMod, literal: Any) -> None:
    module, qkv = module_of(score_mod), draw(4, 9)
    with torch.no_grad():
        computed = attend(*qkv, Causal(), [module], context=context(4, 9), kernel="flex")
        torch.testing.assert_close(computed, literal(module, *qkv), **CLOSE)


@each_score_mod
@pytest.mark.parametrize("kernel", KERNELS[1:])
def test_a_score_mod_equals_the_reference_in_gathered_blocks(score_mod: ScoreMod, literal: Any, kernel: str) -> None:
    """More positions than in a block, and a sparse pattern."""
    module, qkv, pattern = module_of(score_mod), draw(70, 70), parse("causal & (window(9) | stride(16))")
    weights = [*qkv, *module.parameters()]
    one, two = (attend(*qkv, pattern, [module], context=context(70, 70), kernel=name) for name in (kernel, "reference"))
    torch.testing.assert_close(one, two, **CLOSE)
    computed, true = (torch.autograd.grad(y.square().sum(), weights) for y in (one, two))
    for a, b in zip(computed, true, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.spec(93, 94)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_span_that_ends_on_a_key_has_the_gradient_of_shrinking(kernel: str) -> None:
    """At whole z the soft mask has a corner on a key: at distance R + z it is exactly 0, at distance z exactly 1.

    There the equation has two gradients. Autograd of the literal equation takes the inner one at both corners (clamp lets
    the gradient through at its ends), which is the gradient of no movement of z at all. Ours drops it where m is 0: a key
    with the weight 0 passes nothing back. What is left is the gradient from below: of the span being made shorter.
    """
    ramp, z, max_span = 2, 3.0, 8
    module: Any = Span(max_span, ramp=ramp).build(HEADS, WIDTH, VALUES)
    q, k, v = draw(9, 9)
    direction = torch.randn(BATCH, HEADS, 9, VALUES)

    def loss(literal: bool = False, move: float = 0.0) -> Tensor:
        with torch.no_grad():
            module.fraction_H.fill_((z + move) / max_span)
        y = literal_span(module, q, k, v) if literal else attend(q, k, v, Causal(), [module], kernel=kernel)
        return (y * direction).sum(dim=(0, 2, 3))

    ours, inner = (torch.autograd.grad(loss(one).sum(), module.fraction_H)[0] / max_span for one in (False, True))
    step = 1e-6
    with torch.no_grad():
        here, below, above = (loss(literal=True, move=move) for move in (0.0, -step, step))
    torch.testing.assert_close(ours, (here - below) / step, rtol=1e-5, atol=1e-5)
    for gradient in ((above - here) / step, (here - below) / step):
        assert bool(((inner - gradient).abs() > 1e-3).all())
    # The difference is what the keys at distance R + z would send: dm/dz = 1/R, times the output's change with m.
    lost = torch.zeros(HEADS)
    for b, h, i in product(range(BATCH), range(HEADS), range(ramp + int(z), 9)):
        score = torch.stack([q[b, h, i] @ k[b, h, j] / 2 for j in range(i + 1)])
        m = torch.stack([spec.soft_mask(torch.tensor(z), ramp, i - j) for j in range(i + 1)])
        total = (m * score.exp()).sum()
        output, edge = (m * score.exp()) @ v[b, h, : i + 1] / total, i - ramp - int(z)
        lost[h] += score[edge].exp() / total / ramp * (v[b, h, edge] - output) @ direction[b, h, i]
    torch.testing.assert_close(inner - ours, lost.detach(), **CLOSE)


@pytest.mark.spec(94)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_span_that_ends_before_every_key_gives_no_nan(kernel: str) -> None:
    """A span may leave a query no keys, where a pattern hides its neighbours: its output is zero and it has no gradient."""
    module: Any = Span(4, ramp=2).build(HEADS, WIDTH, VALUES)
    nn.init.zeros_(module.fraction_H)
    qkv = draw(9, 9)
    y = attend(*qkv, parse("causal & ~window(2)"), [module], kernel=kernel)  # distance 2 = R + z has the weight 0
    assert torch.equal(y, torch.zeros_like(y))
    for gradient in torch.autograd.grad(y.sum(), [*qkv, module.fraction_H]):
        assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.spec(95)
def test_the_penalty_of_every_layer_reaches_the_loss() -> None:
    layer = Layer((Attention(Standard(HEADS), Causal(), (Span(4, ramp=2, cost=0.5, start=0.6), FourTerm(8))),))
    model = Model(width=12, embed=Tokens(7), body=Stack(2, (layer,), PreNorm()), outputs=(Language(),))
    assert from_json(to_json(model), Model) == model
    network = model.build()
    spans = [module.fraction_H for module in network.modules() if isinstance(module, SpanModule)]
    penalty = network(torch.randint(0, 7, (2, 5))).aux["penalty"]
    torch.testing.assert_close(penalty, sum(0.5 / HEADS * (4 * fraction_H).sum() for fraction_H in spans))  # eq. W17
    for gradient in torch.autograd.grad(penalty, spans):
        torch.testing.assert_close(gradient, torch.full((HEADS,), 4 * 0.5 / HEADS))


@pytest.mark.spec(38)
@pytest.mark.parametrize("max_distance", [None, 3])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_the_folded_four_terms_equal_the_equation_as_written(max_distance: int | None, queries: int, keys: int) -> None:
    """The literal form beside the folded one, and the transcription of the paper in tests/spec."""
    score_mod, (q, k, v) = large(FourTerm(8, max_distance)), draw(queries, keys)
    distance_QK = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    clamped_QK = distance_QK if max_distance is None else distance_QK.clamp(-max_distance, max_distance)
    w_r_HED = score_mod.w_r.weight.unflatten(0, (HEADS, WIDTH))
    score = four_term_scores(q, k, score_mod.u_HE, score_mod.v_HE, w_r_HED, clamped_QK, WIDTH**-0.5)
    for b, h in product(range(BATCH), range(HEADS)):
        torch.testing.assert_close(score[b, h], literal_scores(score_mod, q, k, b, h, keys - queries), **CLOSE)
    y = attend(q, k, v, Causal(), [score_mod], kernel="sdpa")
    torch.testing.assert_close(y, score.masked_fill(distance_QK < 0, -torch.inf).softmax(-1) @ v, **CLOSE)


@pytest.mark.spec(38)
def test_the_four_terms_work_without_a_mask_and_with_a_memory() -> None:
    """Both sides of the diagonal have their distance, and queries that are the last of the keys attend as they would
    if all were queries: that is segment memory."""
    score_mod = large(FourTerm(8))
    q, k, v = draw(9, 9)
    whole = attend(q, k, v, Full(), [score_mod])
    torch.testing.assert_close(attend(q[:, :, 5:], k, v, Full(), [score_mod]), whole[:, :, 5:], **CLOSE)
    for b, h in product(range(BATCH), range(HEADS)):
        expected = torch.stack(
            [attention.softmax(score_K) @ v[b, h] for score_K in literal_scores(score_mod, q, k, b, h)]
        )
        torch.testing.assert_close(whole[b, h], expected, **CLOSE)


@pytest.mark.spec(38, 91)
@pytest.mark.parametrize("max_distance", [None, 3])
@pytest.mark.parametrize(("queries", "keys"), SIZES)
def test_the_relative_shift_gives_the_same_scores(max_distance: int | None, queries: int, keys: int) -> None:
    """Appendix B: the products with all distances are a matrix whose rows, each shifted by one more, are the term."""
    score_mod = large(FourTerm(8, max_distance))
    q, k, v = draw(queries, keys)
    r_HRE = spec.distances(keys, 8, max_distance) @ score_mod.w_r.weight.unflatten(0, (HEADS, WIDTH)).transpose(1, 2)
    shifted = spec.relative_shift((q + score_mod.v_HE[:, None]) @ r_HRE.transpose(1, 2))
    score = ((q + score_mod.u_HE[:, None]) @ k.transpose(2, 3) + shifted) / WIDTH**0.5
    allowed = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    expected = score.masked_fill(~allowed, -torch.inf).softmax(-1) @ v
    torch.testing.assert_close(attend(q, k, v, Causal(), [score_mod]), expected, **CLOSE)


@pytest.mark.spec(38)
def test_folded_terms_are_accurate_far_from_the_start() -> None:
    """In float32, a million positions on: the error is that of float32, not of the angles."""
    score_mod = large(FourTerm(8)).float()
    q, k, v = (x.detach().float() for x in draw(9, 9))
    at_BT = torch.arange(9)[None] + 1_000_000
    here = attend(q, k, v, Causal(), [score_mod])
    far = attend(q, k, v, Causal(), [score_mod], context=Context.of(9, 9, CPU, key_BK=at_BT))
    torch.testing.assert_close(far, here, rtol=1e-5, atol=1e-5)
