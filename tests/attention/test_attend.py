"""`attend`: the scaled dot product over a key set, its limits and special cases, and wrong input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from everyformer.attention import attend as attend_module
from everyformer.attention.attend import _plans, attend
from everyformer.attention.context import Context, Probe
from everyformer.attention.parse import parse
from everyformer.attention.pattern import ByHead, Causal, Full, Graph, Pattern, SameDocument, Window
from everyformer.attention.projection import Standard, Sum
from everyformer.attention.score_mod import Alibi, ImageBias, Rotary, ScoreMod
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention, AttentionModule
from everyformer.network.residual import PreNorm
from tests.spec import attention as spec

CLOSE = {"rtol": 0.0, "atol": 1e-12}
CPU = torch.device("cpu")


def draw(queries: int = 4, keys: int = 6, width: int = 3, values: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 2, queries, width), torch.randn(2, 2, keys, width), torch.randn(2, 2, keys, values)


def probed(*given: Any, **options: Any) -> Tensor:
    """The weights of one attention."""
    q, k = given[:2]
    probe = Probe()
    attend(*given, context=Context.of(q.shape[2], k.shape[2], CPU, probe=probe), **options)
    return probe.weights[0]


@pytest.mark.spec(6)
@pytest.mark.parametrize(("queries", "keys"), [(4, 6), (6, 6), (7, 3), (1, 6)])
def test_attend_equals_the_scaled_dot_product(queries: int, keys: int) -> None:
    q, k, v = draw(queries, keys)
    y, weights = attend(q, k, v), probed(q, k, v)
    for b in range(2):
        for h in range(2):
            torch.testing.assert_close(y[b, h], spec.scaled_dot_product(q[b, h], k[b, h], v[b, h]), **CLOSE)
            torch.testing.assert_close(weights[b, h], spec.weights(q[b, h], k[b, h], 3**-0.5), **CLOSE)


@pytest.mark.spec(6)
def test_a_probe_records_the_scaled_products_before_terms_are_added_and_keys_hidden() -> None:
    q, k, v = draw(6, 6)
    probe = Probe(records_products=True)
    attend(q, k, v, Causal(), [Alibi().build(2, 3, 5)], context=Context.of(6, 6, CPU, probe=probe))
    assert len(probe.products) == len(probe.weights) == 1
    torch.testing.assert_close(probe.products[0], torch.einsum("bhqe,bhke->bhqk", q, k) / math.sqrt(3), **CLOSE)
    attend(q, k, v, context=Context.of(6, 6, CPU, probe=(unasked := Probe())))
    assert unasked.products == []


@pytest.mark.parametrize("pattern", [None, Causal()], ids=str)
@pytest.mark.parametrize("score_mods", [(), (Rotary(), Alibi())], ids=repr)
def test_the_output_is_the_same_without_gradients(score_mods: tuple[ScoreMod, ...], pattern: Pattern | None) -> None:
    q, k, v = draw(4, 6, width=4)
    modules = [score_mod.build(2, 4, 5) for score_mod in score_mods]
    expected = attend(q, k, v, pattern, modules)
    with torch.no_grad():
        torch.testing.assert_close(attend(q, k, v, pattern, modules), expected, **CLOSE)


@pytest.mark.parametrize(("gradients", "times"), [(False, 1), (True, 3)])
def test_without_gradients_the_kernel_is_chosen_once_for_all_layers_of_a_call(
    gradients: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (q, k, v), context, pattern, chosen = draw(), Context.of(4, 6, CPU), Causal(), list[Any]()
    choose = attend_module.choose

    def spy(*request: Any) -> Any:
        chosen.append(choose(*request))
        return chosen[-1]

    monkeypatch.setattr(attend_module, "choose", spy)
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            attend(q, k, v, pattern, context=context)
    assert len(chosen) == times


@pytest.mark.parametrize(
    ("pattern", "length", "kernel", "inside"),
    [
        ("causal", 1024, "auto", True),
        ("causal & window(2)", 1024, "auto", False),
        ("causal & window(2)", 1023, "auto", True),
        ("causal & window(2)", 8, "sdpa", True),
        ("causal & window(2)", 8, "blocked", False),
    ],
)
def test_compiled_graphs_contain_attention_unless_its_kernel_plans(
    pattern: str, length: int, kernel: str, inside: bool
) -> None:
    qkv, graphs = draw(length, length), list[str]()

    def collect(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(str(graph.graph))
        return graph.forward

    def layer(*qkv: Tensor) -> Tensor:
        return attend(*(x + 1 for x in qkv), parse(pattern), kernel=kernel) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=collect, dynamic=False)
    torch.testing.assert_close(compiled(*qkv), layer(*qkv), **CLOSE)
    assert any("scaled_dot_product_attention" in graph for graph in graphs) is inside
    assert _plans(parse(pattern), length, kernel) is not inside


@pytest.mark.spec(6)
def test_weights_sum_to_one_and_the_misprinted_form_does_not() -> None:
    q, k, v = draw()
    torch.testing.assert_close(probed(q, k, v).sum(-1), torch.ones(2, 2, 4), **CLOSE)
    outside = spec.weights_scaled_outside(q[0, 0], k[0, 0])
    torch.testing.assert_close(outside.sum(-1), torch.full((4,), 1 / math.sqrt(3)), **CLOSE)


@pytest.mark.spec(7, 71)
def test_each_query_attends_to_its_key_set_only() -> None:
    q, k, v = draw(6, 6)
    allowed = torch.rand(6, 6) < 0.5
    allowed[2] = False  # S_2 is empty
    sets = [[j for j in range(6) if allowed[i, j]] for i in range(6)]
    edges = tuple((i, j) for i, members in enumerate(sets) for j in members)
    y = attend(q, k, v, Graph(edges))
    for b in range(2):
        for h in range(2):
            torch.testing.assert_close(y[b, h], spec.over_sets(q[b, h], k[b, h], v[b, h], sets), **CLOSE)
    assert torch.equal(y[:, :, 2], torch.zeros(2, 2, 5))


@pytest.mark.spec(9)
def test_scale_may_be_split_between_queries_and_keys() -> None:
    q, k, v = draw()
    root = 3**0.25
    torch.testing.assert_close(attend(q / root, k / root, v, scale=1.0), attend(q, k, v), **CLOSE)
    torch.testing.assert_close(attend(q, k, v)[0, 0], spec.scale_split(q[0, 0], k[0, 0], v[0, 0]), **CLOSE)


@pytest.mark.spec(17)
def test_scores_that_depend_on_the_distance_only_are_a_convolution() -> None:
    """Weights A_{i-j}: with q = 0 only the learned function of j - i is left. It is softmaxed, so the kernel's taps are
    positive and sum to one; zero values around the sequence are the convolution's zero padding."""
    time, width, around = 5, 3, 4  # the convolution kernel covers every distance
    score_mod: Any = ImageBias(1, time + 2 * around).build(heads=1, key_width=2, value_width=width)
    torch.nn.init.normal_(score_mod.bias_RH)
    x_TD = torch.randn(time, width)
    v = F.pad(x_TD, (0, 0, around, around))[None, None]
    nothing = torch.zeros(1, 1, time + 2 * around, 2)
    y = attend(nothing, nothing, v, Window(time), [score_mod])[0, 0, around : around + time]
    middle = time + 2 * around - 1  # the row of the offset 0
    taps = score_mod.bias_RH[middle - time + 1 : middle + time, 0].softmax(0)
    expected = F.conv1d(x_TD.T[:, None], taps[None, None], padding=time - 1)[:, 0]
    torch.testing.assert_close(y, expected.T, **CLOSE)


