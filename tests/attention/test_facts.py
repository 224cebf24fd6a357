"""What patterns state about themselves, against brute force at lengths beyond every period of their predicates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everyformer import Attention, Cache, DynamicSpan, Language, Layer, Model, PreNorm, Shaw, Stack, Standard, Tokens
from everyformer.attention.check_pattern import check_pattern
from everyformer.attention.evaluate import structural_positions
from everyformer.attention.parse import parse
from everyformer.attention.pattern import (
    Block,
    ByHead,
    Causal,
    Full,
    Graph,
    Local,
    Local2d,
    Pattern,
    Prefix,
    Stride,
    Summary,
    Window,
)
from everyformer.study.contracts import contracts
from everyformer.value import Size, Value

# The least common multiple of all periods: 2, 3, 4, and those of Local2d, height x columns up to 3 x 6.
PERIOD, LENGTH, HEADS = 36, 3 * 36 + 40, 2
numbers, few = st.integers(1, 4), st.integers(1, 3)
leaves = st.one_of(
    st.sampled_from([Full(), Causal()]),
    st.builds(Window, st.integers(1, 30)),
    st.builds(Block, numbers),
    st.builds(Stride, numbers),
    st.builds(lambda last, more: Summary(last + more, last), st.integers(1, 2), st.integers(0, 2)),
    st.builds(Prefix, st.integers(0, 30)),
    st.builds(Local, numbers, st.integers(0, 6)),
    st.builds(
        lambda w, n, h, up, side: Local2d(w * n, h, w, up, side), few, st.integers(1, 2), few, *[st.integers(0, 3)] * 2
    ),
    st.builds(Graph, st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=4).map(tuple)),
)
patterns = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.builds(lambda a, b: a & b, parts, parts),
        st.builds(lambda a, b: a & ~b, parts, parts),
        st.builds(lambda a, b: a | b, parts, parts),
        st.builds(lambda a: ~a, parts),
        st.builds(lambda a, b: ByHead((a, b)), parts, parts),
    ),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(patterns)
def test_facts_hold_at_lengths_beyond_every_period(pattern):
    allowed_HQK = pattern.mask(LENGTH, heads=HEADS)
    ahead = bool(allowed_HQK.triu(1).any())
    assert ahead == pattern.attends_to_future(LENGTH, HEADS)
    assert pattern.attends_to_future(heads=HEADS) or not ahead
    assert not (Causal() & pattern).attends_to_future(heads=HEADS)
    distance_QK = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    end = pattern.max_distance()
    assert end is None or not bool((allowed_HQK & (distance_QK > end)).any())
    assert not bool((allowed_HQK & ~pattern.superset().mask(LENGTH, heads=HEADS)).any())


LATE = {  # patterns that attend to the future from the given position on, and at no earlier one
    "local2d(33, 33, 33, 0, 0) & ~local2d(22, 22, 22, 0, 0)": 484,
    "local2d(42, 42, 42, 0, 0) & ~local2d(40, 40, 40, 0, 0)": 1600,
    "block(700) & ~block(350) & ~prefix(500)": 700,
}


@pytest.mark.parametrize("text", LATE)
def test_patterns_that_attend_to_the_future_late_are_refused(text):
    pattern = parse(text)
    assert not pattern.attends_to_future(LATE[text] // 2) and pattern.attends_to_future()
    layer = Layer((Attention(Standard(2), pattern),))
    with pytest.raises(ValueError, match="attends to the future, or does not state"):
        Model(width=8, embed=Tokens(7), body=Stack(1, (layer,), PreNorm()), outputs=(Language(),)).build()


class Late(Pattern, Value, frozen=True):
    """States to be causal and near, which is wrong in every 30th row of blocks of `size` x `size`."""

    size: Size

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q == k) | ((q % self.size**2 == 0) & (q > 0) & (k == q + 1))

    def is_causal(self) -> bool:
        return True

    def max_distance(self) -> int:
        return 0


def test_a_wrong_statement_is_noticed_at_the_period_of_the_pattern():
    pattern = Late(30)
    assert {899, 900, 901} <= set(structural_positions(pattern))
    assert not pattern.attends_to_future(256) and pattern.attends_to_future()
    with pytest.raises(ValueError, match=r"max_distance\(\) is 0, but query 900 attends to key 901"):
        check_pattern(pattern)


def test_the_contract_future_tries_the_positions_of_the_pattern(monkeypatch):
    """Were the pattern taken for causal, the outputs around its period would show that it is not."""
    monkeypatch.setattr(Late, "attends_to_future", lambda pattern, *_, **__: False)
    layer = Layer((Attention(Standard(2), Late(30)),))
    value = Model(width=8, embed=Tokens(7), body=Stack(1, (layer,), PreNorm()), outputs=(Language(),))
    assert not contracts(value, ["future"]).ok


@pytest.mark.parametrize("kernel", ["auto", "blocked"])
@pytest.mark.parametrize("score_mods", [(), (Shaw(64),)], ids=["alone", "with shaw"])
def test_a_long_dynamic_span_of_a_later_token_changes_nothing_by_rounding(score_mods, kernel):
    torch.manual_seed(0)
    span = DynamicSpan(8, 1000, ramp=32, start=0.02)
    layer = Layer((Attention(Standard(2), Causal(), (*score_mods, span)),))
    value = Model(width=8, embed=Tokens(7), body=Stack(1, (layer,), PreNorm()))
    network = value.build().eval()
    table_VD = network.embed.table.weight
    network.body.layers[0].sublayers[0].score_mods[-1].v_HD.data[:] = 3 * table_VD[0].detach()
    short = int((table_VD @ table_VD[0]).argmin())  # the token with the shortest span; that of token 0 is long
    token_BT = torch.full((1, 300), short)
    other_BT = torch.cat((token_BT[:, :-1], torch.zeros(1, 1, dtype=torch.long)), dim=1)
    for cached in (False, True):
        start, cache = 0, None
        if cached:
            start, cache = 150, network(token_BT[:, :150], cache=Cache()).cache
        one, other = (network(x[:, start:], kernel=kernel, cache=cache).hidden[:, :-1] for x in (token_BT, other_BT))
        assert torch.equal(one, other)
