"""Residual blocks against equations 1-8 of source T and those of source K. Only attention mixes tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from everyformer import (
    Attention,
    Concatenated,
    Convolution,
    CrossAttention,
    EncoderDecoder,
    EncoderOutput,
    Features,
    FeedForward,
    Gated,
    JointMlp,
    Language,
    LayerNorm,
    Learned,
    NoResidual,
    OneHot,
    PostNorm,
    PreNorm,
    Probe,
    Reversible,
    RMSNorm,
    SeparateMlp,
    Sinusoidal,
    Standard,
)
from everyformer.network import feedforward
from tests.network import close, model, placed, randn, ready, tokens
from tests.spec import network as spec

EPS = 1e-3
HEADS = Standard(2, key_width=3, value_width=5, merge_bias=False)
NET = FeedForward(12, bias=False)  # T's equations have no biases
BLOCKS = {
    "post": PostNorm(LayerNorm(EPS)),
    "pre": PreNorm(LayerNorm(EPS)),
    "open": PreNorm(LayerNorm(EPS), final_norm=False),
}
GATES = ("none", "input", "output", "highway", "sigmoid_tanh", "gru")


def heads_of(module: nn.Module) -> list[spec.AttentionHead]:
    """The matrices W_q, W_k, W_v, W_c of each head, as T writes them."""
    heads = module.heads
    sizes = (heads.heads * heads.key_width, heads.heads * heads.key_width, heads.heads * heads.value_width)
    q, k, v = (part.chunk(heads.heads) for part in heads.qkv.weight.split(sizes))
    merge = heads.out.weight.chunk(heads.heads, dim=1)
    return [(q[h].T, k[h].T, v[h].T, merge[h].T) for h in range(heads.heads)]


def sublayers(layer: nn.Module, sees: spec.Allows, memory: list[Tensor]) -> list[spec.Sublayer]:
    """The sublayers of one built layer as the literal equations take them."""
    parts = {
        "attention": lambda x: spec.attention(x, x, heads_of(layer.sublayers[0]), sees),
        "cross": lambda x: spec.attention(x, memory, heads_of(layer.sublayers[1]), lambda i, j: True),
        "feedforward": lambda x: spec.feed_forward(
            x, layer.sublayers[-1].hidden[0].weight.T, layer.sublayers[-1].out.weight.T
        ),
    }
    names = {1: ("feedforward",), 2: ("attention", "feedforward"), 3: ("attention", "cross", "feedforward")}[
        len(layer.sublayers)
    ]
    return [(parts[name], one.norm.weight, one.norm.bias) for name, one in zip(names, layer.residuals, strict=True)]


def gates_of(layer: nn.Module, kind: str) -> list[Any]:
    found = []
    for step in layer.residuals:
        weights = {name: module.weight for name, module in step.gate.maps.items()}
        found.append(partial(spec.gate, kind, w=weights, b=step.gate.bias))
    return found


def literal(
    network: nn.Module, x_BTD: Tensor, residual: str, sees: spec.Allows, memory_BSD: Tensor | None = None
) -> Tensor:
    found = []
    for b, x_TD in enumerate(x_BTD):
        x, memory = list(x_TD), [] if memory_BSD is None else list(memory_BSD[b])
        for layer in network.body.layers:
            if residual in GATES:
                x = spec.gated(x, sublayers(layer, sees, memory), gates_of(layer, residual), EPS)
                continue
            block = spec.post_norm if residual == "post" else spec.pre_norm
            x = block(x, sublayers(layer, sees, memory), EPS)
        if residual == "pre":
            norm = network.body.stream.norm
            x = [spec.layer_norm(x_i, norm.weight, norm.bias, EPS) for x_i in x]
        found.append(torch.stack(x))
    return torch.stack(found)


@pytest.mark.spec(5, 6, 8, 20, 21)
@pytest.mark.parametrize("pattern", ["full", "causal"])
@pytest.mark.parametrize("residual", BLOCKS)
def test_the_stack_is_its_equations(residual, pattern):  # eq. K0
    """T eq. 1-8 (post-norm), K (pre-norm) with the norm after the stack that K leaves out."""
    network, x = ready(model(pattern, form=HEADS, net=NET, residual=BLOCKS[residual], width=8)), tokens(length=5)
    sees = (lambda i, j: True) if pattern == "full" else (lambda i, j: j <= i)
    close(network(x).hidden, literal(network, network.embed.table.weight[x], residual, sees))


@pytest.mark.spec(15, 20, 62)
@pytest.mark.parametrize("residual", BLOCKS)
def test_the_decoder_block_attends_to_itself_then_to_the_encoder_output(residual):
    side = {"form": HEADS, "net": NET, "residual": BLOCKS[residual]}
    decoder = model("causal", cross=CrossAttention(HEADS), outputs=(Language(),), **side)
    pair = ready(EncoderDecoder(encoder=model("full", **side), decoder=decoder))
    source, target = tokens(length=4), tokens(length=6, seed=1)
    memory = literal(pair.encoder, pair.encoder.embed.table.weight[source], residual, lambda i, j: True)
    close(pair.encode(source).x_BSD, memory)
    wanted = literal(pair.decoder, pair.decoder.embed.table.weight[target], residual, lambda i, j: j <= i, memory)
    close(pair(source, target).hidden, wanted)


@pytest.mark.spec(126, 127)
@pytest.mark.parametrize("gate", GATES)
def test_the_gated_stack_is_its_equations(gate):
    """Parisotto et al. 2019: the norm on what enters a sublayer, ReLU on its answer, then the gate."""
    network = ready(model("causal", form=HEADS, net=NET, residual=Gated(gate, LayerNorm(EPS)), width=8))
    x, probe, used = tokens(length=5), Probe(), list[dict[str, Tensor]]()
    for layer in network.body.layers:
        for one in layer.residuals:
            one.gate.register_forward_hook(lambda module, given, _: used.append(module.gates(*given[:2])))
    close(network(x, probe=probe).hidden, literal(network, network.embed.table.weight[x], gate, lambda i, j: j <= i))
    assert len(probe.gates) == len(used) == 4  # a probe shows those of each sublayer
    for shown, wanted in zip(probe.gates, used, strict=True):
        assert shown.keys() == wanted.keys() and all(torch.equal(shown[name], wanted[name]) for name in wanted)


@pytest.mark.spec(129)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16]
)  # of the stream: tokens come in full, features in low precision
def test_gates_take_a_stream_and_an_output_of_different_dtypes(gate, kind):
    torch.manual_seed(0)
    built, x_BTD, y_BTD = Gated(gate).build(8).gate, torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found = built(x_BTD.to(kind), y_BTD.bfloat16())
    torch.testing.assert_close(found.float(), built(x_BTD, y_BTD), rtol=0.05, atol=0.05)


@pytest.mark.spec(127)
@pytest.mark.parametrize("gate", GATES[2:])
def test_gates_start_near_the_identity_as_the_bias_sets(gate):
    """Of the candidate, the share s(-b) comes through where the maps are 0; with a large b nothing does, to the bit."""
    x_BTD, y_BTD = randn(2, 3, 8), randn(2, 3, 8, seed=1)
    share = 1 / (1 + math.exp(2.0 if gate == "gru" else 1.0))
    built = Gated(gate).build(8).gate.double()
    for name, one in built.maps.items():
        if name not in ("u", "w_h", "u_h"):
            one.weight.data.zero_()
    half = (
        y_BTD if gate in ("output", "highway") else (built.maps["u"](y_BTD)).tanh() if gate == "sigmoid_tanh" else None
    )
    if half is None:  # the reset gate stands half open
        half = (built.maps["w_h"](y_BTD) + built.maps["u_h"](0.5 * x_BTD)).tanh()
    begins = x_BTD if gate in ("output", "sigmoid_tanh") else (1 - share) * x_BTD
    close(built(x_BTD, y_BTD), begins + share * half, 1e-6)
    assert torch.equal(Gated(gate, bias=800.0).build(8).gate.double()(x_BTD, y_BTD), x_BTD)


PLACES = [None, Sinusoidal(), Learned(9), JointMlp(9, 4), SeparateMlp(9, 4), Concatenated(OneHot(4), 4)]


@pytest.mark.spec(22, 69)
@pytest.mark.parametrize("position", PLACES)
@pytest.mark.parametrize("residual", [PostNorm(), PreNorm(), PreNorm(RMSNorm()), PostNorm(RMSNorm()), Gated()])
def test_without_attention_a_token_changes_only_itself(residual, position):
    """Without attention a changed token moves itself and nobody else, by exactly 0; with it, everybody."""
    for pattern in (None, "full"):
        network = ready(model(pattern, residual=residual, position=position, net=FeedForward(12, "gelu", gated=True)))
        x, j = tokens(length=4), 2
        other = x.clone()
        other[:, j] = (x[:, j] + 1) % 17
        moved = (network(x).hidden - network(other).hidden).abs().amax(-1) > 0
        assert moved.tolist() == [[pattern is not None or i == j for i in range(4)]] * 2


def silence(network: nn.Module, scale: float) -> None:
    """Multiply the maps that end the residual branches."""
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if ".out." in name:
                weight.mul_(scale)


@pytest.mark.spec(27)
def test_a_pre_norm_block_is_the_identity_and_a_correction():
    """With its corrections at 0 the stack is the identity, to the bit; small ones add in proportion."""
    network, x = ready(model("full", residual=PreNorm(final_norm=False))), tokens()
    start = network.embed.table.weight[x]
    silence(network, 1e-4)
    one = network(x).hidden - start
    silence(network, 0.5)
    half = network(x).hidden - start
    assert 1e-6 < one.abs().max() < 1e-2
    assert ((one - 2 * half).norm() / one.norm()) < 1e-3
    silence(network, 0)
    assert torch.equal(network(x).hidden, start)


@pytest.mark.spec(27)
def test_a_post_norm_block_with_zero_branches_only_normalizes():
    network, x = ready(model("full", residual=PostNorm(), layers=1)), tokens()
    silence(network, 0)
    first, second = (step.norm for step in network.body.layers[0].residuals)
    close(network(x).hidden, second(first(network.embed.table.weight[x])))


class Plain(nn.Module):
    def forward(self, x_BTD: Tensor, visible_BT: Tensor | None = None) -> Tensor:
        return x_BTD


@pytest.mark.spec(30)
@pytest.mark.parametrize("left", ["nothing", "softmax", "relu", "norm"])
@pytest.mark.parametrize("residual", [PostNorm(), PreNorm()])
def test_softmax_relu_and_norm_are_the_only_nonlinear_parts(residual, left, monkeypatch):
    """With the weights uniform, ReLU the identity and no norm the network is affine; with any one of them it is not."""
    network = ready(model("causal", residual=residual, embed=Features(5)))
    if left != "relu":
        monkeypatch.setattr(feedforward, "activate", lambda x, name: x)
    for layer in network.body.layers:
        if left != "softmax":
            layer.sublayers[0].heads.qkv.weight.data[:8] = 0  # no queries: every key is as good as another
        if left != "norm":
            layer.residuals[0].norm = layer.residuals[-1].norm = Plain()
    if left != "norm" and isinstance(residual, PreNorm):
        network.body.stream.norm = Plain()
    x, y = randn(2, 6, 5), randn(2, 6, 5, seed=1)
    bend = (network(0.3 * x + 0.7 * y).hidden - 0.3 * network(x).hidden - 0.7 * network(y).hidden).abs().max()
    assert bend < 1e-12 if left == "nothing" else bend > 1e-3


@pytest.mark.parametrize(
    "part",
    [
        *({"residual": kind(dropout=0.5)} for kind in (PostNorm, PreNorm, Gated, Reversible, NoResidual)),
        *({"net": kind(12, dropout=0.5)} for kind in (FeedForward, Convolution)),
        *({"net": kind(HEADS, dropout=0.5)} for kind in (Attention, CrossAttention)),
    ],
    ids=lambda part: type(next(iter(part.values()))).__name__,
)
def test_the_dropout_of_a_part_is_random_in_training_and_nothing_in_evaluation(part):
    network, without = (
        ready(model("full", **one)) for one in (part, {k: replace(v, dropout=0.0) for k, v in part.items()})
    )
    source = {"encoder_output": EncoderOutput(randn(2, 4, 8))} if "encoder_output" in network.reads else {}
    wanted = without(tokens(), **source).hidden
    assert torch.equal(network(tokens(), **source).hidden, wanted)
    one, two = (network.train()(tokens(), **source).hidden for _ in range(2))
    assert not torch.equal(one, two)


@pytest.mark.spec(21)
def test_dropout_is_on_each_branch_and_only_in_training():
    network = ready(model("full", residual=PreNorm(dropout=0.5, final_norm=False), dropout=0.0)).train()
    x = tokens()
    torch.manual_seed(0)
    one, two = network(x).hidden, network(x).hidden
    assert (one - two).abs().max() > 1e-3
    silence(network, 0)  # the residual path itself is never dropped
    close(network(x).hidden, placed(network, x))
