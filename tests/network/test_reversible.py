"""The reversible stack: its equations, its inverse, and a backward pass whose memory does not grow with the depth."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

from everyformer import Cache, CrossAttention, EncoderDecoder, Language, LayerNorm, PreNorm, Probe, Reversible, Standard
from everyformer.network.cache import KVCache
from everyformer.network.residual import StreamModule
from everyformer.study.cost import CostCounter
from everyformer.train.learner import set_checkpoint_segments
from tests.network import close, model, ready, tokens
from tests.network.test_residual import EPS, HEADS, NET, sublayers
from tests.spec import network as spec

CAUSAL = lambda i, j: j <= i  # noqa: E731


def gradients(network: nn.Module, hidden: Tensor) -> list[Tensor]:
    found = torch.autograd.grad(hidden.square().sum(), list(network.parameters()), allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(network.parameters(), found, strict=True)]


def worst(one: list[Tensor], two: list[Tensor]) -> float:
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(one, two, strict=True))


@pytest.mark.spec(117, 118)
@pytest.mark.parametrize("merge", ["mean", "concatenate"])
def test_the_reversible_stack_is_its_equations(merge):
    """Both streams begin as the tokens, the output is the mean of the last two, or both of them, normed."""
    network = ready(model("causal", form=HEADS, net=NET, residual=Reversible(LayerNorm(EPS), merge=merge), layers=3))
    token_BT = tokens(batch=1, length=5)
    start = list(network.embed.table.weight[token_BT[0]])
    layers = [sublayers(layer, CAUSAL, []) for layer in network.body.layers]
    x1, x2 = start, start
    for layer in layers:
        x1, x2 = spec.reversible(x1, x2, layer, EPS)
    norm = network.body.stream.norm
    merged = [
        torch.cat((one, two)) if merge == "concatenate" else (one + two) / 2 for one, two in zip(x1, x2, strict=True)
    ]
    close(network(token_BT).hidden[0], torch.stack([spec.layer_norm(x, norm.weight, norm.bias, EPS) for x in merged]))


@pytest.mark.spec(117)
@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
def test_the_backward_pass_recovers_the_streams_by_the_inverse(dtype, error):
    """x2 = y2 - G(y1), x1 = y1 - F(x2): the inputs of the sublayers, from the last to the first, are those of the forward pass."""
    network = ready(model("causal", net=NET, residual=Reversible(), layers=3)).to(dtype)
    seen: list[Tensor] = []
    for layer in network.body.layers:
        for residual in layer.residuals:
            residual.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    hidden = network(tokens()).hidden
    forward = list(seen)
    seen.clear()
    hidden.square().sum().backward()
    assert len(forward) == len(seen) == 6 and not torch.equal(forward[0], forward[1])
    for before, recovered in zip(reversed(forward), seen, strict=True):
        assert (before - recovered).abs().max() <= error * before.abs().max()
    assert torch.equal(seen[0], forward[-1])  # the last stream is kept, the others are not
    assert not all(torch.equal(one, two) for one, two in zip(reversed(forward), seen, strict=True))


@pytest.mark.spec(118)
@pytest.mark.parametrize("kernel", ["sdpa", "reference", "blocked"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_gradients_are_those_of_the_plain_computation(dropout, kernel):
    """With dropout everywhere, padding, and each kernel. A call that keeps its past keeps everything else too."""
    residual = Reversible(dropout=dropout)
    network = ready(model("causal & window(3)", residual=residual, layers=5, dropout=dropout)).train()
    for layer in network.body.layers:
        layer.sublayers[0].value = replace(layer.sublayers[0].value, dropout=dropout)
    visible_BT = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    found, after = [], []
    for options in ({"cache": Cache()}, {}):
        torch.manual_seed(0)
        hidden = network(tokens(), visible=visible_BT, kernel=kernel, **options).hidden
        found.append(gradients(network, hidden))
        after.append(torch.rand(1))
    assert worst(*found) < 1e-12
    assert after[0] == after[1]  # going back leaves the random numbers alone


@pytest.mark.spec(118)
@pytest.mark.parametrize("left", ["net", "attention", "cross"])
def test_layers_of_one_and_three_sublayers_have_the_same_gradients(left):
    """And the source of a decoder, and what comes before the stack, get their gradients."""
    side = {"layers": 3, "residual": Reversible()}
    decoder = {
        "net": model(None, **side),
        "attention": model("causal", net=None, **side),
        "cross": model("causal", cross=CrossAttention(Standard(2)), outputs=(Language(),), **side),
    }[left]
    value = EncoderDecoder(encoder=model("full", **side), decoder=decoder) if left == "cross" else decoder
    network: Any = ready(value)
    inputs = (tokens(length=4), tokens(seed=1)) if left == "cross" else (tokens(),)
    again = gradients(network, network(*inputs).hidden)
    for module in network.modules():
        if isinstance(module, StreamModule):
            start = module.start
            module.start = lambda x_BTD, recompute, start=start: start(x_BTD, False)
    assert worst(again, gradients(network, network(*inputs).hidden)) < 1e-12
    assert all(g.abs().max() > 0 for g in again if g.dim() > 1)


def test_concatenated_streams_are_refused_where_one_is_read():
    both = Reversible(merge="concatenate")
    with pytest.raises(ValueError, match=r"the head's last layer 16, so they cannot share the table"):
        model("causal", residual=both, outputs=(Language(),)).build()
    decoder = model("causal", cross=CrossAttention(Standard(2)), outputs=(Language(),))
    with pytest.raises(ValueError, match=r"the encoder concatenates its streams, and the decoder attends to one"):
        EncoderDecoder(encoder=model("full", residual=both), decoder=decoder).build()


@pytest.mark.spec(118)
def test_a_second_backward_pass_has_the_same_gradients():
    network = ready(model("causal", residual=Reversible(), layers=4))
    loss = network(tokens()).hidden.square().sum()
    weights = list(network.parameters())
    one, two = (torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True) if a is not None)


@pytest.mark.spec(118)
def test_gradients_pass_through_frozen_layers():
    network = ready(model("causal", residual=Reversible(), layers=4))
    wanted = gradients(network, network(tokens()).hidden)
    for layer in network.body.layers[2:]:
        layer.requires_grad_(False)
    some = [(p, g) for p, g in zip(network.parameters(), wanted, strict=True) if p.requires_grad]
    found = torch.autograd.grad(network(tokens()).hidden.square().sum(), [p for p, _ in some], allow_unused=True)
    assert (
        worst([f for f in found if f is not None], [g for (_, g), f in zip(some, found, strict=True) if f is not None])
        < 1e-12
    )


def kept(residual: Any, layers: int, segments: int = 0) -> tuple[int, int]:
    """The bytes kept for the backward pass, and the most alive in it besides the weights and their gradients."""
    body = model("causal", width=64, net=NET, layers=layers, residual=residual).build().train()
    set_checkpoint_segments(body, segments)
    token_BT = tokens(batch=16, length=32)
    body(token_BT)  # what is made once
    with CostCounter(torch.device("cpu")) as tally:
        tally.add(list(body.parameters()))
        weights = tally.live
        loss = body(token_BT).hidden.square().sum()
        after = tally.live
        loss.backward()
    return after - weights, tally.peak - 2 * weights


@pytest.mark.spec(118)
def test_memory_does_not_grow_with_the_depth():
    """Not by a byte, nor does the most in the backward pass; pre-norm keeps five streams and more for each layer.

    What is not counted: the state of the random numbers at each sublayer, 5 kB on a CPU.
    """
    stream = 16 * 32 * 64 * 4
    assert kept(Reversible(dropout=0.1), 8) == kept(Reversible(dropout=0.1), 2)
    assert kept(PreNorm(dropout=0.1), 8)[0] - kept(PreNorm(dropout=0.1), 2)[0] > 6 * 5 * stream


def test_each_segment_of_recomputed_layers_keeps_its_input_only():
    """So of 4 layers, 2 segments keep more than 1, but are recomputed two layers at a time."""
    (kept_1, peak_1), (kept_2, peak_2) = (kept(PreNorm(dropout=0.1), 4, segments) for segments in (1, 2))
    assert kept_2 - kept_1 == 16 * 32 * 64 * 4
    assert peak_2 < 0.7 * peak_1


@pytest.mark.spec(118)
def test_recomputation_uses_autocast_again():
    """Streams stay in float32: going back costs no more than the rounding of bfloat16 itself."""
    network = model("causal", residual=Reversible(), layers=4).build()
    found = []
    for options in ({"cache": Cache()}, {}):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = network(tokens(), **options).hidden
        found.append(gradients(network, hidden.float()))
    for plain, again in zip(*found, strict=True):
        assert (plain - again).norm() <= 0.02 * plain.norm()


@pytest.mark.spec(118)
def test_a_reversible_stack_returns_a_cache():
    network = ready(model("causal", residual=Reversible(), layers=3))
    cache = network(tokens()[:, :4], cache=Cache()).cache
    assert len(cache.entries) == 3 and all(isinstance(keys, KVCache) for keys in cache.entries)
    close(network(tokens()[:, 4:], cache=cache).hidden, network(tokens()).hidden[:, 4:])
    probe = Probe()
    network(tokens(), probe=probe).hidden.sum().backward()
    assert len(probe.weights) == 3  # looked at once, though computed in the backward pass too


def test_checkpoint_segments_change_nothing_in_a_reversible_stack():
    """Each layer is computed twice, in the forward and in the backward pass, and not once more."""
    network, calls = ready(model("causal", residual=Reversible(), layers=4)).train(), list[int]()
    for layer in network.body.layers:
        layer.sublayers[-1].register_forward_pre_hook(lambda *_: calls.append(1))
    wanted = gradients(network, network(tokens()).hidden)
    set_checkpoint_segments(network, 2)
    assert worst(gradients(network, network(tokens()).hidden), wanted) == 0
    assert len(calls) == 2 * (2 * 4)


def test_gradients_reach_the_weights_under_ddp(tmp_path):
    """DDP listens to each weight for its gradient: all come, each once, with dropout."""
    network = ready(model("causal", residual=Reversible(dropout=0.3), layers=3, outputs=(Language(),))).train()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = []
        for run, options in ((network, {"cache": Cache()}), (nn.parallel.DistributedDataParallel(network), {})):
            torch.manual_seed(0)
            network.zero_grad()
            run(tokens(), **options).logits.square().sum().backward()
            found.append([p.grad.clone() for p in network.parameters()])
    finally:
        torch.distributed.destroy_process_group()
    assert worst(*found) < 1e-12
