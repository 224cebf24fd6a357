"""The contracts over every legal combination and every member, and that each contract notices what it is for."""

from __future__ import annotations

from dataclasses import astuple, replace
from itertools import combinations, islice, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everyformer
from everyformer.attention.context import Context
from everyformer.attention.four_term import FourTerm
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Causal, Pattern
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import ImageBias, Rotary, ScoreModModule, Shaw
from everyformer.attention.span import DynamicSpan, Span
from everyformer.network.act import ActState
from everyformer.network.cache import Cache
from everyformer.network.depth import Stack
from everyformer.network.embed import Features, Mixed, Patches, Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention, AttentionModule
from everyformer.network.network import Network
from everyformer.network.output_head import Classify, Language, PerToken
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.position import JointMlp, Learned
from everyformer.network.residual import Gated, PreNorm, PreNormModule, Reversible
from everyformer.study.contract_report import Report
from everyformer.study.contracts import CONTRACTS, contracts
from everyformer.study.example import example
from everyformer.study.random_models import check, random_models
from everyformer.study.sweep import (
    BODIES,
    GATES,
    HEADS,
    HYBRIDS,
    PARTS,
    PATTERNS,
    POSITIONS,
    RESIDUALS,
    SCORE_MODS,
    SWEPT,
    WIDTH,
    cells,
    sweep,
)
from everyformer.value import Value


def held(report: Report, record_property) -> None:
    record_property("findings", [astuple(result) for result in report.results])
    record_property("refused", report.refused)
    assert not report.failures, str(report)


def attention(model: Model) -> Attention | None:
    """Of a model of the parts, whose layer is one attention and one net."""
    first = model.body.layers[0].sublayers[0]
    return first if isinstance(first, Attention) and model.body not in HYBRIDS else None


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_wherever_two_parts_meet_the_contracts_are_kept(pattern, record_property):
    models = [model for model in cells() if model and attention(model) and attention(model).pattern == pattern]
    held(sweep(models), record_property)


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_every_body_without_attention_keeps_the_contracts(body, record_property):
    held(sweep(model for model in cells() if model and model.body == body), record_property)


@pytest.mark.parametrize("body", HYBRIDS, ids=str)
def test_every_hybrid_keeps_the_contracts(body, record_property):
    models = [model for model in cells() if model and model.body == body]
    assert len(models) == 2
    held(sweep(models, (*SWEPT, "compile") if body.is_causal() else SWEPT), record_property)


@pytest.mark.parametrize("name", everyformer.members())
def test_every_member_keeps_the_contracts(name, record_property):
    held(contracts(name), record_property)


@pytest.mark.slow
def test_every_pattern_score_mod_and_residual_pass_the_contracts_together(record_property):
    held(sweep(cells(triples=True), (*SWEPT, "flex")), record_property)


@pytest.mark.parametrize(
    ("pattern", "score_mods"),
    [*((pattern, ()) for pattern in PATTERNS), *((parse("causal"), score_mods) for score_mods in SCORE_MODS[1:])],
    ids=lambda part: " ".join(type(one).__name__ for one in part) or "none" if isinstance(part, tuple) else str(part),
)
def test_flex_serves_every_pattern_and_every_rule(pattern, score_mods, record_property):
    layer = Layer((Attention(Standard(2), pattern, score_mods),))
    report = contracts(Model(width=WIDTH, embed=Tokens(7), body=Stack(1, (layer,), PreNorm())), "flex")
    assert len(report.results) == (score_mods != (Shaw(2, values=True),))  # that one needs the weights
    held(report, record_property)


@pytest.mark.parametrize(
    "score_mods",
    SCORE_MODS,
    ids=lambda score_mods: " ".join(type(score_mod).__name__ for score_mod in score_mods) or "none",
)
@pytest.mark.parametrize("text", ["causal", "window(3)"])
def test_every_rule_compiles_whole(text, score_mods):
    """With and without padding, over positions that have an end."""
    layer = Layer((Attention(Standard(2), parse(text), score_mods), FeedForward(8)))
    value = Model(
        width=WIDTH, embed=Tokens(7), position=Learned(16), body=Stack(1, (layer,), PreNorm()), outputs=(PerToken(2),)
    )
    network = value.build().double().eval()
    token_BT, visible_BT = torch.randint(0, 7, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    visible_BT[0, 4:] = False
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend="eager")
    for options in ({}, {"visible": visible_BT}):
        found, wanted = compiled(token_BT, **options).hidden, network(token_BT, **options).hidden
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-14)


