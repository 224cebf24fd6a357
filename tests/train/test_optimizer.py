"""The optimizers of a network: their updates are the papers' equations, with the settings of the recipe."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from everyformer import build
from everyformer.train.muon import BatchedMuon
from everyformer.train.optimizer import optimizers, set_lr
from everyformer.train.recipe import Optim
from tests.spec import optimizer as spec

SETTINGS = [Optim(lr=0.01, weight_decay=0.1), Optim(lr=0.1, beta1=0.5, beta2=0.75, weight_decay=0.5)]


def steps(network: nn.Module, optim: Optim, factor: float = 1.0, count: int = 3):
    """Train on `count` random gradients. Returns each weight before and after, with its gradients."""
    random = torch.Generator().manual_seed(0)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in before}
    trained = optimizers(network, optim)
    for _ in range(count):
        set_lr(trained, factor)
        for name, p in network.named_parameters():
            p.grad = torch.randn(p.shape, generator=random, dtype=p.dtype)
            gradients[name].append(p.grad.clone())
        for optimizer in trained:
            optimizer.step()
    return [(name, before[name], p.detach(), gradients[name]) for name, p in network.named_parameters()]


@pytest.mark.spec(133)
@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize("optim", SETTINGS, ids=["defaults", "others"])
def test_adamw_is_its_equations_and_decays_matrices_only(optim, factor):
    """With the learning rate of the schedule's factor. Vectors (norms, biases) do not decay."""
    for _, before, after, gradients in steps(nn.Linear(3, 2).double(), optim, factor):
        decay = optim.weight_decay if before.dim() == 2 else 0.0
        for at in range(before.numel()):
            numbers = [float(g.flatten()[at]) for g in gradients]
            settings = (optim.lr * factor, optim.beta1, optim.beta2, decay)
            expected = spec.adamw(float(before.flatten()[at]), numbers, *settings)
            assert float(after.flatten()[at]) == pytest.approx(expected, rel=1e-9)


@pytest.mark.spec(133)
def test_muon_moves_matrices_by_nearly_orthogonal_ones_and_the_rest_by_adamw():
    """The singular values of Muon's step are within a third of 1, those of its definition; a step of SGD or Adam is far from it."""
    optim = Optim(name="muon", muon_lr=0.02, lr=0.01, weight_decay=0.1)
    network = build("byte-language", "tiny", layers=1)
    for name, before, after, gradients in steps(network, optim, factor=0.5, count=2):
        if ".layers." in name and before.dim() == 2:
            maps = (
                3 if name.endswith("qkv.weight") else 1
            )  # those to queries, keys and values are orthogonalized each by itself
            for old, new, *parts in zip(*(x.chunk(maps) for x in (before, after, *gradients)), strict=True):
                expected = spec.muon(old, parts, optim.muon_lr * 0.5, optim.weight_decay)
                step, wanted = new - old, expected - old
                assert torch.nn.functional.cosine_similarity(step.flatten(), wanted.flatten(), dim=0) > 0.95
                assert 0.7 < step.norm() / wanted.norm() < 1.3
        else:
            decay = optim.weight_decay if before.dim() >= 2 else 0.0
            numbers = [float(g.flatten()[0]) for g in gradients]
            expected = spec.adamw(float(before.flatten()[0]), numbers, 0.005, optim.beta1, optim.beta2, decay)
            assert float(after.flatten()[0]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_on_all_matrices_of_a_shape_equals_muon_on_each(decay):
    """Products in bfloat16 are added up in another order: the steps differ by less than bfloat16's rounding of a step."""
    torch.manual_seed(0)
    shapes = [(6, 4), (4, 6), (6, 4), (5, 5), (6, 4), (5, 5)]
    start = [torch.randn(shape) for shape in shapes]
    results = []
    for kind in (torch.optim.Muon, BatchedMuon):
        weights = [nn.Parameter(one.clone()) for one in start]
        optimizer, generator = kind(weights, lr=0.02, weight_decay=decay), torch.Generator().manual_seed(1)
        for _ in range(3):
            for weight in weights[1:]:  # the first has no gradient
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        results.append([weight.detach() for weight in weights])
        buffers = [optimizer.state[weight]["momentum_buffer"] for weight in weights[1:]]
        results[-1] += buffers
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=0.02 * 3 * 2**-6)
    assert torch.equal(results[1][0], start[0])