@pytest.mark.spec(12, 17)
def test_one_head_for_each_offset_gives_any_convolution() -> None:
    """The sum form of Katsaros (source K), with A_h the shift by one offset: Y = sum_h V_h X A_h is conv1d with any taps V_h.
    Where a shift leaves the sequence the query has no keys and its output is zero: zero padding."""
    time, width = 4, 7
    shifts: list[Pattern] = [Window(1)]
    for offset in range(1, time):
        ring = Window(offset + 1) & ~Window(offset)
        shifts = [ring & Causal(), *shifts, ring & ~Causal()]  # offsets -(T-1) .. T-1
    heads: Any = Sum(len(shifts)).build(width)
    x_BTD = torch.randn(2, time, width)
    y = heads.merge(attend(*heads.project(x_BTD), ByHead(tuple(shifts)), scale=heads.scale))
    taps = heads.out.weight.unflatten(1, (len(shifts), width)).transpose(1, 2)
    expected = F.conv1d(x_BTD.transpose(1, 2), taps, padding=time - 1)
    torch.testing.assert_close(y, expected.transpose(1, 2), **CLOSE)


@pytest.mark.spec(18)
def test_attention_at_low_temperature_is_a_hard_lookup() -> None:
    q, k, v = draw()
    best = (q @ k.transpose(-1, -2)).argmax(-1)
    expected = v.gather(2, best[..., None].expand(-1, -1, -1, 5))
    errors = [float((attend(q, k, v, scale=1 / temperature) - expected).abs().max()) for temperature in (1, 0.1, 1e-5)]
    assert errors[0] > errors[1] > errors[2] == 0
    dictionary = torch.eye(6)[None, None]  # a query that is a key gets that key's value
    assert torch.equal(attend(dictionary, dictionary, v[:1, :1], scale=1e4), v[:1, :1])


@pytest.mark.spec(19)
def test_a_probe_records_the_weights_of_all_layers() -> None:
    layer = Layer((Attention(Standard(3), Causal()), FeedForward(16)))
    network = Model(width=12, embed=Tokens(11), body=Stack(2, (layer,), PreNorm())).build()
    inputs: list[Tensor] = []
    layers = [module for module in network.modules() if isinstance(module, AttentionModule)]
    for module in layers:
        module.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    probe, tokens_BT = Probe(), torch.randint(0, 11, (2, 5))
    probed, alone = network(tokens_BT, probe=probe), network(tokens_BT)
    torch.testing.assert_close(probed.hidden, alone.hidden, **CLOSE)
    assert [tuple(weights.shape) for weights in probe.weights] == [(2, 3, 5, 5)] * 2
    for module, x_BTD, weights_BHQK in zip(layers, inputs[:2], probe.weights, strict=True):
        torch.testing.assert_close(weights_BHQK.sum(-1), torch.ones(2, 3, 5), **CLOSE)
        q_BHTE, k_BHTE, _ = module.heads.project(x_BTD)
        for b in range(2):
            for h in range(3):
                for i in range(5):  # query i, over the keys up to i
                    expected = spec.weights(q_BHTE[b, h, i : i + 1], k_BHTE[b, h, : i + 1], 4**-0.5)[0]
                    torch.testing.assert_close(weights_BHQK[b, h, i], F.pad(expected, (0, 4 - i)), **CLOSE)


