"""Parts at the limits of their definitions: equalities, first and last positions, one direction and two."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from everyformer import (
    Attention,
    AuxiliaryPredictions,
    Cache,
    Causal,
    Context,
    FeedForward,
    Grid,
    Language,
    Layer,
    Learned,
    Lstm,
    Mixed,
    Model,
    Nodes,
    PonderRnn,
    PreNorm,
    Probe,
    SegmentMemory,
    Stack,
    Standard,
    TimePosition,
    Tokens,
    Window,
)
from everyformer.attention.span import DynamicSpan, windows
from everyformer.network.act import ActState
from everyformer.network.auxiliary import AuxiliaryNetwork
from everyformer.network.convolution import shift
from everyformer.network.output_head import vocabulary_size
from everyformer.network.sublayer import SublayerModule
from tests.network import close, model, randn, ready, stack, tokens

CPU = torch.device("cpu")


@pytest.mark.spec(81, 85)
@pytest.mark.parametrize("mode, halts", [("graves", True), ("freeze", True), ("t2t", False)])
def test_a_sum_of_exactly_one_minus_epsilon_halts_except_in_the_published_code(mode, halts):
    """N = min {n : sum h >= 1 - eps}; tensor2tensor has > there."""
    act = ActState(mode, 0.5, torch.ones(1, 1, dtype=torch.bool))
    act.add(torch.full((1, 1), 0.5), torch.ones(1, 1, 2), last=False)
    assert bool(act.running_BT) != halts


def test_time_starts_at_step_0():
    module, x, place = TimePosition().build(8), randn(1, 3, 8), torch.arange(3)[None]
    close(module(x, place), module(x, place, 0))
    assert not torch.equal(module(x, place), module(x, place, 1))


@pytest.mark.parametrize("distance", [-7, -2, -1, 0, 1, 2, 7])
def test_a_shift_with_nothing_hidden_is_the_plain_shift(distance):
    x = randn(2, 5, 3)
    close(shift(x, distance, torch.ones(2, 5, dtype=torch.bool)), shift(x, distance, None))
    wanted = torch.zeros_like(x)
    for t in range(5):
        if 0 <= t - distance < 5:
            wanted[:, t] = x[:, t - distance]
    close(shift(x, distance, None), wanted)


@pytest.mark.spec(41)
def test_a_grid_without_blocks_is_in_raster_order_with_a_table_for_each_axis():
    row, column = Grid(2, 3).cells(torch.arange(6))
    assert row.tolist() == [0, 0, 0, 1, 1, 1] and column.tolist() == [0, 1, 2] * 2
    sizes = {tuple(weight.shape) for weight in Grid(2, 3, learned=True).build(8).parameters()}
    assert sizes == {(2, 4), (3, 4)}


@pytest.mark.spec(77)
def test_a_layer_adds_its_positions_from_0_on():
    body = Stack(1, (Layer((FeedForward(4),), position=Learned(6)),), PreNorm())
    (module,) = ready(Model(width=8, embed=Tokens(5), body=body)).body.layers
    x = randn(1, 4, 8)
    close(module.add_position(x, Context.of(4, 4, CPU)), x + module.position.table.weight[:4])


@pytest.mark.spec(42)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("forget", [True, False])
def test_the_fused_lstm_equals_its_steps(bias, forget):
    network = ready(model(None, net=Lstm(bias=bias, forget=forget)))
    close(network(tokens(length=7)).hidden, network(tokens(length=7), kernel="reference").hidden)


@pytest.mark.spec(47)
def test_a_probe_has_one_table_for_each_layer_of_two_directions():
    network = ready(model(None, net=Lstm(bidirectional=True), layers=3))
    probe = Probe()
    network(tokens(length=5), probe=probe)
    assert [tuple(weights.shape) for weights in probe.state_weights] == [(2, 8, 5, 5)] * 3
    forward, backward = probe.state_weights[0].split(4, dim=1)
    assert forward.triu(1).abs().max() == 0 and backward.tril(-1).abs().max() == 0


def test_a_cache_says_whether_it_has_padding_and_a_saved_memory_has_no_gradient():
    network = ready(model("causal", layers=1))
    visible = torch.tensor([[True] * 6, [False] * 2 + [True] * 4])
    assert network(tokens(), cache=Cache()).cache.has_padding is False
    assert network(tokens(), cache=Cache(), visible=visible).cache.has_padding is True
    network = ready(model("causal", net=Lstm(), memory=SegmentMemory(4)))
    cache = network(tokens(), cache=Cache(segment_memory=True)).cache
    again = Cache.from_state_dict(cache.state_dict())
    assert all(entry.detached for entry in again.entries) and again.length == cache.length


@pytest.mark.spec(75, 76)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_every_layer_predicts_by_default(layers):
    value = model("causal", layers=layers, outputs=(Language(),), auxiliary=AuxiliaryPredictions())
    output, predictions = AuxiliaryNetwork(ready(value))(tokens())
    wanted = [(layer, offset) for layer in range(1, layers) for offset in (0, 1)] + [(layers, 1)]
    assert [(one.layer, one.offset) for one in predictions] == wanted
    assert float(output.aux["unused"]) == 0


@pytest.mark.parametrize("bias, steps", [(0.0, 2), (-1.0, 4), (-3.0, 22), (50.0, 1), (-1000.0, 30)])
def test_pondering_begins_with_about_the_steps_that_its_bias_gives(bias, steps):
    """h = sigma(b) on every step, so 1 / h = 1 + exp(-b) steps reach a sum of 1, rounded up and limited."""
    (cell,) = PonderRnn(30, bias=bias).build(8).cells
    assert cell.initial_steps == steps


def test_inputs_of_every_part_are_checked():
    mixed = ready(model("full", embed=Mixed(((Tokens(5), None), (Nodes(3, kinds=2), None)))))
    x, kind = randn(2, 4, 3), torch.tensor([[0, 1, 1, 0]] * 2)
    assert mixed((torch.tensor([[0, 4]] * 2), (x, kind))).hidden.shape == (2, 6, 8)
    with pytest.raises(ValueError, match="token 5 is outside the vocabulary of 5"):
        mixed((torch.tensor([[0, 5]] * 2), (x, kind)))
    with pytest.raises(ValueError, match="token -1 is outside the vocabulary of 5"):
        mixed((torch.tensor([[0, -1]] * 2), (x, kind)))
    with pytest.raises(ValueError, match="kinds of nodes are -1 to 1, but the model has 2"):
        mixed((torch.tensor([[0, 4]] * 2), (x, kind - torch.tensor([1, 0, 0, 0]))))
    with pytest.raises(ValueError, match="kinds of nodes are 0 to 2"):
        mixed((torch.tensor([[0, 4]] * 2), (x, kind + kind)))


@pytest.mark.spec(96)
def test_windows_cover_the_longest_span_of_each_head():
    """Rounded up to a multiple of 64; one window if all heads have the same."""
    value = DynamicSpan(8, 1000, ramp=32)
    assert windows(torch.tensor([10.0]), value) == Window(64) == windows(torch.tensor([10.0, 20.0]), value)
    assert str(windows(torch.tensor([10.0, 33.0]), value)) == "by_head(window(64), window(128))"
    assert windows(torch.tensor([5000.0]), value) == Window(1001) == windows(torch.tensor([torch.nan]), value)
    module, context = value.build(2, 4, 4).train(), Context.of(3, 3, CPU)
    module.v_HD.data = torch.tensor([[1.0] + [0.0] * 7, [0.0] * 8])
    x = torch.zeros(4, 3, 8)
    x[3, 1, 0] = 20  # one token of one sequence has a long span in the first head
    context = replace(context, side=replace(context.side, query_inputs=x))
    assert str(module.visible_keys(context)) == "by_head(window(1001), window(192))"  # 100 and the ramp, rounded up


def test_a_stack_of_no_attention_and_one_of_it_have_the_entries_they_need():
    assert len(ready(model("causal", layers=3)).body.new_entries()) == 3
    body = stack(2, Attention(Standard(2), Causal()), FeedForward(4), Lstm())
    assert [type(entry).__name__ for entry in body.build(8).new_entries()] == ["KVCache", "RecurrentState"] * 2


def test_a_sublayer_refuses_the_entry_of_another_kind_and_by_default_keeps_nothing():
    attention, recurrent = Attention(Standard(2), Causal()).build(8), Lstm().build(8)
    for module, entry in ((attention, recurrent.new_entry()), (recurrent, attention.new_entry())):
        with pytest.raises(ValueError, match="the cache of another model"):
            module(torch.zeros(1, 3, 8), Context.of(3, 3, CPU), entry)
    assert SublayerModule().max_distance() == 0 and SublayerModule().new_entry() is None


def test_a_vocabulary_is_that_of_a_token_embedding():
    assert vocabulary_size(Tokens(5)) == 5
    with pytest.raises(ValueError, match="the inputs are mixed tokens"):
        vocabulary_size(Mixed(((Tokens(5), None), (Nodes(3), None))))
    with pytest.raises(ValueError, match="the inputs are nodes"):
        vocabulary_size(Nodes(3))