def test_a_network_of_feed_forward_nets_does_not_pass_overfit():
    layer = Layer((FeedForward(32),))
    value = Model(width=16, embed=Tokens(7), body=Stack(1, (layer,), PreNorm()), outputs=(Language(),))
    assert not contracts(value, "overfit").ok


def test_frozen_and_compiled_networks_are_checked_too():
    network = tiny().requires_grad_(False)
    report = contracts(network, ["cache", "kernels", "gradient", "overfit"])
    assert not report.failures and report.not_applicable == ["gradient", "overfit"]  # there is nothing to learn
    assert contracts(torch.compile(tiny(), backend="eager"), ["cache", "store"]).ok


def test_every_two_parts_meet_or_are_refused(record_property):
    met, back = set(), set()
    for model in cells():
        if model and attention(model):
            (layer,), place = model.body.layers, (type(model.body), getattr(model.body, "mode", None))
            one = layer.sublayers[0]
            parts = one.pattern, one.score_mods, model.body.residual, one.heads, model.position, layer.sublayers[-1]
            pairs = set(combinations(enumerate((*parts, (model.embed, model.outputs), place)), 2))
            met |= pairs
            if model.body.is_causal():
                back |= pairs
    refused = sum(model is None for model in cells())
    record_property("refused", refused)
    assert len(met) + refused == sum(len(one) * len(two) for one, two in combinations(PARTS, 2))
    # And where a cache can be tried on them, unless one of the two looks ahead itself.
    causal = [pattern for pattern in PATTERNS if not pattern.attends_to_future(heads=2)]
    plain = [residual for residual in (*RESIDUALS, *GATES) if not residual.norm.mixes_positions]
    for (i, ones), (j, others) in combinations(enumerate((causal, SCORE_MODS, plain, HEADS, POSITIONS)), 2):
        for one, other in product(ones, others):
            assert ((i, one), (j, other)) in back or ((i, one), (j, other)) not in met, (one, other)


def test_combinations_that_nobody_else_has_are_cells():
    """Sparse and relative, span and memory, reversible and memory, local and rotary with a cache, a graph in some heads."""
    models = [model for model in cells() if model and attention(model) and model.body.is_causal()]

    def some(pattern: str = "", score_mod: type | None = None, residual: type | None = None) -> bool:
        return any(
            pattern in str(attention(model).pattern)
            and (score_mod is None or any(isinstance(one, score_mod) for one in attention(model).score_mods))
            and (residual is None or isinstance(model.body.residual, residual))
            for model in models
        )

    assert some("stride", FourTerm) and some("summary", FourTerm) and some("", Span) and some("", DynamicSpan)
    assert some("", FourTerm, Reversible) and some("local(", Rotary) and some("by_head(causal & graph")


def test_contracts_change_nothing_of_a_network():
    network = everyformer.build("gpt2", "tiny").train()
    before = {name: weight.clone() for name, weight in network.state_dict().items()}
    contracts(network, ["future", "gradient", "overfit"])
    assert network.training and all(torch.equal(before[name], weight) for name, weight in network.state_dict().items())


def test_a_wrong_contract_gets_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean future"):
        contracts("gpt2", ["futur"])


def tiny() -> Any:
    torch.manual_seed(0)
    return everyformer.build("gpt2", "tiny", layers=1, width=32, heads=2)


def single(attention: Attention) -> Any:
    body = Stack(1, (Layer((attention,)),), PreNorm())
    return Model(width=8, embed=Tokens(7), body=body, outputs=(Language(),)).build()


def broken(network: Network, contract: str) -> bool:
    return not contracts(network, [contract]).ok


