"""Output heads: equation 9 of source T, pooling, BERT's head and the mixture of logistics."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from everyformer import Classify, Features, Language, LayerNorm, Logistics, Masked, PerToken, Tokens
from everyformer.network.output_head import read
from tests.network import close, model, randn, ready, tokens
from tests.spec import image
from tests.spec import network as spec

VISIBLE = [[True] * 6, [False, False, True, True, True, True], [False, True, False, False, False, False]]


@pytest.mark.spec(53, 54)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_next_token_distribution_is_equation_9(tied, bias, scaled):
    """softmax(W_z^T z), W_z the embedding itself or a map of its own, or W_z / sqrt(D); it sums to one over the vocabulary."""
    network, x = ready(model(outputs=(Language(tied=tied, bias=bias, scaled=scaled),))), tokens()
    output = network(x)
    W_z = (network.embed.table.weight if tied else network.outputs[0].map.weight).T
    W_z = W_z / 8**0.5 if scaled else W_z
    b = network.outputs[0].bias if bias else torch.zeros(17)
    literal = torch.stack([torch.stack([spec.softmax(W_z.T @ z + b) for z in row]) for row in output.hidden])
    found = output.logits.softmax(-1)
    close(found, literal)
    close(found.sum(-1), torch.ones(2, 6, dtype=torch.float64))


@pytest.mark.spec(54)
def test_tied_weights_are_one_tensor_with_gradients_from_both_ends():
    tied, untied = ready(model(outputs=(Language(),))), ready(model(outputs=(Language(tied=False),)))
    assert len(list(tied.outputs.parameters())) == 0
    assert sum(p.numel() for p in untied.parameters()) == sum(p.numel() for p in tied.parameters()) + 17 * 8
    tied(tokens() * 0).logits.square().sum().backward()  # only token 0 goes in
    assert (tied.embed.table.weight.grad.abs().amax(1) > 0).all()  # all come out


@pytest.mark.spec(53)
def test_a_tied_head_of_a_scaled_embedding_uses_the_plain_weights():
    network = ready(model(embed=Tokens(17, scaled=True), outputs=(Language(),)))
    output = network(tokens())
    close(output.logits, output.hidden @ network.embed.table.weight.T)


@pytest.mark.spec(50, 51, 52)
@pytest.mark.parametrize("reading", ["mean", "max", "last", "first"])
@pytest.mark.parametrize("padded", [False, True])
def test_pooling_leaves_padding_out(reading, padded):
    z_BTD = randn(3, 6, 4)
    visible = VISIBLE if padded else [[True] * 6] * 3
    literal = torch.stack([spec.pool(list(z), seen, reading) for z, seen in zip(z_BTD, visible, strict=True)])
    close(read(z_BTD, torch.tensor(visible) if padded else None, reading), literal)
    junk = z_BTD.masked_fill(~torch.tensor(visible)[..., None], 1e6)
    close(read(junk, torch.tensor(visible), reading), literal)


POOLERS = {"tanh": torch.tanh, "relu": spec.relu, "gelu": spec.gelu}


@pytest.mark.spec(50, 51, 52, 53, 65)
@pytest.mark.parametrize("reading", ["mean", "max", "last", "first"])
@pytest.mark.parametrize("pooler", [None, "tanh", "relu", "gelu"])
def test_classes_are_a_map_of_the_pooled_vector_and_padding_changes_nothing(reading, pooler):
    options = {"pooler": True, "pooler_activation": pooler} if pooler else {}
    network, x = ready(model("full", outputs=(Classify(3, reading, **options),))), tokens(3)
    output = network(x, visible=torch.tensor(VISIBLE))
    head = network.outputs[0]
    for row, z_TD in enumerate(output.hidden):
        z = spec.pool(list(z_TD), VISIBLE[row], reading)
        z = POOLERS[pooler](head.pooler.weight @ z + head.pooler.bias) if pooler else z
        close(output.logits[row], head.map.weight @ z + head.map.bias)
        alone = network(x[row : row + 1, VISIBLE[row]])
        close(output.logits[row], alone.logits[0])
    close(output.logits.softmax(-1).sum(-1), torch.ones(3, dtype=torch.float64))


@pytest.mark.spec(52)
def test_the_class_token_is_first_and_is_pooled():
    network, x = ready(model("full", outputs=(Classify(3, "first"),), class_token=True)), tokens(3)
    output = network(x, visible=torch.tensor(VISIBLE))
    assert output.hidden.shape[1] == 7
    close(output.logits, output.hidden[:, 0] @ network.outputs[0].map.weight.T + network.outputs[0].map.bias)
    before = network(x).logits
    with torch.no_grad():
        network.class_token.add_(torch.randn_like(network.class_token))
    assert (network(x).logits - before).abs().amin(0).max() > 1e-3
    for row, seen in enumerate(VISIBLE):
        close(network(x, visible=torch.tensor(VISIBLE)).logits[row], network(x[row : row + 1, seen]).logits[0])


@pytest.mark.parametrize("bias", [True, False])
def test_a_distilled_head_is_the_mean_of_a_map_of_each_class_token(bias):
    head = Classify(3, "first", bias=bias, distilled=True)
    network = ready(model("full", outputs=(head,), class_token=2))
    output, literal = network(tokens(3)), torch.zeros(3, 3, dtype=torch.float64)
    for number, one in enumerate((network.outputs[0].map, network.outputs[0].distilled)):
        literal += output.hidden[:, number] @ one.weight.T + (one.bias if bias else 0)
    close(output.logits, literal / 2)


def test_the_masked_head_is_berts():
    """W_e LN(gelu(W z + b)) + b'."""
    network, x = ready(model("full", outputs=(Masked(eps=1e-3),))), tokens()
    output, head = network(x), network.outputs[0]
    for z_TD, logits_TV in zip(output.hidden, output.logits, strict=True):
        for z, logits in zip(z_TD, logits_TV, strict=True):
            hidden = spec.gelu(head.map.weight @ z + head.map.bias)
            normed = spec.layer_norm(hidden, head.norm.weight, head.norm.bias, 1e-3)
            close(logits, network.embed.table.weight @ normed + head.bias)


