"""Tokens inside the layers: values of tokens, n-grams, and the input of the stack in each layer."""

from __future__ import annotations

import pytest
import torch

import everyformer
from everyformer import (
    Attention,
    FeedForward,
    Language,
    Layer,
    Model,
    Ngrams,
    PreNorm,
    Rotary,
    Stack,
    Standard,
    Tokens,
    parse,
)
from everyformer.train.optimizer import optimizers
from everyformer.train.recipe import Optim
from tests.network import VOCABULARY, close, model, ready, tokens
from tests.spec import network as spec

VALUES = Attention(Standard(4, key_heads=2), parse("causal & window(3)"), (Rotary(),), token_values=VOCABULARY)
BIGRAMS = Ngrams((2, 3), rows=11, features=4)


def all_three():
    layer = Layer((BIGRAMS, VALUES, FeedForward(12)), shortcut=True)
    return Model(width=8, embed=Tokens(VOCABULARY), body=Stack(2, (layer,), PreNorm()), outputs=(Language(),))


def test_ngrams_are_their_equation():
    module, token_BT = ready(model(None, net=BIGRAMS)), tokens(length=7)
    sublayer, x_BTD = module.body.layers[0].sublayers[0], module.embed(token_BT)
    seen = []
    handle = sublayer.register_forward_hook(lambda _, arguments, output: seen.append((arguments[0], output[0])))
    module(token_BT)
    handle.remove()
    x_BTD, found_BTD = seen[0]
    tables = dict(zip(BIGRAMS.orders, (table.weight for table in sublayer.tables), strict=True))
    for x_TD, token_T, found_TD in zip(x_BTD, token_BT.tolist(), found_BTD, strict=True):
        wanted = spec.ngrams(list(x_TD), token_T, tables, sublayer.out.weight.T)
        close(found_TD, torch.stack(wanted))


def test_ngrams_need_as_many_tokens_before_as_the_longest_has():
    """A cache that is trimmed to them continues exactly."""
    network, token_BT = ready(model(None, net=Ngrams((2, 4), rows=11, features=4))), tokens(length=9)
    assert network.max_distance() == 3
    cache = network(token_BT[:, :5], cache=everyformer.Cache()).cache
    close(network(token_BT[:, 5:], cache=cache.trim(3)).hidden, network(token_BT).hidden[:, 5:])


def test_values_of_tokens_are_their_equation():
    """Of one head, all of whose keys are equally likely, the output is the mean of the values up to each position."""
    value = Attention(Standard(1, merge_bias=False), parse("causal"), token_values=VOCABULARY)
    assert value.build(8).token_values.mix_2.tolist() == [0.5, 0.5]  # halves at first
    module, token_BT = ready(model(None, net=value)), tokens()
    sublayer, seen = module.body.layers[0].sublayers[0], []
    with torch.no_grad():
        sublayer.heads.qkv.weight[: 2 * 8] = 0
    handle = sublayer.register_forward_hook(lambda _, arguments, output: seen.append((arguments[0], output[0])))
    module(token_BT)
    handle.remove()
    x_BTD, found_BTD = seen[0]
    table, (a, b) = sublayer.token_values.table.weight, sublayer.token_values.mix_2
    for x_TD, token_T, found_TD in zip(x_BTD, token_BT.tolist(), found_BTD, strict=True):
        v = [sublayer.heads.qkv.weight[2 * 8 :] @ x for x in x_TD]
        v = spec.token_values(v, token_T, table, a, b, width=8)
        wanted = [sublayer.heads.out.weight @ (sum(v[: i + 1]) / (i + 1)) for i in range(len(v))]
        close(found_TD, torch.stack(wanted))


def test_a_layer_with_a_shortcut_reads_the_input_of_the_stack_too():
    layer = Layer((FeedForward(12),), shortcut=True)
    network = ready(Model(width=8, embed=Tokens(VOCABULARY), body=Stack(3, (layer,), PreNorm()), outputs=(Language(),)))
    x_BTD = network.embed(tokens())
    found_BTD = network(tokens()).hidden
    stream_BTD = x_BTD
    for one in network.body.layers:
        rows = spec.with_shortcut(list(stream_BTD.flatten(0, 1)), list(x_BTD.flatten(0, 1)), *one.mix_2)
        stream_BTD = torch.stack(rows).view_as(x_BTD)
        stream_BTD = stream_BTD + one.sublayers[0](one.residuals[0].normalize(stream_BTD))[0]
    close(found_BTD, network.body.stream.finish(stream_BTD, None))


def test_a_shortcut_is_the_same_in_recomputed_segments():
    network = ready(all_three()).train()
    losses = []
    for segments in (0, 2):
        network.body.checkpoint_segments = segments
        network.zero_grad()
        network(tokens()).hidden.square().sum().backward()
        losses.append([weight.grad.clone() for weight in network.parameters() if weight.grad is not None])
    for one, other in zip(*losses, strict=True):
        close(one, other)


@pytest.mark.parametrize("static", [False, True])
def test_text_from_slots_is_that_of_whole_passes(static):
    network = ready(all_three())
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8], [1, 2, 1, 2]]
    found = everyformer.generate(network, prompts, tokens=12, temperature=0, static=static)
    for prompt, text in zip(prompts, found, strict=True):
        whole = list(prompt)
        for _ in range(12):
            whole.append(int(network(torch.tensor([whole])).logits[0, -1].argmax()))
        assert list(text)[-12:] == whole[-12:]


def test_ngrams_without_a_table_are_refused():
    with pytest.raises(ValueError, match="ngrams has no orders; give at least one, such as"):
        model(net=Ngrams(())).build()


def test_muon_leaves_tables_inside_the_layers_to_adamw():
    network = all_three().build()
    _, muon = optimizers(network, Optim(name="muon"))
    tables = [weight for name, weight in network.named_parameters() if "table" in name]
    of_muon = {weight for group in muon.param_groups for weight in group["params"]}
    assert len(tables) == 2 * 3 + 1 and of_muon.isdisjoint(tables)
    assert len(of_muon) == 2 * 5  # of each layer: two of the attention, two of the net and one of the n-grams
