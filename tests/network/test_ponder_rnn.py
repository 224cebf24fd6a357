"""The pondering recurrent net against the literal equations of Graves: outputs, states, weights and cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from everyformer import Cache, Language, Lstm, Model, NoResidual, PonderRnn, PreNorm, Probe, Tokens
from everyformer.attention.attend import UnsupportedKernel
from everyformer.family.table import member, parameters
from tests.network import VOCABULARY, close, placed, ready, stack, tokens
from tests.network.test_lstm import maps
from tests.spec import halting as spec
from tests.spec import recurrent

WIDTH, STEPS, EPSILON = 6, 4, 0.3
CELLS = ("rnn", "lstm")


def model(cell: str, layers: int = 1, steps: int = STEPS, **more: Any) -> Model:
    residual = more.pop("residual", NoResidual())
    sublayer = PonderRnn(steps, cell, **({"epsilon": EPSILON, "cost": 0.5, "bias": -0.5} | more))
    body = stack(layers, sublayer, residual=residual)
    return Model(width=WIDTH, embed=Tokens(VOCABULARY), body=body, outputs=(Language(tied=False, bias=True),))


def made(value: Model) -> Any:
    """With halting units that differ between positions."""
    network = ready(value)
    for layer in network.body.layers:
        layer.sublayers[0].cells[0].unit.map.weight.data *= 4
    return network


def literal(network: Any, x_TD: Tensor) -> Any:
    cell, value = network.body.layers[0].sublayers[0].cells[0], network.value.body.layers[0].sublayers[0]
    head, unit = network.outputs[0], cell.unit

    def step(s: Tensor, x: Tensor) -> Tensor:
        if value.cell == "rnn":
            return torch.tanh(cell.cell.of_h.weight @ s + cell.cell.of_x.weight @ x + cell.cell.of_x.bias)
        found = recurrent.lstm_step(x, s[:WIDTH], s[WIDTH:], *maps(cell.cell), math.tanh)
        return torch.cat(found[:2])

    with torch.no_grad():
        return spec.act_rnn(
            list(x_TD),
            step,
            lambda s: torch.sigmoid(unit.map.weight[0] @ s[:WIDTH] + unit.bias[0]),
            lambda s: head.map.weight @ s[:WIDTH] + head.bias,
            torch.zeros(cell.cell.state_size, dtype=torch.float64),
            value.epsilon,
            value.steps,
        )


@pytest.mark.spec(78, 79, 80, 81, 82, 83, 84)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("late", (False, True), ids=("early", "late"))
def test_a_pondering_layer_is_the_papers_equations(cell, late):
    """Outputs, states, weights and cost. The head reads the mean of the states, and that is the mean of the outputs."""
    network, x_BT, probe = made(model(cell, bias=-0.5 - 4 * late)), tokens(2, 5), Probe()
    output = network(x_BT, probe=probe, cache=Cache())
    ponders = []
    for b, x_TD in enumerate(placed(network, x_BT)):
        y, s, p, ponder = literal(network, x_TD)
        close(output.logits[b], torch.stack(y))
        close(output.cache.entries[0].tensors[0][b], torch.stack(s))
        close(probe.halts[0][b], torch.stack([torch.stack(one) for one in p]))
        ponders += ponder
    close(output.aux["ponder"], 0.5 * torch.stack(ponders).mean())
    steps = (probe.halts[0] > 0).sum(-1)
    assert steps.max() == STEPS if late else steps.min() < steps.max()  # the limit, or positions that differ
    assert (probe.halts[0].sum(-1) - 1).abs().max() < 1e-12


@pytest.mark.spec(78, 79)
def test_one_step_is_the_recurrent_net_whose_inputs_are_all_new():
    """The flag is then always 1, so what it adds is a bias; halting has no say."""
    network, x_BT = made(model("lstm", steps=1)), tokens(2, 7)
    plain = ready(Model(width=WIDTH, embed=Tokens(VOCABULARY), body=stack(1, Lstm())))
    plain.embed.load_state_dict(network.embed.state_dict())
    one, two = network.body.layers[0].sublayers[0].cells[0].cell, plain.body.layers[0].sublayers[0].cells[0]
    with torch.no_grad():
        two.of_h.weight.copy_(one.of_h.weight)
        two.of_x.weight.copy_(one.of_x.weight[:, :-1])
        two.of_x.bias.copy_(one.of_x.bias + one.of_x.weight[:, -1])
    output = network(x_BT)
    close(output.hidden, plain(x_BT).hidden)
    assert float(output.aux["ponder"]) == 0.5 * 2  # N = R = 1


@pytest.mark.spec(84)
@pytest.mark.parametrize("cell", CELLS)
def test_steps_that_no_sequence_needs_are_not_computed(cell, monkeypatch):
    network, x_BT, calls = made(model(cell)), tokens(2, 6), list[int]()
    after = type(network.body.layers[0].sublayers[0].cells[0].cell).step

    def counted(*given: Tensor) -> Tensor:
        calls.append(1)
        return after(*given)

    monkeypatch.setattr(type(network.body.layers[0].sublayers[0].cells[0].cell), "step", counted)
    probe = Probe()
    found = network(x_BT, probe=probe)
    needed = (probe.halts[0] > 0).sum(-1).max(0).values.sum()
    assert len(calls) == needed < 6 * STEPS
    monkeypatch.setattr("everyformer.network.ponder_rnn.all_halted", lambda runs: False)
    whole = network(x_BT)
    assert len(calls) == needed + 6 * STEPS
    assert torch.equal(found.hidden, whole.hidden) and torch.equal(found.aux["ponder"], whole.aux["ponder"])


@pytest.mark.parametrize("cell", CELLS)
def test_a_state_continues_across_padding_and_calls(cell):
    """Sequences of different lengths with padding anywhere, piece by piece, equal each of them alone, and so does the cost."""
    network, x = made(model(cell, layers=2)), tokens(3, 8)
    seen = torch.rand(3, 8, generator=torch.Generator().manual_seed(3)) < 0.6
    seen[:, 0] = seen[:, 4] = True
    seen[:, 2] = False  # where nobody is
    first = network(x[:, :4], visible=seen[:, :4], cache=Cache())
    second = network(x[:, 4:], visible=seen[:, 4:], cache=first.cache.trim(1))
    hidden = torch.cat((first.hidden, second.hidden), dim=1)
    costs = []
    for row in range(3):
        alone = network(x[row][seen[row]][None])
        close(hidden[row][seen[row]], alone.hidden[0])
        costs.append(alone.aux["ponder"] * seen[row].sum())
    close(network(x, visible=seen).aux["ponder"], torch.stack(costs).sum() / seen.sum())


@pytest.mark.spec(84)
def test_the_ponder_cost_alone_reduces_the_number_of_steps():
    """Each layer by itself: their costs are added."""
    torch.manual_seed(0)
    network, x_BT, taken = model("lstm", layers=2, bias=-2.0, epsilon=0.01).build(), tokens(4, 5), list[float]()
    optimizer = torch.optim.Adam(network.parameters(), 5e-2)
    for _ in range(40):
        probe = Probe()
        output = network(x_BT, probe=probe)
        taken.append((torch.cat(probe.halts) > 0).sum(-1).float().mean().item())
        if taken[-1] == 1:  # nothing is left to learn
            break
        optimizer.zero_grad()
        output.aux["ponder"].backward()
        optimizer.step()
    assert len(probe.halts) == 2 and taken[0] == STEPS and taken[-1] < 2.1


def test_every_weight_has_a_gradient_and_the_forget_bias_starts_at_1():
    network = model("lstm", layers=2, residual=PreNorm()).build()
    output = network(tokens(2, 6))
    (output.logits.square().mean() + output.aux["ponder"]).backward()
    assert all(bool(p.grad.abs().max() > 0) for p in network.parameters())
    assert bool((network.body.layers[0].sublayers[0].cells[0].cell.of_x.bias.view(4, WIDTH)[1] == 1).all())


@pytest.mark.parametrize("bias, steps", [(1.0, 2), (-0.5, 3), (-9.0, STEPS)])
def test_a_new_net_plans_the_steps_that_its_bias_asks_for(bias, steps):
    """1 / sigma(b_h), rounded up, and at most as many as it may take."""
    cell = model("rnn", bias=bias).build().body.layers[0].sublayers[0].cells[0]
    assert cell.initial_steps == steps == min(STEPS, math.ceil(1 / recurrent.sigma(bias)))
    assert cell.grows == f"{steps} steps on an input, at most {STEPS}"


def test_halting_in_low_precision_still_sums_to_one():
    network, probe = model("lstm").build(), Probe()
    with torch.autocast("cpu", torch.bfloat16):
        network(tokens(2, 6), probe=probe)
    assert probe.halts[0].dtype == torch.float32
    assert (probe.halts[0].sum(-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: PonderRnn(0), "ponder_rnn.steps is 0"),
        (lambda: PonderRnn(2, cell="gru"), "ponder_rnn.cell is 'gru': the names are lstm, rnn"),
        (lambda: PonderRnn(2, epsilon=0.0), "ponder_rnn.epsilon is 0.0"),
        (lambda: PonderRnn(2, cost=-1.0), "ponder_rnn.cost is -1.0"),
        (lambda: model("rnn").build()(tokens(), cache=cache_of("lstm")), "it is the cache of another model"),
    ],
)
def test_wrong_calls_are_refused_with_the_reason(call, message):
    with pytest.raises(ValueError) as caught:
        call()
    assert message in str(caught.value)


def cache_of(cell: str) -> Cache | None:
    cache: Cache | None = model(cell).build()(tokens(), cache=Cache()).cache
    return cache


def test_the_number_of_parameters_is_the_sum_by_hand():
    """Four gates of the input with its flag and of h, with biases; the halting unit; embedding and output."""
    gates = 4 * 1500 * (1501 + 1500 + 1)
    assert parameters(member("act-rnn", "wikipedia")) == gates + 1501 + 256 * 1500 + 1501 * 256


def test_an_attention_kernel_is_refused():
    with pytest.raises(UnsupportedKernel, match="kernel=sdpa computes attention, but the model has none"):
        model("rnn").build()(tokens(), kernel="sdpa")
