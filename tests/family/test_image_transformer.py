"""The Image Transformer: its sizes, its two kinds of local attention, its two outputs, its encoder."""

from __future__ import annotations

import pytest

from everyformer import EncoderDecoder, Features, Full, Grid, Logistics, Model, Tokens, member, parse
from everyformer.family.table import parameters


@pytest.mark.spec(98, 102)
def test_sizes_that_the_paper_states():
    """DepthModule, width, heads, width of the net, dropout. CIFAR-10: 12, 512, 4, 2048, 0.3, logistics 14, 256, 8, 512, 0.2; ImageNet."""
    stated = {
        "cifar10": (12, 512, 4, 2048, 0.3),
        "cifar10-logistics": (14, 256, 8, 512, 0.2),
        "imagenet32": (12, 512, 8, 2048, 0.1),
    }
    for size, numbers in stated.items():
        value = member("image-transformer", size)
        layer = value.body.layers[0]
        found = (value.body.num_layers, value.width, layer.sublayers[0].heads.heads, layer.sublayers[-1].hidden)
        assert (*found, value.body.residual.dropout) == numbers
        assert layer.sublayers[0].pattern == parse("causal & local(256, 256)")  # 256 positions, a memory of 512 in all
    assert member("image-transformer").position == Grid(32, 96)
    assert member("image-transformer", "cifar10-logistics").outputs == (Logistics(3, 256, 10),)


def test_parameters_by_hand():
    """Per layer 4 D^2 of attention, 2 D F + D + F of the net, 4 D of norms; 3 x 256 tokens and a start; 256 outputs, or 100."""

    def layers(count: int, width: int, hidden: int, crosses: bool = False) -> int:
        return count * ((8 if crosses else 4) * width**2 + 2 * width * hidden + hidden + (7 if crosses else 5) * width)

    tables, outputs = 769 * 512, 513 * 256
    for size in ("cifar10", "imagenet32"):
        assert parameters(member("image-transformer", size)) == layers(12, 512, 2048) + tables + outputs
    pixels = 4 * 256 + 257 * 100
    assert parameters(member("image-transformer", "cifar10-logistics")) == layers(14, 256, 512) + pixels
    both = layers(6, 512, 2048) + layers(12, 512, 2048, crosses=True) + 2 * tables + outputs
    assert parameters(member("image-transformer", "celeba")) == both


@pytest.mark.spec(99, 100, 101, 102)
def test_kinds_outputs_and_the_encoder_are_settings():
    made = {"rows": 16, "columns": 12, "channels": 3, "levels": 32}
    value = member("image-transformer", "tiny", pattern="local2d(36, 8, 18, 7, 7)", **made)
    assert str(value.body.layers[0].sublayers[0].pattern) == "causal & local2d(36, 8, 18, 7, 7)"
    assert value.position == Grid(16, 36, block=(8, 18)) and value.embed == Tokens(97, scaled=True)
    value = member("image-transformer", "tiny", pattern="local2d(12, 4, 6, 4, 3)", logistics=10, **made)
    assert str(value.body.layers[0].sublayers[0].pattern) == "causal & local2d(12, 4, 6, 4, 3)"
    assert value.position == Grid(16, 12, block=(4, 6)) and value.embed == Features(3)
    assert value.outputs == (Logistics(3, 32, 10),)
    pair = member("image-transformer", "tiny", downsample=4, **made)
    assert isinstance(pair, EncoderDecoder) and pair.encoder.position == Grid(4, 9)
    assert (
        pair.encoder.body.layers[0].sublayers[0].pattern == pair.decoder.body.layers[0].sublayers[1].pattern == Full()
    )
    assert (
        pair.decoder.body.layers[0].sublayers[0]
        == member("image-transformer", "tiny", **made).body.layers[0].sublayers[0]
    )
    assert isinstance(member("image-transformer", "tiny", downsample=1), Model)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"downsample": 3}, "image-transformer.downsample is 3, which does not divide 28"),
        ({"pattern": "local2d(14, 7, 7, 7, 7)"}, "a row of the image has 28 positions; write 28 as its first number"),
        ({"pattern": "local2d(28, 7, 5, 7, 7)"}, r"local2d.width is 5: 28 columns do not divide into such blocks"),
        (
            {"pattern": "local2d(28, 5, 7, 7, 7)"},
            r"grid.block is \(5, 7\): 28 rows do not divide into blocks of 5; give a divisor of 28",
        ),
        ({"pattern": "local3d(8)"}, "no pattern is named 'local3d'.* did you mean local2d"),
        ({"levels": 1, "logistics": 10}, "logistics.levels is 1"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        member("image-transformer", "tiny", **changes)
