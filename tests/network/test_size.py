"""A model that cannot fit is refused before anything is allocated, by counting its weights."""

from __future__ import annotations

import time

import pytest
import torch
from msgspec.structs import replace

import everyformer
from everyformer import Stack
from everyformer.network import size
from everyformer.value import from_json, to_json

GPT2 = everyformer.member("gpt2", "tiny")
PAIR = everyformer.member("transformer", "tiny")
LARGEST = 2**31 - 1


def changed(**fields):
    text = to_json(GPT2)
    for name, number in fields.items():
        before = {"width": 64, "heads": 4, "num_layers": 2, "vocabulary": 256}[name]
        assert f'"{name}": {before}' in text
        text = text.replace(f'"{name}": {before}', f'"{name}": {number}')
    return lambda: from_json(text, everyformer.Model).build()


def huge(value):
    return replace(value, embed=replace(value.embed, vocabulary=LARGEST))


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (changed(width=LARGEST), r"does not divide into 4 heads; take for example heads=1, or a width of 2147483648"),
        (changed(width=LARGEST, heads=1), r"more than 2\^63 bytes; choose a smaller width"),
        (changed(width=LARGEST - 1, heads=2**30 - 1), r"heads is 1073741823|<= 65536"),
        (changed(num_layers=LARGEST), r"<= 65536"),
        (changed(width=2**20, num_layers=2**16), r"parameters, which take [\d,.]+ GiB, but the cpu has"),
        (changed(vocabulary=LARGEST), r"the model has 137,439,057,600 parameters"),
        (lambda: replace(PAIR, encoder=huge(PAIR.encoder), decoder=huge(PAIR.decoder)).build(), "GiB, but the cpu has"),
    ],
)
def test_an_absurd_model_is_refused_at_once(build, reason):
    start = time.process_time()
    with pytest.raises(ValueError, match=reason):
        build()
    assert time.process_time() - start < 2


@pytest.mark.parametrize("layers", [size.LONG, size.LONG + 3])
def test_the_count_of_a_long_stack_is_that_of_its_layers(layers):
    short = replace(everyformer.member("deep-character", "tiny"), width=16)
    body = Stack(3, tuple(replace(one) for one in short.body.layers[:1]), short.body.residual)
    counts = [size.parameters(replace(short, body=replace(body, num_layers=n))) for n in (3, 4, layers)]
    assert counts[2] == counts[0] + (layers - 3) * (counts[1] - counts[0])


def test_the_count_of_a_long_stack_of_two_kinds_of_layers_is_that_of_both():
    value = replace(everyformer.member("deep-character", "tiny"), width=16)
    layer = value.body.layers[0]
    pair = (layer, replace(layer, sublayers=layer.sublayers[:1]))
    counts = [size.parameters(replace(value, body=Stack(n, pair, value.body.residual))) for n in (2, 4, size.LONG + 2)]
    assert size.LONG % 2 == 0 and counts[2] == counts[0] + size.LONG // 2 * (counts[1] - counts[0])


def test_nothing_is_refused_on_the_meta_device():
    with torch.device("meta"):
        network = replace(GPT2, embed=everyformer.Tokens(2**31 - 1)).build()
    assert network.embed.table.weight.is_meta
