"""The transforms of torch.func: gradients of each sample, ensembles, and calls with other weights, on every member."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils._pytree import tree_map

import everyformer
from everyformer import Cache, SideInputs
from everyformer.network.network import Network
from everyformer.study.example import Example, example, parts
from tests.network import model, tokens

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:torch.searchsorted")
NETWORKS = [*((name, 0) for name in everyformer.members()), ("transformer", 1)]


def network_of(name: str, number: int) -> tuple[Network, Example]:
    """A network of a member in float64 (of a pair the encoder or the decoder), and an example of two sequences for it."""
    torch.manual_seed(0)
    network, source_width = parts(everyformer.build(name, "tiny").double().eval())[number]
    return network, example(network.value, batch=2, length=6, source_width=source_width).to(dtype=torch.float64)


def with_weights(network: Network, weights: Any) -> Callable[..., Any]:
    return lambda *args, **options: functional_call(network, weights, args, options)


@pytest.mark.parametrize(("name", "number"), NETWORKS)
def test_gradients_of_each_sample_equal_those_of_the_samples_by_themselves(name, number):
    network, data = network_of(name, number)
    first = data.rows(torch.tensor([0]))

    def loss(weights: Any, inputs: Any, per_token: Any) -> torch.Tensor:
        one = replace(first, **tree_map(lambda x: x[None], {"inputs": inputs, "per_token": per_token}))
        output = one.run(with_weights(network, weights))
        return output.hidden.square().mean() + sum(output.aux.values())

    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, data.inputs, data.per_token)
    for row in range(2):
        single = grad(loss)(weights, *tree_map(operator.itemgetter(row), (data.inputs, data.per_token)))
        for key, gradient in single.items():
            torch.testing.assert_close(found[key][row], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "number"), NETWORKS)
def test_an_ensemble_by_vmap_equals_its_networks(name, number):
    network, data = network_of(name, number)
    networks = [copy.deepcopy(network) for _ in range(2)]
    for one in networks:
        for weight in one.parameters():
            weight.data += 0.01 * torch.randn_like(weight)
    found = vmap(lambda *weights: data.run(with_weights(network, weights)).hidden)(*stack_module_state(networks))
    for hidden, one in zip(found, networks, strict=True):
        torch.testing.assert_close(hidden, data.run(one).hidden, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", everyformer.members())
def test_a_functional_call_leaves_the_weights_of_the_network_in_place(name):
    network = everyformer.build(name, "tiny").eval()
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    before = [network.get_parameter(name) for name in names]
    weights = {name: 2 * weight.detach() for name, weight in network.named_parameters()}
    if hasattr(network, "encoder"):
        functional_call(network, weights, tuple(example(part.value).inputs for part, _ in parts(network)))
    else:
        example(network.value).to(dtype=torch.float32).run(with_weights(network, weights))
    assert all(network.get_parameter(name) is weight for name, weight in zip(names, before, strict=True))


def test_shared_weights_stay_shared_when_they_are_moved_and_copied():
    pair = copy.deepcopy(everyformer.build("transformer", "tiny")).double()
    assert pair.encoder.embed.table.weight is pair.decoder.embed.table.weight
    network = copy.deepcopy(everyformer.build("adaptive-span", "tiny")).double()
    one, other = (layer.sublayers[0]._score_mods()[0] for layer in network.body.layers)
    assert one is other is network.body.shared[0] and one.key_RE.dtype == torch.float64


def test_gradients_of_each_sample_with_padding_and_a_cache():
    network = model("causal & window(3)", memory=everyformer.SegmentMemory(3)).build().double().eval()
    token_BT, visible_BT = tokens(3, 6), torch.ones(3, 6, dtype=torch.bool)
    visible_BT[1, :2] = visible_BT[2, 4:] = False

    def loss(weights: Any, token_T: torch.Tensor, visible_T: torch.Tensor) -> torch.Tensor:
        call = with_weights(network, weights)
        first = call(token_T[None], visible=visible_T[None], cache=Cache(segment_memory=True))
        second = call(token_T[None], cache=first.cache)
        return first.hidden.masked_fill(~visible_T[None, :, None], 0).square().sum() + second.hidden.square().sum()

    weights = {name: weight.detach() for name, weight in network.named_parameters()}
    found = vmap(grad(loss), in_dims=(None, 0, 0))(weights, token_BT, visible_BT)
    for row in range(3):
        for key, gradient in grad(loss)(weights, token_BT[row], visible_BT[row]).items():
            torch.testing.assert_close(found[key][row], gradient, rtol=0, atol=1e-11)


def test_what_vmap_cannot_know_is_refused_in_a_sentence():
    network = model("causal & same_document").build()

    def run(token_T: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        side = SideInputs(documents=torch.zeros(1, 6, dtype=torch.long))
        return network(token_T[None], side_inputs=side, position_offset=start[None]).hidden

    with pytest.raises(ValueError, match="inside vmap the last position cannot be read"):
        vmap(run)(tokens(), torch.tensor([0, 3]))
