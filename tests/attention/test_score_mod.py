"""The score modifications of relative position against their papers' equations and numbers."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from everyformer.attention.attend import attend
from everyformer.attention.context import Context
from everyformer.attention.four_term import FourTerm
from everyformer.attention.pattern import Causal, Full, Pattern
from everyformer.attention.score_mod import (
    Alibi,
    ImageBias,
    Rotary,
    ScoreMod,
    ScoreModModule,
    Shaw,
    T5Bias,
    alibi_slopes,
    look_up,
)
from everyformer.network.cache import Cache
from everyformer.value import Value, from_json, to_json
from tests.network import model, ready, tokens
from tests.spec import attention
from tests.spec import score_mods as spec

CLOSE = {"rtol": 0.0, "atol": 1e-12}
CPU = torch.device("cpu")
BATCH, HEADS, WIDTH, VALUES = 2, 3, 4, 5


def draw(queries: int, keys: int, values: int = VALUES) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(BATCH, HEADS, queries, WIDTH),
        torch.randn(BATCH, HEADS, keys, WIDTH),
        torch.randn(BATCH, HEADS, keys, values),
    )


def build(score_mod: ScoreMod, values: int = VALUES) -> Any:
    """Returns the module with tables large enough to distinguish their rows."""
    module = score_mod.build(HEADS, WIDTH, values)
    for table in module.parameters():
        torch.nn.init.normal_(table)
    return module


def bias(score_mod: Any, positions: int, queries: int | None = None) -> Tensor:
    """Returns what the score modification adds to every score, H, Q, K, if q and k are zero."""
    queries = queries or positions
    context = Context.of(queries, positions, CPU)
    term = score_mod.bias(torch.zeros(1, HEADS, queries, WIDTH), torch.zeros(1, HEADS, positions, WIDTH), 1.0, context)
    return term(*context.positions.indices(1, HEADS)).expand(1, HEADS, queries, positions)[0]


@pytest.mark.spec(37)
@pytest.mark.parametrize("values", [0, 1, VALUES])
@pytest.mark.parametrize(("queries", "keys"), [(7, 7), (3, 7), (1, 7)])
def test_shaw_equals_its_equations(values: int, queries: int, keys: int) -> None:
    width = values or VALUES
    score_mod = build(Shaw(max_distance=2, values=values > 0), width)
    q, k, v = draw(queries, keys, width)
    y = attend(q, k, v, score_mods=[score_mod])
    for b, h in product(range(BATCH), range(HEADS)):
        expected = spec.shaw(q[b, h], k[b, h], v[b, h], score_mod.key_RE, score_mod.value_RE, 2, first=keys - queries)
        torch.testing.assert_close(y[b, h], expected, **CLOSE)


@pytest.mark.spec(37)
def test_alibi_slopes_are_the_papers() -> None:
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    # "For 16 heads: 1/2^0.5, 1/2^1, 1/2^1.5, .., 1/2^8"; for 12, the paper's code adds every other one of these to the 8.
    sixteen = [2 ** (-n / 2) for n in range(1, 17)]
    assert alibi_slopes(16) == sixteen
    assert alibi_slopes(12) == alibi_slopes(8) + sixteen[0:8:2]


@pytest.mark.spec(37)
def test_alibi_is_its_equation() -> None:
    q, k, v = draw(6, 6)
    y = attend(q, k, v, Causal(), [build(Alibi())])
    for b, h in product(range(BATCH), range(HEADS)):
        expected = spec.alibi(q[b, h], k[b, h], v[b, h], alibi_slopes(HEADS)[h])
        torch.testing.assert_close(y[b, h], expected, **CLOSE)


@pytest.mark.spec(37)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (8, 16), (6, 20), (4, 9)])
def test_t5_buckets_are_the_published_ones(bidirectional: bool, buckets: int, max_distance: int) -> None:
    score_mod = build(T5Bias(buckets, max_distance, bidirectional))
    back = torch.arange(-300, 301)
    expected = spec.t5_bucket(-back, bidirectional, buckets, max_distance)
    assert torch.equal(score_mod.bucket(back), expected)
    bias_HQK = bias(score_mod, 40)
    for i, j in product(range(40), range(40)):
        assert torch.equal(bias_HQK[:, i, j], score_mod.bias_RH[expected[300 + i - j]])


@pytest.mark.spec(37)
@pytest.mark.parametrize("width", [2, None])
def test_rotary_is_a_complex_rotation(width: int | None) -> None:
    q, k, _ = draw(5, 5)
    rotated = build(Rotary(base=50.0, width=width)).transform(q, k, Context.of(5, 5, CPU))
    for x, y in zip((q, k), rotated, strict=True):
        for b, h, i in product(range(BATCH), range(HEADS), range(5)):
            torch.testing.assert_close(y[b, h, i, :width], spec.rotate(x[b, h, i, :width], i, 50.0), **CLOSE)
        assert torch.equal(y[..., width or WIDTH :], x[..., width or WIDTH :])


@pytest.mark.spec(37)
def test_rotary_products_depend_on_the_distance_alone() -> None:
    x, y = torch.randn(WIDTH), torch.randn(WIDTH)
    q, k = (one.expand(1, 1, 9, WIDTH) for one in (x, y))
    turned_q, turned_k = build(Rotary()).transform(q, k, Context.of(9, 9, CPU))
    score_QK = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    for offset in range(-8, 9):
        diagonal = score_QK.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), **CLOSE)
    firsts = torch.cat((score_QK[0], score_QK[1:, 0]))
    assert firsts.unique().numel() == 17  # and every distance has another product


@pytest.mark.spec(37)
@pytest.mark.parametrize("before", [0, 1])
def test_image_bias_is_one_number_for_each_offset(before: int) -> None:
    rows, columns = 3, 4
    module = build(ImageBias(rows, columns, before))
    assert len(module.bias_RH) == (2 * rows - 1) * (2 * columns - 1) + 1  # one for each offset, one for the class token
    bias_HQK = bias(module, before + rows * columns)
    by_offset: dict[tuple[int, int] | str, set[float]] = {}
    cells = [None] * before + list(product(range(rows), range(columns)))
    for (i, one), (j, two) in product(enumerate(cells), enumerate(cells)):
        offset = "class token" if one is None or two is None else (two[0] - one[0], two[1] - one[1])
        by_offset.setdefault(offset, set()).add(bias_HQK[0, i, j].item())
    assert all(len(numbers) == 1 for numbers in by_offset.values())  # equal offsets, equal bias
    assert len(set().union(*by_offset.values())) == len(by_offset) == (2 * rows - 1) * (2 * columns - 1) + before


@pytest.mark.spec(37)
@pytest.mark.parametrize("pattern", [Full(), Causal()], ids=str)
@pytest.mark.parametrize("score_mod", [T5Bias(8, 16), T5Bias(8, 16, bidirectional=True), ImageBias(2, 3)], ids=repr)
def test_a_learned_bias_is_added_to_the_scaled_score(score_mod: ScoreMod, pattern: Pattern) -> None:
    module = build(score_mod)
    q, k, v = draw(2, 6)
    y, bias_HQK = attend(q, k, v, pattern, [module]), bias(module, 6, queries=2)
    for b, h, i in product(range(BATCH), range(HEADS), range(2)):
        last = 6 if pattern == Full() else 5 + i
        score = torch.stack([q[b, h, i] @ k[b, h, j] / 2 + bias_HQK[h, i, j] for j in range(last)])
        torch.testing.assert_close(y[b, h, i], attention.softmax(score) @ v[b, h, :last], **CLOSE)


@pytest.mark.parametrize("score_mod", [Alibi(), Shaw(2), T5Bias(8, 16), ImageBias(2, 4), FourTerm(4, 3)], ids=repr)
def test_a_term_of_some_pairs_is_that_of_all_pairs_at_these(score_mod: ScoreMod) -> None:
    """Terms are elementwise: for one pair, for a list of pairs and for all, which is the only form that `reference` computes."""
    (q, k, _), context = draw(4, 6), Context.of(4, 6, CPU)
    term = build(score_mod).bias(q, k, 0.3, context)
    all_N = term(*context.positions.indices(BATCH, HEADS)).expand(BATCH, HEADS, 4, 6).flatten()
    pairs_N4 = torch.cartesian_prod(*map(torch.arange, (BATCH, HEADS, 4, 6)))
    for some in (slice(None), [0, -1], [20]):
        torch.testing.assert_close(term(*pairs_N4[some].T), all_N[some], **CLOSE)
    torch.testing.assert_close(term(*pairs_N4[20]), all_N[20], **CLOSE)


@pytest.mark.spec(37)
def test_alibi_has_nothing_to_learn_or_to_save() -> None:
    module = build(Alibi())
    assert list(module.parameters()) == [] and module.state_dict() == {}


@pytest.mark.spec(37)
@pytest.mark.parametrize("score_mod", [Rotary(), Alibi(), Shaw(2), T5Bias(8, 16), ImageBias(2, 4)], ids=repr)
def test_score_mods_read_positions_not_indices(score_mod: ScoreMod) -> None:
    """Padding among the keys (position -1) changes nothing: the other keys keep their positions."""
    module = build(score_mod)
    q, k, v = draw(8, 8)
    straight = attend(q[:, :, :6], k[:, :, :6], v[:, :, :6], Causal(), [module])
    position_K = torch.tensor([-1, 0, 1, -1, 2, 3, 4, 5])
    real = (position_K >= 0).nonzero()[:, 0]
    scattered = [torch.randn_like(x).index_copy(2, real, x[:, :, :6]) for x in (q, k, v)]
    context = Context.of(8, 8, CPU, key_BK=position_K[None])
    torch.testing.assert_close(attend(*scattered, Causal(), [module], context=context)[:, :, real], straight, **CLOSE)


@pytest.mark.spec(37)
@pytest.mark.parametrize(
    "score_mod", [Rotary(500.0), Alibi(), Shaw(3, values=True), T5Bias(8, 16, True), ImageBias(2, 3, 1)], ids=repr
)
def test_score_mods_round_trip_through_json(score_mod: ScoreMod) -> None:
    assert from_json(to_json(score_mod), ScoreMod) == score_mod


@pytest.mark.spec(37)
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Rotary(base=-1.0), "rotary.base is -1.0: expected float > 0"),
        (lambda: Rotary().build(2, 3, 3), "a head is 3 wide; make it even"),
        (lambda: Shaw(max_distance=0), "shaw.max_distance is 0: expected int >= 1"),
        (lambda: T5Bias(buckets=1), "t5_bias has 1 buckets .* must be at least 1"),
        (lambda: T5Bias(buckets=3, bidirectional=True), "t5_bias has 3 buckets .* must be at least 1"),
        (
            lambda: T5Bias(buckets=32, max_distance=16),
            "max_distance of 16: 16 distances have one bucket each, .* less than max_distance",
        ),
        (lambda: FourTerm(5), "four_term.width is 5: .* make it even"),
        (lambda: ImageBias(0, 3), "image_bias.rows is 0: expected int >= 1"),
        (lambda: ImageBias(2, 3, before=-1), "image_bias.before is -1: expected int >= 0"),
    ],
)
def test_a_wrong_number_raises_with_its_reason(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make()


@pytest.mark.spec(37)
@pytest.mark.parametrize("key_BK", [None, torch.arange(7)[None]])
@pytest.mark.parametrize("queries", [7, 2])
def test_positions_past_the_grid_are_refused(key_BK: Tensor | None, queries: int) -> None:
    context = Context.of(queries, 7, CPU, key_BK=key_BK)
    with pytest.raises(ValueError, match=r"image_bias has 0 \+ 2 x 3 positions, but the input has 7"):
        attend(*draw(queries, 7), score_mods=[build(ImageBias(2, 3))], context=context)


@pytest.mark.parametrize("before", [0, 1])
def test_positions_past_the_grid_that_cannot_be_read_are_outside_of_no_table(before: int) -> None:
    module = build(ImageBias(2, 3, before))
    position = torch.arange(-1, 40)
    row = module._row(position[:, None], position)
    assert row.min() >= 0 and row.max() < len(module.bias_RH)


def test_an_image_that_does_not_fit_its_grid_is_not_exported() -> None:
    class Images(torch.nn.Module):
        bias: Any = build(ImageBias(2, 3))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(q, k, v, score_mods=[self.bias])

    found = torch.export.export(Images(), draw(6, 6)).module()(*(given := draw(6, 6)))
    torch.testing.assert_close(found, Images()(*given), **CLOSE)
    with pytest.raises(Exception, match="but the input has 7"):
        torch.export.export(Images(), draw(7, 7))


def test_gradients_of_a_row_that_many_keys_read_are_summed_exactly_in_low_precision() -> None:
    """A sum in bfloat16 would stay at 256."""
    table = torch.ones(1, 1, 1, 3, dtype=torch.bfloat16, requires_grad=True)
    context = Context.of(1, 1000, CPU)
    look_up(table, *context.positions.indices(1, 1)[:3], torch.ones(1, 1, 1, 1000, dtype=torch.long)).sum().backward()
    assert table.grad is not None and table.grad.flatten().tolist() == [0, 1000, 0]


def test_the_four_terms_are_the_same_inside_a_transform() -> None:
    module, (q, k, _), context = build(FourTerm(4)), draw(5, 5), Context.of(5, 5, CPU)
    found = torch.func.vmap(lambda *qk: module.transform(*(x[None] for x in qk), context))(q, k)
    for one, two in zip(found, module.transform(q, k, context), strict=True):
        torch.testing.assert_close(one[:, 0], two, **CLOSE)


class ByNumber(ScoreMod, Value, frozen=True):
    """Keys times the logarithm of their number."""

    def build(self, heads: int, key_width: int, value_width: int) -> ScoreModModule:
        return ByNumberModule()


class ByNumberModule(ScoreModModule):
    def transform(self, q_BHQE: Tensor, k_BHKE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return q_BHQE, k_BHKE * torch.log1p(torch.tensor(k_BHKE.shape[2]))


def test_a_transformation_of_ones_own_may_read_all_keys_of_a_cache() -> None:
    network, token_BT = ready(model(score_mods=(ByNumber(),), layers=1)), tokens(2, 6)
    cached = network(token_BT[:, 5:], cache=network(token_BT[:, :5], cache=Cache()).cache)
    torch.testing.assert_close(cached.hidden[:, -1], network(token_BT).hidden[:, -1], **CLOSE)


@pytest.mark.parametrize(("score_mod", "modules"), [(Shaw(2, shared=True), 1), (Shaw(2), 2), (FourTerm(4), 2)])
def test_layers_have_score_modifications_of_their_own_unless_these_are_shared(score_mod: Any, modules: int) -> None:
    network = ready(model(score_mods=(score_mod,), layers=2))
    assert sum(isinstance(one, type(build(score_mod))) for one in network.modules()) == modules