@pytest.mark.spec(15)
def test_more_queries_than_keys_have_consistent_positions() -> None:
    """Query i has position K - Q + i, even if that is negative, for patterns and for score modifications."""
    q, k, v = draw(5, 4, width=4)
    score_mod = Rotary().build(2, 4, 5)
    placed = Context.of(5, 4, CPU, query_BQ=torch.arange(-1, 4)[None])
    torch.testing.assert_close(
        attend(q, k, v, Causal(), [score_mod]), attend(q, k, v, Causal(), [score_mod], context=placed), **CLOSE
    )
    assert torch.equal(attend(q, k, v, Causal())[:, :, 0], torch.zeros(2, 2, 5))


@pytest.mark.spec(7)
def test_drawing_a_mask_does_not_change_later_attention() -> None:
    q, k, v = draw(6, 6)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 2, 2]])
    fresh, drawn = (Context.of(6, 6, CPU, documents=documents) for _ in range(2))
    pattern = SameDocument()
    pattern.mask(6, heads=2, context=drawn)  # of the first sequence only
    torch.testing.assert_close(attend(q, k, v, pattern, context=drawn), attend(q, k, v, pattern, context=fresh))


@pytest.mark.spec(6)
@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"q": (2, 4, 3)}, "each must be batch, heads, positions, head width"),
        ({"q": (1, 2, 4, 3)}, "nothing is broadcast"),
        ({"q": (2, 1, 4, 3)}, "1 query heads cannot share 2 key heads equally"),
        ({"q": (2, 2, 4, 4)}, "q and k must be equally wide"),
        ({"v": (2, 2, 5, 5)}, "k and v equally long"),
        ({"q": (2, 2, 0, 3)}, "over 0 queries and 6 keys: give at least one of each"),
        ({"k": torch.float32}, "torch.float64, torch.float32, torch.float64: make them one"),
        (dict.fromkeys("qkv", torch.long), "torch.int64.*give floating point"),
        ({"dropout": 1.0}, "dropout is 1.0: it is a probability"),
        ({"dropout": -0.1}, "dropout is -0.1: it is a probability"),
        ({"kernel": "sdqa"}, "no kernel is named 'sdqa'; did you mean sdpa?"),
        ({"context": Context.of(1, 6, CPU)}, "the context has 1 queries and 6 keys, but q and k have 4 and 6"),
        (
            {"context": Context.of(4, 6, CPU, key_BK=torch.arange(6).expand(3, -1))},
            "key_BK of the context has 3 rows, but q has a batch of 2; give one row for each",
        ),
        (
            {"q": (2, 2, 7, 3), "context": Context.of(7, 6, CPU, key_BK=torch.arange(6)[None])},
            "7 queries cannot be the last of 6 keys",
        ),
        ({"pattern": SameDocument()}, "SideInputs.documents="),
        ({"pattern": Graph()}, "SideInputs.edges="),
        ({"pattern": "causal"}, "the pattern is 'causal': give a pattern, such as parse"),
        ({"score_mods": (Rotary(),)}, "is a value: give its module, score_mod.build"),
    ],
)
def test_wrong_input_raises_with_its_reason(change: dict[str, Any], reason: str, gradients: bool) -> None:
    given = dict(zip("qkv", draw(), strict=True))
    for name in set(change) & set("qkv"):  # another shape, or another dtype
        new = change[name]
        given[name] = torch.zeros(new) if isinstance(new, tuple) else given[name].to(new)
    options = {"pattern": Full()} | {name: x for name, x in change.items() if name not in "qkv"}
    with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match=reason):
        attend(given["q"], given["k"], given["v"], **options)


@pytest.mark.spec(55)
def test_causal_weights_are_a_triangle_in_both_orientations() -> None:
    q, k, v = draw(5, 5)
    weights_QK = probed(q, k, v, Causal())[0, 0]
    assert torch.equal(weights_QK, weights_QK.tril())
    assert torch.equal(weights_QK.T, weights_QK.T.triu())  # the matrix A of Katsaros (source K), tokens as columns
    score = (q @ k.transpose(-1, -2) / math.sqrt(3)).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    torch.testing.assert_close(probed(q, k, v, Causal()), score.softmax(-1), **CLOSE)
    assert torch.equal(attend(q, k, v), attend(q, k, v, Full()))
    assert torch.equal(attend(q, k, v, parse("causal")), attend(q, k, v, Causal()))
