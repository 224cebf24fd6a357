"""Embeddings: tokens, patches, features, nodes, and several kinds in one sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from everyformer import (
    Features,
    Grid,
    Language,
    Learned,
    Mixed,
    Nodes,
    Patches,
    Pattern,
    PerToken,
    Sinusoidal,
    Tokens,
    from_json,
    to_json,
)
from everyformer.network.embed import patches
from everyformer.value import Size, Value
from tests.network import close, model, placed, randn, ready, tokens
from tests.spec import network as spec


@pytest.mark.spec(63)
@pytest.mark.parametrize("channels, rows, columns, size", [(3, 4, 6, 2), (1, 6, 3, 3), (2, 2, 2, 1)])
def test_an_image_is_split_into_patches_and_mapped(channels, rows, columns, size):
    image = randn(2, channels, rows, columns)
    vectors = torch.stack([torch.stack(spec.patches(one, size)) for one in image])
    close(patches(image, size), vectors, 1e-300)
    embed = ready(Patches(size, channels).build(8))
    close(embed(image), vectors @ embed.map.weight.T + embed.map.bias)
    assert vectors.shape[1] == rows * columns // size**2


@pytest.mark.spec(63)
def test_patches_are_a_strided_convolution():
    embed, image = ready(Patches(2, 3).build(8)), randn(2, 3, 4, 6)
    kernel = embed.map.weight.view(8, 3, 2, 2)
    close(embed(image), F.conv2d(image, kernel, embed.map.bias, stride=2).flatten(2).transpose(1, 2))


@pytest.mark.spec(34)
@pytest.mark.parametrize("scaled, width, factor", [(False, 8, 1.0), (True, 8, 8**0.5), (True, 4, 2.0)])
def test_tokens_are_rows_of_a_table(scaled, width, factor):
    embed, x = ready(Tokens(17, scaled=scaled).build(width)), tokens()
    close(embed(x), factor * torch.stack([torch.stack([embed.table.weight[i] for i in row]) for row in x]))


@pytest.mark.spec(64, 71)
def test_features_and_nodes_are_mapped_and_a_kind_is_added():
    x_BTF, kind_BT = randn(2, 3, 5), torch.tensor([[0, 2, 1], [1, 1, 0]])
    plain, nodes = ready(Features(5).build(8)), ready(Nodes(5, kinds=3).build(8))
    close(plain(x_BTF), x_BTF @ plain.map.weight.T + plain.map.bias)
    for kinds_BT in (kind_BT, torch.zeros_like(kind_BT), torch.full_like(kind_BT, 2)):
        nodes.check((x_BTF, kinds_BT))
        close(nodes((x_BTF, kinds_BT)), x_BTF @ nodes.map.weight.T + nodes.map.bias + nodes.kind.weight[kinds_BT])


class PixelsThenText(Pattern, Value, frozen=True):
    """A user's own sparsity: all see the pixels; a character also sees the characters up to itself."""

    pixels: Size

    def allows(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k < self.pixels) | ((q >= self.pixels) & (k <= q))


CAPTIONED = Mixed(((Patches(2, 1), Grid(2, 3)), (Tokens(17), Sinusoidal())))


@pytest.mark.spec(70)
def test_a_mixed_sequence_has_the_positions_and_kind_vector_of_each_part():
    network, image, text = ready(model("full", embed=CAPTIONED)), randn(2, 1, 4, 6), tokens(length=4)
    pixels, words = network.embed.embeds
    cells = [spec.sinusoid(p // 3, 4) + spec.sinusoid(p % 3, 4) for p in range(6)]
    places = [spec.sinusoid(i, 8) for i in range(4)]  # the text counts from 0 again
    at = [torch.tensor(rows, dtype=torch.float64) for rows in (cells, places)]
    parts = (pixels(image) + at[0], words.table.weight[text] + at[1])
    literal = torch.cat([part + network.embed.kind_ND[n] for n, part in enumerate(parts)], dim=1)
    close(placed(network, (image, text)), literal)


@pytest.mark.spec(70, 72)
@pytest.mark.parametrize("pattern", [PixelsThenText(6), "prefix(6) | causal"])
def test_a_captioned_image_follows_the_users_pattern(pattern):
    """One sequence of pixels and characters: pixels never hear of the caption, a character of all pixels and the past."""
    network, image, text = ready(model(pattern, embed=CAPTIONED)), randn(2, 1, 4, 6), tokens(length=4)
    before = network((image, text)).hidden
    other_text = text.clone()
    other_text[:, 2] = (text[:, 2] + 1) % 17
    moved = (network((image, other_text)).hidden - before).abs().amax(-1) > 0
    assert moved.tolist() == [[i >= 8 for i in range(10)]] * 2
    other_image = image.clone()
    other_image[:, :, 3, 5] += 1  # in the last patch
    moved = (network((other_image, text)).hidden - before).abs().amax(-1) > 0
    assert moved.all()


@pytest.mark.spec(72)
def test_a_users_pattern_is_in_json_and_in_the_refusals():
    value = model(PixelsThenText(6), embed=CAPTIONED, outputs=(PerToken(3),))
    assert from_json(to_json(value), type(value)) == value
    with pytest.raises(ValueError, match=r"pixels_then_text\(6\) attends to the future"):
        model(PixelsThenText(6), outputs=(Language(),)).build()


@pytest.mark.spec(70)
def test_parts_may_have_different_limits_and_none():
    embed = Mixed(((Features(5), None), (Tokens(17), Learned(3))))
    network, x_BTF, text = ready(model("full", embed=embed)), randn(2, 9, 5), tokens(length=3)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    one, two = network((x_BTF, text)).hidden, network((x_BTF[:, order], text)).hidden
    close(one[:, :9][:, order], two[:, :9])  # a part without positions is a set
    close(one[:, 9:], two[:, 9:])


def test_padding_may_be_nan_in_the_backward_pass_too():
    network = ready(model("full", embed=Features(5)))
    feature_BTN, visible_BT = randn(2, 6, 5), torch.ones(2, 6, dtype=torch.bool)
    feature_BTN[1, 4:], visible_BT[1, 4:] = torch.nan, False
    network(feature_BTN, visible=visible_BT).hidden[visible_BT].sum().backward()
    assert all(bool(weight.grad.isfinite().all()) for weight in network.parameters())