@pytest.mark.spec(65)
def test_one_representation_serves_the_next_token_a_pooled_class_and_every_token():
    """Several heads give a tuple, each what it gives alone."""
    heads = (Language(tied=False), Classify(3, "mean"), PerToken(2))
    network, x = ready(model(outputs=heads)), tokens()
    output = network(x)
    z, (language, classify, each) = output.hidden, network.outputs
    wanted = (
        z @ language.map.weight.T,
        z.mean(1) @ classify.map.weight.T + classify.map.bias,
        z @ each.map.weight.T + each.map.bias,
    )
    for found, literal in zip(output.logits, wanted, strict=True):
        close(found, literal)
    assert network.value.outputs == heads
    assert ready(model()).forward(x).logits is None


@pytest.mark.spec(65)
def test_a_head_may_have_a_vocabulary_of_its_own():
    network = ready(model(outputs=(Language(tied=False, vocabulary=5),), norm=LayerNorm()))
    assert network(tokens()).logits.shape == (2, 6, 5)


def components(head: Logistics, numbers: list[float]) -> list[dict]:
    """The numbers of one pixel as the equation has them: weight, means, logarithms of scales, then a_10, a_20, a_21, ..."""
    size, count = len(numbers) // head.components, head.channels
    found = []
    for start in range(0, len(numbers), size):
        one = numbers[start : start + size]
        pairs = [(c, d) for c in range(count) for d in range(c)]
        earlier = dict(zip(pairs, one[1 + 2 * count :], strict=True))
        found.append(
            {
                "weight": one[0],
                "mean": one[1 : 1 + count],
                "log_scale": one[1 + count : 1 + 2 * count],
                "earlier": earlier,
            }
        )
    return found


@pytest.mark.spec(102)
@pytest.mark.parametrize("channels, levels, kinds", [(1, 7, 3), (2, 4, 2), (3, 3, 2)])
def test_a_mixture_of_logistics_is_its_equation_and_sums_to_one(channels, levels, kinds):
    head = Logistics(channels, levels, kinds)
    network = ready(model(embed=Features(channels), outputs=(head,)))
    mixture = network(randn(2, 3, channels)).logits
    assert mixture.shape == (2, 3, kinds * (1 + 2 * channels + channels * (channels - 1) // 2))
    pixels = torch.tensor(list(product(range(levels), repeat=channels)))
    found = head.log_share(mixture[:, :1].expand(-1, len(pixels), -1), pixels.expand(2, -1, -1)).exp()
    close(found.sum(1), torch.ones(2, dtype=torch.float64))
    for row in range(2):
        parts = components(head, mixture[row, 0].tolist())
        literal = [image.pixel_probability(values, parts, levels) for values in pixels.tolist()]
        close(found[row], torch.tensor(literal, dtype=torch.float64))


@pytest.mark.spec(102)
def test_channels_drawn_in_turn_are_the_pixel():
    """p(x_0) p(x_1 | x_0) p(x_2 | x_0, x_1) = p(x), each a distribution over the levels."""
    head = Logistics(3, 4, 2)
    mixture, value = randn(5, 20), torch.randint(0, 4, (5, 3), generator=torch.Generator().manual_seed(0))
    total = torch.zeros(5, dtype=torch.float64)
    for channel in range(3):
        logits = head.next_logits(mixture, value[:, :channel])
        assert logits.shape == (5, 4)
        total += logits.log_softmax(-1).gather(1, value[:, channel : channel + 1])[:, 0]
    close(total, head.log_share(mixture[:, None], value[:, None])[:, 0])


@pytest.mark.spec(102)
def test_a_mixture_is_finite_with_gradients_far_in_the_tails():
    """In float32, with means at the wrong end and scales at the smallest: -log P grows like a distance, not to infinity."""
    head = Logistics(1, 256, 1)
    mixture = torch.tensor([[[0.0, -1.0, -9.0]], [[0.0, 1.0, -7.0]]], requires_grad=True)
    found = head.log_share(mixture, torch.tensor([[[128]], [[127]]]))
    distance = (1 + 1 / 255) - 1 / 255  # from the mean to the nearer edge of the bin
    literal = [-distance * math.exp(7) + math.log1p(-math.exp(-2 / 255 * math.exp(7)))] * 2
    assert torch.allclose(found[:, 0], torch.tensor(literal), rtol=1e-5)
    found.sum().backward()
    assert mixture.grad.isfinite().all() and (mixture.grad[:, 0, 1].abs() > 100).all()
