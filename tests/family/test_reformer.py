"""Reformer: the published sizes, one hash per pass of a reversible stack, and the future leak of the published pattern."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from everyformer import Cache, Causal, Chunked, Context, Hashed, Local, Model, build, contracts, generate, member
from everyformer.attention.hashing import Hash
from everyformer.family.reformer import FULL_PATTERN, PUBLISHED_PATTERN
from everyformer.family.table import parameters
from tests.network import close, ready, tokens

SMALL = {"width": 16, "heads": 2, "pattern": "hashed(2, 4, 3)", "context": 64, "dropout": 0.0}
LEAKING = Chunked(2, 4, 3, leaks=True)  # the published pattern with the same numbers


@pytest.mark.spec(115)
def test_parameters_are_those_of_the_published_code():
    """ReformerModelWithLMHead of transformers 4.35.2 with the released enwik8 sizes has 149,182,722. Ours has half the
    output weights and half the last norm, and two whole position tables for two that stand side by side."""
    head, norm, places = 258 * 1024, 2 * 1024, (128 + 512) * 1024 - (128 * 256 + 512 * 768)
    assert parameters(member("reformer", "enwik8", vocabulary=258)) == 149_182_722 - head - norm + places


def test_sizes_that_are_published():
    """DepthModule, width, heads, their width, net, length, rounds, buckets, window: trax's configurations; the paper's width,
    net and heads."""
    stated = {
        "enwik8": (12, 1024, 8, 128, 4096, 65_536, 4, 512, 256),
        "imagenet64": (6, 1024, 8, 64, 4096, 64 * 64 * 3, 2, 192, 128),
    }
    for size, numbers in stated.items():
        value = member("reformer", size)
        assert isinstance(value, Model)
        layer = value.body.layers[2 % len(value.body.layers)]
        form, pattern = layer.sublayers[0].heads, layer.sublayers[0].pattern
        found = (value.body.num_layers, value.width, form.heads, form.key_width or value.width // form.heads)
        assert (*found, layer.sublayers[-1].hidden, math.prod(value.position.sizes)) == numbers[:6]
        assert pattern == Hashed(*numbers[6:])
    near = Causal() & Local(128, 128)
    assert [layer.sublayers[0].pattern for layer in member("reformer").body.layers] == [
        near,
        near,
        Hashed(4, 512, 256),
        near,
    ]


def moved(network: torch.nn.Module, token_BT: Tensor) -> Tensor:
    """How far another last token moves each earlier output."""
    other = token_BT.clone()
    other[:, -1] = (other[:, -1] + 1) % 17
    return (network(token_BT).hidden - network(other).hidden).detach().abs().amax((0, 2))[:-1]


@pytest.mark.spec(120)
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_the_published_pattern_leaks_the_future_and_ours_does_not(kernel):
    """No query attends to a later key in either, but in the published one the last token moves the chunks of the others."""
    token_BT = tokens(batch=4, length=40)
    for pattern, leaks in ((Hashed(2, 4, 3), False), (LEAKING, True)):
        network = ready(build("reformer", "tiny", layers=1, **SMALL | {"pattern": pattern}))
        assert network.value.body.is_causal() is not leaks
        far = moved(lambda x, network=network: network(x, kernel=kernel), token_BT)
        assert bool((far > 1e-3).any()) is leaks and bool((far == 0).all()) is not leaks


def test_what_leaks_is_refused_a_past_and_still_writes():
    network = ready(build("reformer", "tiny", **SMALL | {"pattern": LEAKING}))
    cache = network(tokens(), cache=Cache()).cache
    with pytest.raises(
        ValueError, match=r"later positions decide to which keys earlier queries attend; .* without cache="
    ):
        network(tokens(), cache=cache)
    written = generate(network, [[1, 2, 3]], 4, temperature=0)
    for end in range(3, 7):  # each token is the likeliest after all before it, read at once
        assert written[0][end] == int(network(torch.tensor([written[0][:end]])).logits[0, -1].argmax())


@pytest.mark.spec(118, 119)
@pytest.mark.parametrize("kernel", ["sdpa", "hashed"])
def test_going_back_through_the_stack_hashes_nothing_anew(kernel, monkeypatch):
    """The backward pass computes each attention again, from streams that come back to rounding: whom a query saw stays.

    Gradients are those of a plain computation, with the feed-forward net in chunks and dropout.
    """
    calls, hashes = [], Hash.forward

    def counted(self: Hash, *given: Any) -> Tensor:
        calls.append(self)
        return hashes(self, *given)

    monkeypatch.setattr(Hash, "forward", counted)
    network = ready(build("reformer", "tiny", layers=3, chunk=4, **SMALL | {"dropout": 0.2})).train()
    found = []
    for options in ({"cache": Cache()}, {}):  # a call that keeps its past keeps everything else too
        torch.manual_seed(0)
        hidden = network(tokens(length=11), kernel=kernel, **options).hidden
        slopes = torch.autograd.grad(hidden.square().sum(), list(network.parameters()), allow_unused=True)
        found.append([slope for slope in slopes if slope is not None])
    assert len(calls) == 2 * 3
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def test_a_cached_key_is_hashed_once(monkeypatch):
    """Its bucket comes with it, wherever the past is cut, trimmed and reordered."""
    sizes: list[int] = []
    plain = Hash.buckets

    def counted(self: Hash, k_BHKE: Tensor) -> Tensor:
        sizes.append(k_BHKE.shape[2])
        return plain(self, k_BHKE)

    network, token_BT = ready(build("reformer", "tiny", layers=1, **SMALL)), tokens(length=9)
    whole = network(token_BT).hidden
    monkeypatch.setattr(Hash, "buckets", counted)
    cache = network(token_BT[:, :6], cache=Cache()).cache.roll_back(2).reorder(torch.tensor([1, 0]))
    for time in range(4, 9):
        output = network(token_BT[[1, 0], time : time + 1], cache=cache)
        cache = output.cache
        close(output.hidden[[1, 0], 0], whole[:, time])
    assert sizes == [6, 1, 1, 1, 1, 1]


@pytest.mark.spec(115)
def test_more_rounds_find_more_of_what_full_attention_sees():
    """The weight that full attention with shared queries and keys gives to the keys that so many rounds find."""
    network = ready(build("reformer", "tiny", layers=1, **SMALL | {"pattern": Hashed(2, 4, 64)}))
    heads = network.body.layers[0].sublayers[0].heads
    q, k, _ = (x.detach() for x in heads.project(torch.randn(8, 64, 16, dtype=torch.float64)))
    weight = (q @ k.mT).masked_fill(torch.ones(64, 64).triu().bool(), -torch.inf).softmax(-1)[:, :, 1:]
    found = []
    for rounds in (1, 2, 4, 8, 16):
        torch.manual_seed(0)
        pattern, context = Hashed(rounds, 8, 64), Context.of(64, 64, q.device)
        hashes = Hash(pattern, 2, 8).double()
        context = context.with_hashes(hashes(hashes.buckets(k), context))
        found.append(float((weight * context.mask(pattern, 8, 2)[:, :, 1:]).sum(-1).mean()))
    assert found == sorted(found) and found[0] < 0.5 and found[-1] > 0.9


def test_full_pattern_is_what_many_rounds_find():
    """With two buckets of all keys and many rounds a query finds all earlier keys, and itself only if it is alone."""
    pattern = FULL_PATTERN
    context, hashes = Context.of(8, 8, torch.device("cpu")), Hash(Hashed(64, 2, 8), 1, 4)
    context = context.with_hashes(hashes(hashes.buckets(torch.randn(1, 1, 8, 4)), context))
    assert torch.equal(pattern.mask(8), context.mask(Hashed(64, 2, 8), 1, 1)[0])


def test_the_published_pattern_can_be_chosen_and_is_known_to_leak():
    """It keeps every contract except those of causal models, which it is not."""
    value = member("reformer", "tiny", pattern="chunked(2, 8, 16, False, True)")
    report = contracts(value, ["future", "cache", "padding", "neighbours", "kernels"])
    assert not report.failures and report.not_applicable == ["future", "cache"]
    assert value.body.layers[0].sublayers[0].pattern == Chunked(2, 8, 16, leaks=True)
    assert Chunked(4, 512, 256, leaks=True) == PUBLISHED_PATTERN
