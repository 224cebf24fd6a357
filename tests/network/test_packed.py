"""Packed weights: the outputs are those of the plain ones up to rounding, and nothing of the network changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import everyformer
from everyformer import Cache, Language, generate
from everyformer.network.packed import FEW, Packed, PackedLinear
from tests.network import model, tokens


@pytest.fixture(autouse=True)
def pack_small_ones(monkeypatch):
    monkeypatch.setattr("everyformer.network.packed.SMALL", 0)
    monkeypatch.setattr("everyformer.network.packed.on_intel", lambda: False)


def network(**more):
    torch.manual_seed(0)
    return model(outputs=(Language(**more),), width=32).build().eval()


@torch.no_grad()
@pytest.mark.parametrize("more", [{}, {"tied": False, "bias": True}, {"soft_cap": 2.0}], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 7)])
def test_packed_weights_give_the_outputs_of_plain_ones(more, shape):
    plain = network(**more)
    token_BT, packed = tokens(*shape), Packed(plain)
    expected = plain(token_BT).logits
    with packed.used():
        output = plain(token_BT, cache=Cache(), probe=everyformer.Probe(records_weights=False, logits=False))
        found = packed.logits(output.logits)
    assert packed.maps and (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_a_weight_that_changes_is_packed_again():
    plain, token_BT = network(), tokens()
    packed = Packed(plain)
    before = plain(token_BT).hidden
    for weight in plain.body.parameters():
        weight.mul_(1.5)
    expected = plain(token_BT).hidden
    with packed.used():
        found = plain(token_BT).hidden
    assert (expected - before).abs().max() > 0.01 and torch.allclose(found, expected, atol=1e-5)


def test_outside_the_block_the_network_is_as_before_and_gradients_are_those_of_plain_weights():
    plain, token_BT = network(), tokens()
    packed = Packed(plain)
    names = [name for module in plain.modules() for name in vars(module)]
    with packed.used():
        inside = torch.autograd.grad(plain(token_BT).hidden.sum(), plain.body.parameters())
    outside = torch.autograd.grad(plain(token_BT).hidden.sum(), plain.body.parameters())
    assert all(torch.equal(one, two) for one, two in zip(inside, outside, strict=True))
    assert [name for module in plain.modules() for name in vars(module)] == names


@torch.no_grad()
def test_a_batch_of_few_sequences_is_multiplied_by_plain_weights_on_intel(monkeypatch):
    monkeypatch.setattr("everyformer.network.packed.on_intel", lambda: True)
    map_ = nn.Linear(16, 32).eval()
    packed = PackedLinear(map_.weight, map_.bias)
    few, many = torch.randn(FEW - 1, 20, 16), torch.randn(FEW, 1, 16)
    assert torch.equal(packed(few), map_(few)) and packed.version == -1  # not packed yet
    torch.testing.assert_close(packed(many), map_(many), rtol=1e-5, atol=1e-6)
    assert packed.version == map_.weight._version


def test_only_plain_maps_in_float32_are_packed():
    class Own(nn.Linear):
        pass

    assert not Packed(network().double()).maps and not Packed(nn.Sequential(Own(3, 3))).maps
    assert len(Packed(nn.Sequential(nn.Linear(3, 3), Own(3, 3))).maps) == 1


def test_small_maps_are_not_packed(monkeypatch):
    monkeypatch.setattr("everyformer.network.packed.SMALL", 9)
    maps = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    assert [module for module, _ in Packed(maps).maps] == [maps[1]]


def test_generation_packs_for_many_tokens_and_packed_switches_it_off():
    plain, used = network(), list[bool]()
    plain.register_forward_pre_hook(
        lambda module, inputs: used.append("forward" in vars(module.body.layers[0].sublayers[0].heads.out))
    )
    texts = [
        generate(plain, [[1, 2, 3]], count, temperature=0, packed=packed)[0]
        for count, packed in ((40, None), (40, False), (3, None))
    ]
    assert texts[0] == texts[1] and texts[2] == texts[0][:6]
    assert used == [True] * 40 + [False] * 43
