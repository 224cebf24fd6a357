"""Repeated depths against the literal equations of Graves and of the Universal Transformer, and what halting skips."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from everyformer import (
    Attention,
    Cache,
    Convolution,
    CrossAttention,
    EncoderDecoder,
    EncoderOutput,
    FeedForward,
    Halt,
    Layer,
    LayerNorm,
    Model,
    PostNorm,
    PreNorm,
    Repeat,
    SegmentMemory,
    Sinusoidal,
    Stack,
    Standard,
    TimePosition,
    Tokens,
    parse,
)
from everyformer.attention.context import Context, Probe
from everyformer.network.act import ActState
from everyformer.train.learner import set_checkpoint_segments, set_gather
from tests.network import close, placed, randn, ready, tokens
from tests.network.test_residual import EPS, HEADS, NET, sublayers
from tests.spec import halting as spec
from tests.spec import network as plain

STEPS, EPSILON, WIDTH = 4, 0.3, 8
MODES = ("graves", "freeze", "t2t")
START = {"graves": -1.5, "freeze": -1.5, "t2t": -5.0}  # so that positions differ


def body(
    mode: str,
    pattern: str = "causal",
    net: Any = NET,
    cross: bool = False,
    residual: Any = PostNorm(LayerNorm(EPS)),
    times: int = 1,
    place: Any = None,
    **more: Any,
) -> Any:
    encoder = (CrossAttention(HEADS),) if cross else ()
    layer = Layer((Attention(HEADS, parse(pattern)), *encoder, net), place)
    if mode == "fixed":
        return Repeat(STEPS, (layer,) * times, residual, TimePosition())
    return Halt(
        STEPS,
        (layer,) * times,
        residual,
        TimePosition(),
        mode,
        **({"epsilon": EPSILON, "cost": 0.5, "bias": START[mode]} | more),
    )


def model(mode: str, *arguments: Any, **more: Any) -> Model:
    return Model(width=WIDTH, embed=Tokens(17), body=body(mode, *arguments, **more))


def made(value: Model) -> Any:
    """With halting units that differ between positions."""
    network = ready(value)
    if network.body.unit:
        network.body.unit.map.weight.data *= 2
    return network


def literal(network: nn.Module, x_TD: Tensor, mode: str, sees: plain.Allows, memory: list[Tensor]) -> Any:
    """The depth of a network on one sequence."""
    layer, unit = network.body.layers[0], network.body.unit
    return spec.universal_transformer(
        list(x_TD),
        lambda x: plain.post_norm(x, sublayers(layer, sees, memory), EPS),
        lambda i, n: torch.tensor([plain.sinusoid(k, WIDTH) for k in (i, n)], dtype=torch.float64).sum(0),
        lambda s: torch.sigmoid(unit.map.weight[0] @ s + unit.bias[0]) if unit else s,  # eq. W7
        mode,
        EPSILON,
        STEPS,
    )


@pytest.mark.spec(39, 80, 81, 82, 83, 84, 85, 121, 122, 124)
@pytest.mark.parametrize("mode", ("fixed", *MODES))
@pytest.mark.parametrize("late", (False, True), ids=("early", "late"))
def test_a_repeated_depth_is_the_papers_equations(mode, late):
    network, x_BT = made(model(mode, bias=START.get(mode, 0) - 2 * late)), tokens(2, 5)
    probe, x_BTD = Probe(), placed(network, x_BT)
    output = network(x_BT, probe=probe)
    ponders = []
    for b, x_TD in enumerate(x_BTD):
        y, shares, ponder = literal(network, x_TD, mode, lambda i, j: j <= i, [])
        close(output.hidden[b], torch.stack(y))
        ponders += ponder
        if mode != "fixed":
            close(probe.halts[0][b], torch.stack([torch.stack(list(share)) for share in shares]))
    if mode == "fixed":
        assert output.aux == {} and probe.halts == []
        return
    close(output.aux["ponder"], 0.5 * torch.stack(ponders).mean())
    steps = (probe.halts[0] > 0).sum(-1)
    assert steps.max() == STEPS if late else steps.min() < steps.max() < STEPS  # the limit, or positions that differ
    total = probe.halts[0].sum(-1)
    assert (total < 0.9).any() if mode == "t2t" else (total - 1).abs().max() < 1e-12


@pytest.mark.spec(125)
@pytest.mark.parametrize("mode", ("fixed", "freeze"))
def test_both_sides_repeat_and_the_decoder_attends_to_the_encoders_last(mode):
    pair = EncoderDecoder(encoder=model(mode, "full"), decoder=model(mode, cross=True))
    network, x_BS, x_BT = ready(pair), tokens(1, 4), tokens(1, 3, seed=1)
    count: list[Tensor] = []
    heads = network.decoder.body.layers[0].sublayers[1].heads
    memory = heads.keys_values

    def counted(x_BSD: Tensor) -> Any:
        count.append(x_BSD)
        return memory(x_BSD)

    heads.keys_values = counted
    found = network(x_BS, x_BT)
    assert len(count) == 1  # the same keys serve every step
    encoded, _, before = literal(network.encoder, placed(network.encoder, x_BS)[0], mode, lambda i, j: True, [])
    x_TD = placed(network.decoder, x_BT, encoder_output=EncoderOutput(torch.stack(encoded)[None]))[0]
    y, _, after = literal(network.decoder, x_TD, mode, lambda i, j: j <= i, encoded)
    close(found.hidden[0], torch.stack(y))
    if mode != "fixed":
        close(found.aux["ponder"], 0.5 * (torch.stack(before).mean() + torch.stack(after).mean()))


@pytest.mark.spec(121)
@pytest.mark.parametrize("residual", (PostNorm(), PreNorm()), ids=("post", "pre"))
@pytest.mark.parametrize("net", (FeedForward(12), Convolution(12)), ids=("feedforward", "convolution"))
def test_fixed_steps_are_tied_layers(residual, net):
    layer = Layer((Attention(Standard(2), parse("causal")), net))
    one = Model(width=WIDTH, embed=Tokens(17), body=Repeat(3, (layer,), residual))
    repeated, stacked = ready(one), ready(replace(one, body=Stack(3, (layer,), residual)))
    for other in stacked.body.layers:
        other.load_state_dict(repeated.body.layers[0].state_dict())
    stacked.body.stream.load_state_dict(repeated.body.stream.state_dict())
    stacked.embed.load_state_dict(repeated.embed.state_dict())
    assert torch.equal(repeated(tokens()).hidden, stacked(tokens()).hidden)
    more = replace(one, body=Repeat(7, (layer,), residual)).build()
    assert sum(p.numel() for p in more.parameters()) == sum(p.numel() for p in repeated.parameters())


@pytest.mark.spec(82, 85)
def test_weights_that_sum_to_one_and_those_of_the_published_code():
    """The example of the specification: p = (.1, .2, .3, .2, .2); the interpolation leaves 0.677 of it."""
    h = [torch.tensor([[number]], dtype=torch.float64) for number in (0.1, 0.2, 0.3, 0.2, 0.5)]
    for mode, total in (("graves", 1.0), ("t2t", 0.67744)):
        act = ActState(mode, 0.01, torch.ones(1, 1, dtype=torch.bool))
        weights = [act.add(one, torch.ones(1, 1, 1).double(), n == 4) for n, one in enumerate(h)]
        close(torch.stack(weights).flatten(), torch.tensor([0.1, 0.2, 0.3, 0.2, 0.2], dtype=torch.float64))
        assert abs(act.y_BTD.item() - total) < 1e-12  # of states that are all 1


@pytest.mark.spec(84)
def test_the_ponder_cost_has_a_gradient_through_the_remainder_only():
    h = [torch.tensor([[number]], dtype=torch.float64, requires_grad=True) for number in (0.2, 0.3, 0.9, 0.4)]
    act = ActState("graves", EPSILON, torch.ones(1, 1, dtype=torch.bool))
    for n, one in enumerate(h):
        act.add(one, torch.ones(1, 1, 1).double(), n == 3)
    assert act.ponder_BT.item() == 3.5  # N = 3, R = 0.5
    gradients = torch.autograd.grad(act.ponder_BT.sum(), h, allow_unused=True)
    assert [0.0 if gradient is None else float(gradient) for gradient in gradients] == [-1, -1, 0, 0]


@pytest.mark.spec(84, 124)
def test_steps_after_all_positions_halted_are_not_computed(monkeypatch):
    """Without a cache none is. With one, frozen states still compute their keys, and other states continue."""
    calls: list[int] = []
    for mode, place in [(mode, None) for mode in MODES] + [
        ("freeze", Sinusoidal())
    ]:  # also where a layer adds positions
        network, x_BT = made(model(mode, place=place)), tokens(2, 5)
        network.body.layers[0].register_forward_hook(lambda *_: calls.append(1))
        with torch.no_grad():
            probe = Probe()
            network(x_BT, probe=probe)
            needed = int((probe.halts[0] > 0).sum(-1).max())
            assert 1 < needed < STEPS and len(calls) == needed
            wanted = network(x_BT)
            calls.clear()
            kept = network(x_BT, cache=Cache())
            assert len(calls) == (needed if mode == "freeze" else STEPS) and len(kept.cache.entries) == STEPS
            calls.clear()
            monkeypatch.setattr("everyformer.network.repeat.all_halted", lambda runs: False)
            whole = network(x_BT, cache=Cache())
            assert len(calls) == STEPS
            monkeypatch.undo()
            calls.clear()
        assert torch.equal(wanted.hidden, whole.hidden) and torch.equal(wanted.aux["ponder"], whole.aux["ponder"])
        for one, two in zip(kept.cache.entries, whole.cache.entries, strict=True):
            close(one.k_BHKE, two.k_BHKE)
            close(one.v_BHKE, two.v_BHKE)


@pytest.mark.spec(124)
@pytest.mark.parametrize("pattern", ("causal", "full", "causal & window(3)"))
@pytest.mark.parametrize("cross", (False, True), ids=("alone", "cross"))
@pytest.mark.parametrize("kernel", ("auto", "reference"))
def test_gathered_steps_compute_only_running_positions(pattern, cross, kernel, monkeypatch):
    """The net gets only the running positions, and output, cost, cache and gradients are equal."""
    network, x_BT, seen = made(model("freeze", pattern, cross=cross, place=Sinusoidal())), tokens(2, 7), list[int]()
    monkeypatch.setattr("everyformer.network.repeat.GATHER_SHARE", 1.0)
    visible_BT = torch.tensor([[True] * 7, [False] + [True] * 5 + [False]])
    source = {
        "encoder_output": EncoderOutput(randn(2, 4, WIDTH), torch.tensor([[True] * 4, [True, True, False, False]]))
    }
    network.body.layers[0].sublayers[-1].register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    found = []
    for gather in (False, True):
        set_gather(network, gather)
        seen.clear()
        options = (source if cross else {}) | {"kernel": kernel}
        output = network(x_BT, visible=visible_BT, **options)
        assert seen[0] == 7 and (min(seen) < 7) == gather
        first = network(x_BT[:, :5], visible=visible_BT[:, :5], cache=Cache(), **options)
        results = [output.hidden[visible_BT], output.aux["ponder"]]
        if pattern != "full":  # what came before has not seen what comes
            results.append(network(x_BT[:, 5:], visible=visible_BT[:, 5:], cache=first.cache, **options).hidden[0])
        loss = output.hidden[visible_BT].square().sum() + output.aux["ponder"]
        found.append([*results, *torch.autograd.grad(loss, list(network.parameters()))])
    for one, two in zip(*found, strict=True):
        close(one, two)


@pytest.mark.spec(124)
@pytest.mark.parametrize("reason", ("probe", "kernel", "memory"))
def test_a_step_that_cannot_be_gathered_computes_all_positions(reason, monkeypatch):
    """A probe shows all queries, the other kernels take no part of them, and layer inputs have no keys yet."""
    monkeypatch.setattr("everyformer.network.repeat.GATHER_SHARE", 0.99)
    network, seen, found = made(model("freeze")), list[int](), []
    network.body.layers[0].sublayers[-1].register_forward_hook(lambda _, given, __: seen.append(given[0].shape[1]))
    for gather in (False, True):
        set_gather(network, gather)
        probe, memory = Probe(), Cache(segment_memory=True)
        options = {"probe": {"probe": probe}, "kernel": {"kernel": "blocked"}, "memory": {"cache": memory}}[reason]
        found.append([network(tokens(2, 7), **options).hidden, *probe.weights])
    assert set(seen) == {7}
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


@pytest.mark.spec(124, 125)
def test_after_all_positions_halted_the_encoders_keys_are_kept_for_later_tokens():
    network, x_BT, source = made(model("freeze", cross=True, bias=2.0)), tokens(2, 7), EncoderOutput(randn(2, 4, WIDTH))
    first, probe = network(x_BT[:, :4], cache=Cache(), encoder_output=source), Probe()
    network(x_BT[:, :4], encoder_output=source, probe=probe)
    assert probe.halts[0][..., -1].max() == 0 and len(first.cache.entries) == 2 * STEPS
    found_BTD = network(x_BT[:, 4:], cache=first.cache, encoder_output=source).hidden
    close(found_BTD, network(x_BT, encoder_output=source).hidden[:, 4:])


@pytest.mark.spec(123, 124)
@pytest.mark.parametrize("net", (NET, Convolution(12, kernels=(2, 3))), ids=("feedforward", "convolution"))
@pytest.mark.parametrize("mode", ("fixed", *MODES))
@pytest.mark.parametrize("hidden", (False, True), ids=("keys", "memory"))
def test_padding_in_the_cache_changes_nothing(mode, net, hidden):
    """Prompts of unequal length, padded on the right, and then a token at a time; two layers in a step."""
    network, x_BT = made(model(mode, net=net, times=2)), tokens(2, 7)
    visible_BT = torch.tensor([[True] * 4, [True] * 2 + [False] * 2])
    with torch.no_grad():
        whole = network(x_BT).hidden
        cache = network(x_BT[:, :4], visible=visible_BT, cache=Cache(segment_memory=hidden)).cache
        for time in range(3):
            given = torch.stack((x_BT[0, 4 + time], x_BT[1, 2 + time]))[:, None]
            output = network(given, cache=cache)
            cache = output.cache
            close(output.hidden[:, 0], torch.stack((whole[0, 4 + time], whole[1, 2 + time])))


@pytest.mark.spec(86)
@pytest.mark.parametrize("net", (NET, Convolution(12, kernels=(2, 3))), ids=("feedforward", "convolution"))
@pytest.mark.parametrize("mode", ("fixed", "freeze"))
@pytest.mark.parametrize("hidden", (False, True), ids=("keys", "memory"))
def test_after_a_reset_a_row_starts_anew_in_every_step(mode, net, hidden):
    network, x_BT = made(model(mode, net=net)), tokens(2, 7)
    cache = network(x_BT[:, :4], cache=Cache(segment_memory=hidden)).cache.reset(torch.tensor([False, True]))
    found_BTD = network(x_BT[:, 4:], cache=cache).hidden
    close(found_BTD[0], network(x_BT).hidden[0, 4:])
    close(found_BTD[1], network(x_BT[1:, 4:]).hidden[0])


@pytest.mark.spec(123)
@pytest.mark.parametrize("causal", (True, False))
def test_the_convolution_is_its_equation(causal):
    layer = Convolution(6, kernels=(3, 4), causal=causal).build(WIDTH).double()
    x_BTD = randn(1, 5, WIDTH)
    ahead = (0, 0) if causal else (1, 2)
    x = spec.depthwise_separable_convolution(
        list(x_BTD[0]), list(layer.first_ND), layer.hidden.weight, layer.hidden.bias, ahead[0]
    )
    x = [plain.relu(one) for one in x]
    x = spec.depthwise_separable_convolution(x, list(layer.second_NF), layer.out.weight, layer.out.bias, ahead[1])
    close(layer(x_BTD, Context.of(5, 5, x_BTD.device), None)[0][0], torch.stack(x))
    seen_BT = torch.tensor([[False, True, True, False, False, True, True, True, False]])
    wide_BTD = randn(1, 9, WIDTH, seed=1)
    wide_BTD[seen_BT] = x_BTD[0]
    position_BT = torch.where(seen_BT, seen_BT.cumsum(1) - 1, -1)
    context = Context.of(9, 9, x_BTD.device, key_BK=position_BT)
    close(layer(wide_BTD, context, None)[0][seen_BT], torch.stack(x))


def test_gathering_is_refused_where_it_is_not_possible():
    for value in (model("graves"), model("fixed"), model("freeze", net=Convolution(4)), model("freeze", times=2)):
        with pytest.raises(ValueError, match="no depth of this model copies halted positions"):
            set_gather(value.build(), True)


def test_padding_does_not_change_the_ponder_cost():
    network, x_BT = made(model("graves")), tokens(2, 5)
    visible_BT = torch.ones(2, 8, dtype=torch.bool)
    visible_BT[:, 5:] = False
    padded = torch.cat((x_BT, tokens(2, 3, seed=2)), dim=1)
    close(network(padded, visible=visible_BT).aux["ponder"], network(x_BT).aux["ponder"])


@pytest.mark.spec(131)
@pytest.mark.parametrize("mode, gather", [*((mode, False) for mode in ("fixed", *MODES)), ("freeze", True)])
def test_recomputed_steps_have_the_same_gradients(mode, gather, monkeypatch):
    """Then the backward pass computes each step once more, also one of gathered positions."""
    monkeypatch.setattr("everyformer.network.repeat.GATHER_SHARE", 1.0)
    network = made(model(mode, residual=PostNorm(dropout=0.2))).train()
    network.body.gather = gather
    found, calls = [], list[int]()
    network.body.layers[0].sublayers[-1].register_forward_pre_hook(lambda *_: calls.append(1))
    for checkpoint_segments in (0, 1):
        set_checkpoint_segments(network, checkpoint_segments)
        torch.manual_seed(3)
        calls.clear()
        output = network(tokens())
        steps, loss = len(calls), output.hidden.square().sum() + sum(output.aux.values())
        found.append(torch.autograd.grad(loss, list(network.parameters())))
        assert len(calls) == steps * (1 + checkpoint_segments)
    for one, two in zip(*found, strict=True):
        close(one, two)


def test_halting_in_low_precision_still_sums_to_one():
    network, probe = model("graves").build(), Probe()
    with torch.autocast("cpu", torch.bfloat16):
        network(tokens(2, 6), probe=probe)
    assert probe.halts[0].dtype == torch.float32
    assert (probe.halts[0].sum(-1) - 1).abs().max() < 1e-6


def test_a_convolution_to_both_sides_needs_its_whole_sequence_in_one_call():
    network = made(model("fixed", net=Convolution(4, causal=False)))
    cache = network(tokens(), cache=Cache()).cache
    with pytest.raises(ValueError, match="the outputs of Convolution depend on later positions"):
        network(tokens(), cache=cache)


def test_a_depth_is_causal_if_all_its_sublayers_are():
    each = Convolution(12), Convolution(12, causal=False)
    for mode in ("fixed", "freeze"):
        looks = [body(mode, pattern, net).is_causal() for pattern in ("causal", "full") for net in each]
        assert looks == [True, False, False, False]
    assert [Stack(1, (Layer((net,)),), PreNorm()).is_causal() for net in (*each, NET)] == [True, False, False]


def test_the_memory_of_a_window_keeps_what_a_convolution_reads():
    """The window shows 2 tokens, the convolution reaches back 3: a memory of 64 is cut to what is read of it."""
    value = replace(model("fixed", "causal & window(2)", net=Convolution(4, kernels=(2, 3))), memory=SegmentMemory(64))
    network, x_BT = made(value), tokens(2, 12)
    cache, found = Cache(), list[Tensor]()
    with torch.no_grad():
        for time in range(12):
            output = network(x_BT[:, time : time + 1], cache=cache)
            cache, found = output.cache, [*found, output.hidden]
        close(torch.cat(found, dim=1), network(x_BT).hidden)
    assert cache.length == 3
