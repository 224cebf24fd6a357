"""The contracts over every legal combination and every member, and that each contract notices what it is for."""

from __future__ import annotations

from dataclasses import astuple
from itertools import combinations, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import everyformer
from everyformer.attention.heads import Standard
from everyformer.attention.parse import parse
from everyformer.attention.relative import FourTerm
from everyformer.attention.rule import Rotary, RuleModule, Shaw
from everyformer.attention.scene import Scene
from everyformer.attention.span import DynamicSpan, Span
from everyformer.network import depth, halting
from everyformer.network.depth import Attention, Layer, Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.head import Language, PerToken
from everyformer.network.model import Model, Network
from everyformer.network.past import Past
from everyformer.network.position import Learned
from everyformer.network.wiring import PreNorm, PreNormStep, Reversible
from everyformer.study.contracts import CONTRACTS, Report, contracts
from everyformer.study.sweep import (
    BODIES,
    GATES,
    HEADS,
    PARTS,
    PATTERNS,
    POSITIONS,
    RULES,
    SWEPT,
    WIDTH,
    WIRINGS,
    cells,
    sweep,
)


def held(report: Report, record_property) -> None:
    record_property("findings", [astuple(finding) for finding in report.findings])
    record_property("refused", report.refused)
    assert not report.broken, str(report)


def attention(model: Model) -> Attention | None:
    return model.body.each[0].attention if model.body.each else None


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_wherever_two_parts_meet_the_contracts_are_kept(pattern, record_property):
    models = [model for model in cells() if model and attention(model) and attention(model).pattern == pattern]
    held(sweep(models), record_property)


@pytest.mark.parametrize("body", BODIES, ids=str)
def test_every_body_without_attention_keeps_the_contracts(body, record_property):
    held(sweep(model for model in cells() if model and model.body == body), record_property)


@pytest.mark.parametrize("name", everyformer.members())
def test_every_member_keeps_the_contracts(name, record_property):
    held(contracts(name), record_property)


@pytest.mark.slow
def test_every_pattern_rule_and_wiring_keep_the_contracts_together(record_property):
    held(sweep(cells(triples=True), (*SWEPT, "flex")), record_property)