def test_muon_on_maps_that_are_stacked_equals_muon_on_each():
    torch.manual_seed(0)
    whole, random = nn.Parameter(torch.randn(10, 4)), torch.Generator().manual_seed(1)
    parts = [nn.Parameter(part.clone()) for part in whole.detach().split([4, 4, 2])]
    stacked, apart = BatchedMuon([whole], {whole: [4, 4, 2]}, lr=0.02), BatchedMuon(parts, lr=0.02)
    for _ in range(3):
        whole.grad = torch.randn(10, 4, generator=random)
        for part, gradient in zip(parts, whole.grad.split([4, 4, 2]), strict=True):
            part.grad = gradient.clone()
        stacked.step()
        apart.step()
    torch.testing.assert_close(whole.detach(), torch.cat(parts).detach(), rtol=0, atol=0)
    assert stacked.state[whole]["momentum_buffer"].shape == (10, 4)


def test_each_map_of_a_layer_is_one_for_muon():
    network = build("llama", "tiny")
    _, muon = optimizers(network, Optim(name="muon"))
    layer = network.body.layers[0]
    rows = {
        "qkv": muon.stacked[layer.sublayers[0].heads.qkv.weight],
        "net": muon.stacked[layer.sublayers[1].hidden[0].weight],
    }
    assert rows == {"qkv": [64, 32, 32], "net": [128, 128]}
    assert layer.sublayers[0].heads.out.weight not in muon.stacked


def test_frozen_weights_are_left_out_and_a_network_without_vectors_has_one_group():
    network = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    network[1].requires_grad_(False)
    (adamw,) = optimizers(network, Optim(lr=0.5))
    assert [len(group["params"]) for group in adamw.param_groups] == [1]
    assert adamw.param_groups[0]["params"][0] is network[0].weight and adamw.param_groups[0]["full_lr"] == 0.5
    assert isinstance(adamw, torch.optim.AdamW)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("capture_on", [None, torch.device("cpu")], ids=["numbers", "tensors"])
def test_a_skipped_step_changes_no_weight_and_no_state(name, capture_on):
    """Whatever its gradients are; the steps around it are those of a run without it."""
    found = []
    for skips in ((0.0, 0.0), (0.0, 1.0, 0.0)):
        network = build("byte-language", "tiny", layers=1)
        with torch.no_grad():
            for seed, p in enumerate(network.parameters()):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
        trained, random = optimizers(network, Optim(name=name), capture_on), torch.Generator().manual_seed(0)
        for skip in skips:
            set_lr(trained, 0.5)
            for p in network.parameters():
                p.grad = torch.full_like(p, math.nan) if skip else torch.randn(p.shape, generator=random)
            for optimizer in trained:
                optimizer.found_inf = torch.tensor(skip)
                optimizer.step()
        states = [state for one in trained for state in one.state.values()]
        found.append([*network.parameters(), *(x for state in states for x in state.values())])
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_learning_rates_that_are_tensors_give_the_steps_of_those_that_are_numbers(name):
    """To the rounding of a learning rate to float32."""
    found = []
    for capture_on in (None, torch.device("cpu")):
        torch.manual_seed(0)
        network = build("byte-language", "tiny", layers=1)
        trained, random = optimizers(network, Optim(name=name), capture_on), torch.Generator().manual_seed(0)
        for factor in (1.0, 0.5, 0.1):
            set_lr(trained, factor)
            for p in network.parameters():
                p.grad = torch.randn(p.shape, generator=random)
            for optimizer in trained:
                optimizer.step()
        group = trained[0].param_groups[0]
        assert isinstance(group["lr"], torch.Tensor) == group["capturable"] == (capture_on is not None)
        found.append([p.detach() for p in network.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-8)
