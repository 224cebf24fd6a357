"""Recurrent depths: the equations, the weights of what came before, and a state that padding and cuts do not change."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from everyformer import (
    AblatedLstm,
    Attention,
    Cache,
    FeedForward,
    Language,
    Layer,
    Lstm,
    Model,
    PerToken,
    PreNorm,
    Probe,
    SegmentMemory,
    Stack,
    Standard,
    Tokens,
    generate,
    member,
    parse,
)
from everyformer.attention.attend import UnsupportedKernel
from everyformer.family.table import parameters
from everyformer.infer.beam import beam_search
from everyformer.network.lstm_cell import LstmCell
from everyformer.network.scan import scan
from tests.network import VOCABULARY, close, placed, randn, ready, stack, tokens
from tests.spec import recurrent as spec

BODIES: dict[str, Any] = {
    "13-18": stack(1, Lstm(activation="sigmoid", bias=False)),
    "standard": stack(1, Lstm()),
    "1997": stack(1, Lstm(forget=False)),
    "1997 without biases": stack(1, Lstm(forget=False, bias=False)),
    "20-21": stack(1, AblatedLstm(activation="sigmoid", bias=False)),
    "ablated": stack(1, AblatedLstm()),
}
KERNELS = ["reference", "auto"]


def model(body: Any, **more: Any) -> Model:
    return Model(width=6, embed=Tokens(VOCABULARY), body=body, outputs=(Language(),), **more)


def maps(cell: LstmCell) -> tuple[spec.Maps, spec.Maps, spec.Maps]:
    """The weights of a cell by the names of the equations: W_x, W_h and the biases."""

    def by_name(x: Tensor | None) -> spec.Maps:
        return {} if x is None else dict(zip(cell.gates, x.detach().chunk(len(cell.gates)), strict=True))

    return by_name(cell.of_x.weight), by_name(cell.of_h and cell.of_h.weight), by_name(cell.of_x.bias)


def literal(value: Any, cell: LstmCell, x_TD: Tensor) -> Any:
    w_x, w_h, b = maps(cell)
    activation = math.tanh if value.activation == "tanh" else spec.sigma
    rows = list(x_TD.detach())
    return spec.lstm(rows, w_x, w_h, b, activation) if w_h else spec.ablated(rows, w_x, b, activation)


@pytest.mark.spec(42, 43, 45)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", BODIES)
def test_a_layer_is_its_equations(name, kernel):
    network, x = ready(model(BODIES[name])), tokens(2, 7)
    hidden = network(x, kernel=kernel).hidden
    for row, x_TD in zip(hidden, placed(network, x), strict=True):
        h = literal(BODIES[name].layers[0].sublayers[0], network.body.layers[0].sublayers[0].cells[0], x_TD)[0]
        close(row, torch.stack(h))


@pytest.mark.spec(42)
def test_the_standard_form_is_torchs():
    network, x = ready(model(stack(1, Lstm()))), tokens(2, 7)
    cell, peer = network.body.layers[0].sublayers[0].cells[0], torch.nn.LSTM(6, 6, batch_first=True).double()
    weights = {"weight_ih_l0": cell.of_x.weight, "weight_hh_l0": cell.of_h.weight, "bias_ih_l0": cell.of_x.bias}
    peer.load_state_dict({**weights, "bias_hh_l0": torch.zeros(24)})
    for kernel in KERNELS:
        close(network(x, kernel=kernel).hidden, peer(placed(network, x))[0])


@pytest.mark.spec(44, 46)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", BODIES)
def test_a_probe_shows_the_weights_of_equation_19(name, kernel):
    """They are those of the definition, 0 for what is to come, and their sum over the candidates is the state."""
    network, x, probe = ready(model(BODIES[name])), tokens(2, 6), Probe()
    cache = network(x, kernel=kernel, probe=probe, cache=Cache()).cache
    (w_BDQK,), (gates,) = probe.state_weights, probe.cell_gates
    cell = network.body.layers[0].sublayers[0].cells[0]
    assert set(gates) == {one for one in ("input", "forget", "output") if one[0] in cell.gates}
    for row, x_TD in enumerate(placed(network, x)):
        h, c, new, i, f = literal(BODIES[name].layers[0].sublayers[0], cell, x_TD)
        o = gates["output"][row] if "output" in gates else 1
        close(o * cell.activation(torch.stack(c)), torch.stack(h))  # eq. T18
        for gate, values in (("input", i), ("forget", f)):
            if gate in gates:
                close(gates[gate][row], torch.stack(values))
        close(w_BDQK[row].permute(1, 2, 0), torch.stack([torch.stack(w) for w in spec.weights(i, f)]))
        close(torch.einsum("dqk,kd->qd", w_BDQK[row], torch.stack(new)), torch.stack(c))  # eq. T19
        close(cache.entries[0].tensors[0][row, :, -6:], torch.stack(c))
    assert torch.equal(w_BDQK, w_BDQK.tril())


@pytest.mark.spec(46)
def test_an_older_position_may_have_a_larger_weight():
    """T: f <= 1, so w_{t,r} <= w_{t,s} for r < s. Not so, for i differs; of the product of the f alone it is true."""
    i, f = ([torch.tensor([one], dtype=torch.float64) for one in row] for row in ((0.9, 0.1, 0.5), (0.5, 0.9, 0.9)))
    w = [float(one) for one in spec.weights(i, f)[2]]
    assert w == pytest.approx([0.729, 0.09, 0.5]) and w[0] > w[1]
    decay = spec.weights([torch.ones(1)] * 3, f)[2]
    assert decay[0] <= decay[1] <= decay[2]
    # A cell of the library that has these gates: one number, driven by its input through i's and f's own maps.
    cell = LstmCell(2, 1, "ifc", "sigmoid", False, False).double()
    with torch.no_grad():
        cell.of_x.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
        x_1TD = torch.logit(torch.tensor([[[0.9, 0.5], [0.1, 0.9], [0.5, 0.9]]], dtype=torch.float64))
        found = cell._weights(x_1TD, None, torch.zeros(1, 3, 1))[0, 0, 2]
    assert found.tolist() == pytest.approx([0.729, 0.09, 0.5])


@pytest.mark.spec(45)
@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 513])
def test_a_scan_is_the_recurrence_with_its_gradients(length):
    """Also where f is 0 or 1."""
    f, x = torch.sigmoid(6 * randn(2, length, 3)), randn(2, length, 3, seed=1)
    f[:, ::3, 0], f[:, :, 1] = 0.0, 1.0
    c, states = torch.zeros(2, 3, dtype=torch.float64), []
    f.requires_grad_(), x.requires_grad_()
    for time in range(length):
        c = x[:, time] + f[:, time] * c
        states.append(c)
    wanted, found, direction = torch.stack(states, 1), scan(f, x), randn(2, length, 3, seed=2)
    close(found, wanted)
    for one, two in zip(*(torch.autograd.grad((y * direction).sum(), (f, x)) for y in (found, wanted)), strict=True):
        close(one, two)
    if length == 3:
        assert torch.autograd.gradgradcheck(scan, (f, x))


@pytest.mark.spec(45)
@pytest.mark.parametrize("body", [stack(3, AblatedLstm()), stack(1, AblatedLstm(bidirectional=True))])
def test_the_ablated_lstm_is_computed_in_logarithmic_depth(body):
    """Operations, forward and backward: as many more for each doubling of the length."""
    network, counts = ready(Model(width=6, embed=Tokens(VOCABULARY), body=body, outputs=(PerToken(2),))), []
    for length in (64, 128, 256, 512):
        with Count() as count:
            network(tokens(1, length)).hidden.sum().backward()
        counts.append(count.operations)
    more = [b - a for a, b in pairwise(counts)]
    assert more[0] == more[1] == more[2] < 400


@pytest.mark.spec(48)
def test_the_operations_of_an_lstm_grow_with_the_length_and_those_of_attention_do_not():
    """Forward and backward; what that means in time is measured by bench.recurrent."""
    counts = []
    for body in (
        stack(1, Lstm()),
        Stack(1, (Layer((Attention(Standard(2), parse("causal")), FeedForward(8))),), PreNorm()),
    ):
        network = ready(model(body))
        for length in (16, 32, 48):
            with Count() as count:
                network(tokens(1, length), kernel="reference").logits.sum().backward()
            counts.append(count.operations)
    lstm, transformer = counts[:3], counts[3:]
    assert lstm[2] - lstm[1] == lstm[1] - lstm[0] > 16 * 10
    assert transformer[0] == transformer[1] == transformer[2] < lstm[0]


class Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.operations += 1
        return f(*args, **(kwargs or {}))


@pytest.mark.spec(47)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "body",
    [stack(1, Lstm(bidirectional=True)), stack(1, AblatedLstm(bidirectional=True))],
    ids=lambda b: type(b).__name__,
)
def test_a_bidirectional_layer_is_one_lstm_in_each_direction(body, kernel):
    network = ready(Model(width=6, embed=Tokens(VOCABULARY), body=body, outputs=(PerToken(2),)))
    x, probe = tokens(2, 7), Probe()
    hidden = network(x, kernel=kernel, probe=probe).hidden
    value = body.layers[0].sublayers[0]
    there, back = network.body.layers[0].sublayers[0].cells
    for row, x_TD in enumerate(placed(network, x)):
        one, two = literal(value, there, x_TD), literal(value, back, x_TD.flip(0))
        close(hidden[row], torch.cat((torch.stack(one[0]), torch.stack(two[0]).flip(0)), dim=1))
        w = torch.stack([torch.stack(w) for w in spec.weights(two[3], two[4])]).flip(0, 1)
        close(probe.state_weights[0][row, 3:].permute(1, 2, 0), w)
        for gate, of_one, of_two in (("input", one[3], two[3]), ("forget", one[4], two[4])):
            both = torch.cat((torch.stack(of_one), torch.stack(of_two).flip(0)), dim=1)
            close(probe.cell_gates[0][gate][row], both)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "net", [Lstm(bidirectional=True), AblatedLstm(bidirectional=True)], ids=lambda net: type(net).__name__
)
def test_padding_changes_neither_direction(net, kernel):
    value = Model(width=6, embed=Tokens(VOCABULARY), body=stack(2, net), outputs=(PerToken(2),))
    network, x = ready(value), tokens(2, 6)
    visible = torch.tensor([[True] * 6, [False, True, True, False, True, False]])
    hidden = network(x, visible=visible, kernel=kernel, probe=(probe := Probe())).hidden
    assert len(probe.cell_gates) == 2  # one for each layer
    for row in range(2):
        seen, alone = visible[row], Probe()
        close(hidden[row][seen], network(x[row][seen][None], kernel=kernel, probe=alone).hidden[0])
        for one, two in zip(probe.cell_gates, alone.cell_gates, strict=True):
            for gate in one:
                close(one[gate][row][seen], two[gate][0])


@pytest.mark.parametrize("name", BODIES)
def test_a_state_continues_across_padding_and_calls(name):
    """Sequences of different lengths with padding anywhere, piece by piece, equal each of them alone."""
    network = ready(model(BODIES[name]))
    x, seen = tokens(3, 8), torch.rand(3, 8, generator=torch.Generator().manual_seed(3)) < 0.6
    seen[:, 0] = seen[:, 4] = True
    for kernel in KERNELS:
        first = network(x[:, :4], visible=seen[:, :4], cache=Cache(), kernel=kernel)
        second = network(x[:, 4:], visible=seen[:, 4:], cache=first.cache.trim(1), kernel=kernel)
        hidden = torch.cat((first.hidden, second.hidden), dim=1)
        for row in range(3):
            close(hidden[row][seen[row]], network(x[row][seen[row]][None]).hidden[0])


def test_a_state_needs_one_cached_position():
    """A cache trimmed to one position continues exactly; generation is the same with and without a cache."""
    network, x = ready(model(stack(2, Lstm()))), tokens(2, 9)
    cache = network(x[:, :6], cache=Cache()).cache
    close(network(x[:, 6:], cache=cache.trim(1)).hidden, network(x).hidden[:, 6:])
    assert network.max_distance() == 1
    one, two = (generate(network, [[1, 2], [3, 4, 5]], 8, seed=0, cached=cached) for cached in (True, False))
    assert one == two
    one, two = (
        beam_search(network, [[1, 2], [3]], end=0, max_tokens=6, beam=3, cached=cached) for cached in (True, False)
    )
    assert one == two


def test_a_cache_is_rolled_back_into_an_earlier_call():
    network, x = ready(model(stack(2, Lstm()))), tokens(2, 9)
    cache = network(x[:, 5:], cache=network(x[:, :5], cache=Cache()).cache).cache
    close(network(x[:, 3:], cache=cache.roll_back(6)).hidden, network(x).hidden[:, 3:])


def test_a_training_call_cannot_be_rolled_back_into():
    network, x = ready(model(stack(2, Lstm()))), tokens(2, 9)
    cache = network(x, cache=Cache()).cache
    close(network(x[:, 5:], cache=cache.roll_back(4)).hidden, network(x).hidden[:, 5:])
    cache = network.train()(x, cache=Cache(segment_memory=True)).cache
    with pytest.raises(
        ValueError, match=r"cannot roll back 4 positions: .* in training mode a call keeps its last state alone"
    ):
        cache.roll_back(4)
    assert not cache.entries[0].tensors[0].requires_grad


def test_a_carried_state_is_equal_after_saving():
    """One detached state is carried from segment to segment, whatever the length of the memory."""
    network, x = ready(model(stack(2, Lstm()), memory=SegmentMemory(4))).train(), tokens(2, 8)
    cache = network(x[:, :4], cache=Cache(segment_memory=True)).cache
    assert [entry.tensors[0].shape for entry in cache.entries] == [(2, 1, 12)] * 2
    again = Cache.from_state_dict(cache.state_dict())
    close(network(x[:, 4:], cache=again).hidden, network.eval()(x).hidden[:, 4:])
    longer = network(x[:, 4:], cache=again).cache
    assert longer.length == 1 and int(longer.position_BK.max()) == 7


def test_low_precision_stays_close_to_float64():
    """States are kept in float32; under autocast all ways are near the exact answer."""
    for body in (stack(2, Lstm()), stack(2, Lstm(activation="sigmoid")), stack(2, AblatedLstm())):
        network, x = ready(model(body)), tokens(2, 40)
        exact = network(x).hidden
        with torch.autocast("cpu", torch.bfloat16):
            for kernel in KERNELS:
                assert (network.float()(x, kernel=kernel).hidden - exact).abs().max() < 0.05
                cache = network(x[:, :20], kernel=kernel, cache=Cache()).cache
                assert (network(x[:, 20:], kernel=kernel, cache=cache).hidden - exact[:, 20:]).abs().max() < 0.05


def test_gradients_are_the_same_in_float32_in_training_and_out_of_it():
    network, x, found = model(stack(2, Lstm())).build(), tokens(2, 20), []
    for mode, kernel in ((True, "auto"), (False, "auto"), (False, "reference")):
        network.train(mode).zero_grad()
        network(x, kernel=kernel).logits.square().sum().backward()
        found.append(torch.cat([p.grad.flatten() for p in network.parameters()]))
    assert torch.equal(found[0], found[1]) and (found[0] - found[2]).abs().max() < 1e-5 * found[2].abs().max()


def test_the_forget_bias_starts_at_1_and_every_map_has_a_gradient():
    network = model(stack(2, Lstm(), residual=PreNorm())).build()
    assert all(bool((layer.sublayers[0].cells[0].of_x.bias[6:12] == 1).all()) for layer in network.body.layers)
    output = network(tokens(2, 6))
    F.cross_entropy(output.logits[:, -1], torch.tensor([1, 2])).backward()
    assert all(bool(p.grad.abs().max() > 0) for p in network.parameters())


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: model(stack(1, Lstm(bidirectional=True))).build(),
            "Lstm sees the future, and a language head would learn to copy it; use a causal one",
        ),
        (lambda: Model(width=5, embed=Tokens(3), body=stack(1, Lstm(bidirectional=True))).build(), "half the width"),
        (lambda: stack(1, Lstm(activation="relu")), "lstm.activation is 'relu': the names are sigmoid, tanh"),
        (lambda: bidirectional(cache=Cache()), "needs its whole sequence in one call"),
        (
            lambda: model(stack(1, Lstm())).build()(tokens(), cache=cache_of(stack(1, AblatedLstm()))),
            "it is the cache of another model",
        ),
        (
            lambda: model(stack(1, Lstm())).build()(tokens(), cache=cache_of(stack(2, Lstm()))),
            "the cache has 2 entries, this model has 1",
        ),
        (
            lambda: model(stack(1, Lstm())).build()(tokens(), cache=cache_of(stack(1, Lstm())), probe=Probe()),
            "probe a call without cache=",
        ),
    ],
)
def test_wrong_calls_are_refused_with_the_reason(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def bidirectional(**options: Any) -> Any:
    return Model(width=6, embed=Tokens(VOCABULARY), body=stack(1, Lstm(bidirectional=True))).build()(
        tokens(), **options
    )


def cache_of(body: Any) -> Cache | None:
    cache: Cache | None = model(body).build()(tokens(), cache=Cache()).cache
    return cache


@pytest.mark.parametrize("kernel", ["sdpa", "blocked"])
def test_an_attention_kernel_is_refused(kernel):
    with pytest.raises(UnsupportedKernel, match=f"kernel={kernel} computes attention, but the model has none"):
        model(stack(1, Lstm())).build()(tokens(), kernel=kernel)


def test_the_number_of_parameters_is_the_sum_by_hand():
    """Two maps of each gate and a bias; embedding and output. `byte` is as large as byte-language's paper size."""
    assert parameters(member("lstm")) == 3 * (8 * 624**2 + 4 * 624) + 256 * 624 + 625 * 256
    assert parameters(member("ablated-lstm")) == 4 * (3 * 876**2 + 3 * 876) + 256 * 876 + 877 * 256
    for name in ("lstm", "ablated-lstm"):
        assert abs(parameters(member(name)) / parameters(member("byte-language")) - 1) < 0.001
