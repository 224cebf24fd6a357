"""The feed-forward net against its equation, as a convolution, gated, deeper, and in chunks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from everyformer import Convolution, FeedForward, member, members
from everyformer.study.example import models
from tests.network import close, randn, ready
from tests.spec import network as spec

ACTIVATIONS = {
    name: getattr(spec, name) for name in ("relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu_squared")
}
D, HIDDEN = 6, 10


def rows(x_BTD: torch.Tensor, f) -> torch.Tensor:
    return torch.stack([torch.stack([f(x) for x in row]) for row in x_BTD])


@pytest.mark.spec(20, 28)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layers", [1, 2])
def test_the_net_is_its_equation(activation, layers):
    net = ready(FeedForward(HIDDEN, activation, hidden_layers=layers).build(D))

    def literal(x):
        for layer in net.hidden:
            x = ACTIVATIONS[activation](layer.weight @ x + layer.bias)
        return net.out.weight @ x + net.out.bias

    x_BTD = randn(2, 3, D)
    close(net(x_BTD)[0], rows(x_BTD, literal))
    assert [tuple(layer.weight.shape) for layer in net.hidden] == [(HIDDEN, D), (HIDDEN, HIDDEN)][:layers]


@pytest.mark.spec(28)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gated_net_multiplies_an_activated_by_a_plain_map(activation):
    net = ready(FeedForward(HIDDEN, activation, gated=True, bias=False).build(D))
    W_1, W_3 = net.hidden[0].weight.split(HIDDEN)
    x_BTD = randn(2, 3, D)
    close(net(x_BTD)[0], rows(x_BTD, lambda x: net.out.weight @ (ACTIVATIONS[activation](W_1 @ x) * (W_3 @ x))))


@pytest.mark.spec(28)
def test_the_net_is_two_convolutions_of_kernel_1():
    net, x_BTD = ready(FeedForward(HIDDEN).build(D)), randn(2, 5, D)
    hidden = F.conv1d(x_BTD.transpose(1, 2), net.hidden[0].weight[..., None], net.hidden[0].bias).relu()
    close(net(x_BTD)[0], F.conv1d(hidden, net.out.weight[..., None], net.out.bias).transpose(1, 2))


@pytest.mark.spec(28, 119)
@pytest.mark.parametrize("chunk", [1, 2, 7, 100])
@pytest.mark.parametrize("gated", [False, True])
def test_chunks_change_neither_output_nor_gradients(chunk, gated):  # eq. W31
    whole = ready(FeedForward(HIDDEN, gated=gated).build(D))
    chunked = FeedForward(HIDDEN, gated=gated, chunk=chunk).build(D).double()
    chunked.load_state_dict(whole.state_dict())
    sizes: list[int] = []
    chunked.out.register_forward_pre_hook(lambda module, given: sizes.append(given[0].shape[1]))
    found = []
    for net in (whole, chunked):
        x_BTD = randn(2, 7, D).requires_grad_()
        y_BTD, _ = net(x_BTD)
        found.append([y_BTD, *torch.autograd.grad((y_BTD * randn(2, 7, D, seed=1)).sum(), [x_BTD, *net.parameters()])])
    for one, two in zip(*found, strict=True):
        close(one, two)
    assert max(sizes) == min(chunk, 7) and sum(sizes) == 7  # it really works on so many at a time


WITHOUT = {"lstm", "ablated-lstm", "act-rnn", "graph-classifier"}  # a feed-forward net
# Times the width; the others have the four of the first paper. A gated net has two maps to its hidden layer, and is narrower or wider.
INSIDE = {"gtrxl": 2, "llama": 8 / 3, "mistral": 3.5, "qwen3": 3, "gemma": 6}


@pytest.mark.spec(28, 29)
@pytest.mark.parametrize("name", members())
def test_every_member_has_a_hidden_width_of_four_times_its_width(name):
    sublayers = [(one.width, sublayer) for one in models(member(name)) for sublayer in one.body.sublayers()]
    nets = [(width, net) for width, net in sublayers if isinstance(net, FeedForward | Convolution)]
    assert bool(nets) != (name in WITHOUT)
    assert all(net.hidden == INSIDE.get(name, 4) * width for width, net in nets)


@pytest.mark.spec(29)
def test_the_common_sizes():
    base, big = member("transformer", "base"), member("transformer", "big")
    for side in (base.encoder, base.decoder):
        layer = side.body.layers[0]
        assert (side.width, layer.sublayers[-1].hidden, layer.sublayers[0].heads.heads, side.body.num_layers) == (
            512,
            2048,
            8,
            6,
        )
        assert layer.sublayers[0].build(side.width).heads.key_width == 64
    assert big.encoder.body.layers[0].sublayers[0].heads.heads == 16  # K: 8 or 16