class Mean(nn.Module):
    """A norm that looks at other positions."""

    def forward(self, x_BTD: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        return x_BTD - x_BTD.mean(1, keepdim=True)


class Ahead(ScoreModModule):
    """A rule that lets the length of the sequence into the score."""

    def transform(self, q_BHQE: Tensor, k_BHKE: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        return q_BHQE * context.positions.keys, k_BHKE


def test_future_notices_a_norm_over_positions():  # eq. K6e
    network = tiny()
    step = network.body.layers[0].residuals[0]
    assert isinstance(step, PreNormModule)
    step.norm = Mean()
    assert broken(network, "future")


def test_cache_and_padding_notice_a_rule_that_counts_keys():
    network = single(Attention(Standard(2), Causal(), (Rotary(),)))
    network.body.layers[0].sublayers[0].score_mods[0] = Ahead()
    assert broken(network, "cache") and broken(network, "padding")


def test_rewind_notices_a_past_that_is_not_rolled_back(monkeypatch):
    monkeypatch.setattr(Cache, "roll_back", lambda cache, count: cache)
    assert broken(tiny(), "rewind")


def test_segments_notice_a_memory_of_what_is_normed_already(monkeypatch):
    """The memory keeps what goes into the norm; of what comes out of it, the keys would be normed twice."""
    monkeypatch.setattr(PreNormModule, "input", lambda residual, stream: 2 * residual.norm(stream, None) + 1)
    assert broken(tiny(), "segments") and not broken(tiny(), "cache")


def test_neighbours_notice_a_norm_over_the_batch():
    network = tiny()
    network.norm = nn.Identity()
    network.norm.forward = lambda x, visible: x - x.mean(0, keepdim=True)
    assert broken(network, "neighbours")


def test_kernels_notice_a_kernel_that_forgets_the_scale(monkeypatch):
    from everyformer.attention.kernels import sdpa

    monkeypatch.setattr(
        sdpa.F, "scaled_dot_product_attention", lambda q, k, v, *_, **options: torch.softmax(q @ k.mT, -1) @ v
    )
    assert broken(tiny(), "kernels")


def test_flex_notices_a_kernel_that_forgets_the_pattern(monkeypatch):
    from everyformer.attention.kernels import flex

    monkeypatch.setattr(flex, "_block_mask", lambda pattern, context, *sizes: None)
    assert broken(tiny(), "flex")


def test_gradient_notices_a_detached_path(monkeypatch):
    original = AttentionModule._attend
    monkeypatch.setattr(AttentionModule, "_attend", lambda layer, q, *given: original(layer, q.detach(), *given))
    assert broken(tiny(), "gradient")


def test_chunks_notice_a_net_that_looks_at_its_neighbours(monkeypatch):
    from everyformer.network.feedforward import FeedForwardModule

    original = FeedForwardModule._net
    monkeypatch.setattr(FeedForwardModule, "_net", lambda net, x: original(net, x) + x.mean(1, keepdim=True))
    assert broken(tiny(), "chunks")


def test_store_notices_a_lost_weight():
    network = tiny()
    network.register_buffer("hidden_state", torch.ones(1), persistent=False)
    original = network.forward
    network.forward = lambda *args, **options: _scaled(original(*args, **options), 2.0)  # lives on the object only
    assert broken(network, "store")


def test_compile_notices_a_graph_break():
    network = tiny()
    original = network.forward

    def noisy(*args, **options):
        torch._dynamo.graph_break()
        return original(*args, **options)

    network.forward = noisy
    with pytest.raises(Exception, match="graph_break"):
        contracts(network, ["compile"])


def test_overfit_notices_a_frozen_model():
    network = tiny()
    network.requires_grad_(False)
    network.body.layers[0].sublayers[-1].out.bias.requires_grad_(True)
    assert broken(network, "overfit")


def _scaled(output, factor):
    return everyformer.Output(output.hidden * factor, output.logits, output.cache, output.aux)


def test_halting_notices_weights_that_do_not_sum_to_one(monkeypatch):
    network = everyformer.build("universal-transformer", "tiny", width=16, heads=2)
    whole = ActState.add
    monkeypatch.setattr(ActState, "add", lambda *given: 0.9 * whole(*given))
    assert broken(network, "halting")


def test_prefix_notices_a_position_that_does_not_see_the_whole_prefix():
    network = single(Attention(Standard(2), parse("causal | prefix(3)")))
    assert not broken(network, "prefix")
    network.body.layers[0].sublayers[0].value = Attention(Standard(2), Causal())
    assert broken(network, "prefix")


def test_every_contract_is_shown_to_fail():
    """Each name in CONTRACTS has a test above that breaks it."""
    import pathlib

    text = pathlib.Path(__file__).read_text()
    missing = [name for name in CONTRACTS if f'"{name}")' not in text and f'["{name}"]' not in text]
    assert not missing, missing


def test_a_model_of_ones_own_is_checked_from_python():
    value = everyformer.member("gpt2", "tiny")
    assert isinstance(value, Model)
    report = contracts(value, ["future", "cache"])
    assert report.ok and [result.contract for result in report.results] == ["future", "cache"]


def test_what_was_asked_for_and_not_checked_is_not_ok():
    report = contracts("bert", ["future", "store"])
    assert (
        not report.ok
        and report.not_applicable == ["future"]
        and "future      does not apply to this model" in str(report)
    )
    with pytest.raises(ValueError, match=r"only=\[\] is empty; give some of pattern, "):
        contracts("gpt2", only=[])
    assert contracts("bert", ["store"]).ok


class TooShort(Pattern, Value, frozen=True):
    """A pattern that states a smaller distance than its predicate allows."""

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return q - k < 9

    def max_distance(self) -> int:
        return 3


def test_a_pattern_that_states_a_wrong_distance_fails_with_a_counterexample():
    layer = Layer((Attention(Standard(2), Causal() & TooShort()),))
    value = Model(width=8, embed=Tokens(7), body=Stack(1, (layer,), PreNorm()), outputs=(Language(),))
    report = contracts(value, only=["pattern"])
    assert not report.ok and "max_distance() is 3, but query 4 attends to key 0 in head 0" in str(report)
    assert contracts("sparse-transformer", only=["pattern"]).ok and contracts("lstm", only=["pattern"]).not_applicable


def test_padding_and_neighbours_notice_a_cache_that_keeps_more_for_some_sequences(monkeypatch):
    """Only a later call can show it."""
    original = Cache.trim

    def keep_what_the_others_need(cache: Cache, length: int) -> Cache:
        kept = original(cache, length)
        if cache.position_BK is None or not cache.has_padding:
            return kept
        return replace(kept, position_BK=cache.position_BK[:, cache.length - kept.length :])

    monkeypatch.setattr(Cache, "trim", keep_what_the_others_need)
    assert broken(tiny(), "padding") and broken(tiny(), "neighbours")


def test_gradient_and_overfit_accept_kinks_and_narrow_parts():
    """A gate behind a ReLU whose features are all 0 at first, a bottleneck of two features, and a grid that is not square."""
    layer = Layer((Attention(Standard(2), parse("causal & ~window(1)"), (ImageBias(2, 4),)), FeedForward(8)))
    body = Stack(1, (layer,), Gated("input", final_norm=True))
    value = Model(
        width=8,
        embed=Tokens(10),
        position=JointMlp(12, hidden=2),
        body=body,
        outputs=(Classify(3, "last", pooler=True),),
        initial=Normal(),
    )
    assert not contracts(value, ["future", "cache", "rewind", "padding", "neighbours", "gradient", "overfit"]).failures


def test_examples_fit_the_parts_of_a_model():
    """Grids that are not square, mixed sequences, several numbers of halting steps, and positions with room for one token."""
    full = Attention(Standard(2), parse("full"), (ImageBias(2, 4),))
    grid = Model(width=8, embed=Patches(2, 1), body=Stack(1, (Layer((full,)),), PreNorm()), outputs=(Classify(3),))
    assert example(grid).inputs.shape == (3, 1, 4, 8) and not contracts(grid, ["gradient", "store"]).failures
    ponder = Layer((PonderRnn(3, epsilon=0.3, bias=-0.5), PonderRnn(2, epsilon=0.3, bias=-0.5)))
    mixed = Mixed(((Tokens(7), None), (Features(2), None)))
    for embed in (Tokens(7), mixed):
        value = Model(width=8, embed=embed, body=Stack(1, (ponder,), PreNorm()))
        assert not contracts(value, [name for name in SWEPT if name != "gradient"]).failures
    single = Layer((Attention(Standard(2), parse("causal"), (ImageBias(1, 1),)),))
    value = Model(width=8, embed=Tokens(7), body=Stack(1, (single,), PreNorm()))
    assert not contracts(value, SWEPT).failures


def test_random_models_keep_the_contracts():
    assert [str(model) for model in islice(random_models(3), 2)] == [
        str(model) for model in islice(random_models(3), 2)
    ]
    report = check(6, seed=3, only=("pattern", "future", "cache", "padding", "neighbours", "store"))
    assert not report.failures, str(report)


@pytest.mark.slow
def test_hundreds_of_random_models_keep_the_contracts(record_property):
    held(check(300), record_property)