@pytest.mark.parametrize(
    ("pattern", "rules"),
    [*((pattern, ()) for pattern in PATTERNS), *((parse("causal"), rules) for rules in RULES[1:])],
    ids=lambda part: " ".join(type(one).__name__ for one in part) or "none" if isinstance(part, tuple) else str(part),
)
def test_flex_serves_every_pattern_and_every_rule(pattern, rules, record_property):
    layer = Layer(Attention(Standard(2), pattern, rules), None)
    report = contracts(Model(width=WIDTH, embed=Tokens(7), body=Stack(1, (layer,), PreNorm())), "flex")
    assert len(report.findings) == (rules != (Shaw(2, values=True),))  # that one needs the weights
    held(report, record_property)


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: " ".join(type(rule).__name__ for rule in rules) or "none")
@pytest.mark.parametrize("text", ["causal", "window(3)"])
def test_every_rule_compiles_whole(text, rules):
    """With and without padding, over positions that have an end."""
    layer = Layer(Attention(Standard(2), parse(text), rules), FeedForward(8))
    value = Model(
        width=WIDTH, embed=Tokens(7), position=Learned(16), body=Stack(1, (layer,), PreNorm()), heads=(PerToken(2),)
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
    layer = Layer(None, FeedForward(32))
    value = Model(width=16, embed=Tokens(7), body=Stack(1, (layer,), PreNorm()), heads=(Language(),))
    assert not contracts(value, "overfit").ok


def test_frozen_and_compiled_networks_are_checked_too():
    network = tiny().requires_grad_(False)
    report = contracts(network, ["cache", "kernels", "gradient", "overfit"])
    assert not report.broken and report.unasked == ["gradient", "overfit"]  # there is nothing to learn
    assert contracts(torch.compile(tiny(), backend="eager"), ["cache", "store"]).ok


def test_every_two_parts_meet_or_are_refused(record_property):
    met, back = set(), set()
    for model in cells():
        if model and attention(model):
            (layer,), place = model.body.each, (type(model.body), getattr(model.body, "mode", None))
            one = layer.attention
            parts = one.pattern, one.rules, model.body.wiring, one.heads, model.position, layer.feedforward
            pairs = set(combinations(enumerate((*parts, (model.embed, model.heads), place)), 2))
            met |= pairs
            if model.body.looks_back_only():
                back |= pairs
    refused = sum(model is None for model in cells())
    record_property("refused", refused)
    assert len(met) + refused == sum(len(one) * len(two) for one, two in combinations(PARTS, 2))
    # And where a cache can be tried on them, unless one of the two looks ahead itself.
    causal = [pattern for pattern in PATTERNS if not pattern.looks_ahead(heads=2)]
    plain = [wiring for wiring in (*WIRINGS, *GATES) if not wiring.norm.mixes_positions]
    for (i, ones), (j, others) in combinations(enumerate((causal, RULES, plain, HEADS, POSITIONS)), 2):
        for one, other in product(ones, others):
            assert ((i, one), (j, other)) in back or ((i, one), (j, other)) not in met, (one, other)


def test_combinations_that_nobody_else_has_are_cells():
    """Sparse and relative, span and memory, reversible and memory, local and rotary with a cache, a graph in some heads."""
    models = [model for model in cells() if model and attention(model) and model.body.looks_back_only()]

    def some(pattern: str = "", rule: type | None = None, wiring: type | None = None) -> bool:
        return any(
            pattern in str(attention(model).pattern)
            and (rule is None or any(isinstance(one, rule) for one in attention(model).rules))
            and (wiring is None or isinstance(model.body.wiring, wiring))
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


def broken(network: Network, contract: str) -> bool:
    return not contracts(network, [contract]).ok


class Mean(nn.Module):
    """A norm that looks at other positions."""

    def forward(self, x_BTD: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        return x_BTD - x_BTD.mean(1, keepdim=True)


class Ahead(RuleModule):
    """A rule that lets the length of the sequence into the score."""

    def turn(self, q_BHQE: Tensor, k_BHKE: Tensor, scene: Scene) -> tuple[Tensor, Tensor]:
        return q_BHQE * scene.keys, k_BHKE


def test_future_notices_a_norm_over_positions():
    network = tiny()
    step = network.body.layers[0].steps["attention"]
    assert isinstance(step, PreNormStep)
    step.norm = Mean()
    assert broken(network, "future")


def test_cache_and_padding_notice_a_rule_that_counts_keys():
    network = tiny()
    network.body.layers[0].attention.rules.append(Ahead())
    assert broken(network, "cache") and broken(network, "padding")


def test_rewind_notices_a_past_that_is_not_rolled_back(monkeypatch):
    monkeypatch.setattr(Past, "roll_back", lambda past, count: past)
    assert broken(tiny(), "rewind")


def test_segments_notice_a_memory_of_what_is_normed_already(monkeypatch):
    """The memory keeps what goes into the norm; of what comes out of it, the keys would be normed twice."""
    monkeypatch.setattr(PreNormStep, "stream", lambda step, state: 2 * step.norm(state, None) + 1)
    assert broken(tiny(), "segments") and not broken(tiny(), "cache")


def test_neighbours_notice_a_norm_over_the_batch():
    network = tiny()
    network.norm = nn.Identity()
    network.norm.forward = lambda x, visible: x - x.mean(0, keepdim=True)
    assert broken(network, "neighbours")


def test_kernels_notice_a_kernel_that_forgets_the_scale(monkeypatch):
    from everyformer.attention.kernels import sdpa

    monkeypatch.setattr(
        sdpa.F, "scaled_dot_product_attention", lambda q, k, v, **options: torch.softmax(q @ k.mT, -1) @ v
    )
    assert broken(tiny(), "kernels")


def test_flex_notices_a_kernel_that_forgets_the_pattern(monkeypatch):
    from everyformer.attention.kernels import flex

    monkeypatch.setattr(flex, "_block_mask", lambda pattern, scene, *sizes: None)
    assert broken(tiny(), "flex")


def test_gradient_notices_a_detached_path(monkeypatch):
    original = depth.AttentionLayer._attend
    monkeypatch.setattr(
        depth.AttentionLayer, "_attend", lambda layer, q, keys, scene: original(layer, q.detach(), keys, scene)
    )
    assert broken(tiny(), "gradient")


def test_chunks_notice_a_net_that_looks_at_its_neighbours(monkeypatch):
    from everyformer.network.feedforward import FeedForwardLayer

    original = FeedForwardLayer._net
    monkeypatch.setattr(FeedForwardLayer, "_net", lambda net, x: original(net, x) + x.mean(1, keepdim=True))
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
    network.body.layers[0].feedforward.out.bias.requires_grad_(True)
    assert broken(network, "overfit")


def _scaled(output, factor):
    return everyformer.Output(output.hidden * factor, output.logits, output.past, output.aux)


def test_halting_notices_weights_that_do_not_sum_to_one(monkeypatch):
    network = everyformer.build("universal-transformer", "tiny", width=16, heads=2)
    whole = halting.Account.add
    monkeypatch.setattr(halting.Account, "add", lambda *given: 0.9 * whole(*given))
    assert broken(network, "halting")


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
    assert report.ok and [finding.contract for finding in report.findings] == ["future", "cache"]


def test_what_was_asked_for_and_not_checked_is_not_ok():
    report = contracts("bert", ["future", "store"])
    assert not report.ok and report.unasked == ["future"] and "future      does not speak of this model" in str(report)
    with pytest.raises(ValueError, match=r"only=\[\] names no contract; give some of future, "):
        contracts("gpt2", only=[])
    assert contracts("bert", ["store"]).ok
