"""Paper: Parmar et al. 2018, Image Transformer.

Equations: post-norm causal blocks whose attention is local, 1-D (a block of l_q positions and l_m before it, raster order) or 2-D
(a rectangle, larger by h_m rows above and w_m columns to either side, block-raster order); sinusoids, half of them for the row
and half for the column and channel. `categorical` takes one channel of a pixel a step: an embedding of its own for each
channel, scaled by sqrt(D), and a softmax over the levels that all channels share. `logistics` takes a pixel a step: a linear
map of its channels, scaled to -1 .. 1, and a mixture of logistics. With `shrink` an encoder reads the picture made smaller by that
factor, each position seeing all, and the decoder looks at it (super-resolution).
Symbols: `block` l_q, `memory` l_m, `rectangle` l_q as rows x columns, `around` (h_m, w_m); all count positions, so that a channel is a
column where a step is one. Without a rectangle it is the largest that divides the picture, at most 8 x 32 and half of each side.
Departures: a first token (logistics: a pixel of zeros) stands before the picture, where the paper shifts in zeros. Classes are
no input. A query block holds l_q positions wherever the picture ends.
Not checked against the paper's text: layers, heads and dropout of its models. tensor2tensor's for CIFAR-10 have the same width, net,
block and dropout with 8 heads and 8 or 10 layers; `celeba` is its "best config for img2img". No parameters are stated anywhere.
"""

from __future__ import annotations

from typing import Any, Literal

from everyformer.attention.pattern import Causal, Full, Local, Local2d, Pattern
from everyformer.attention.projection import Standard
from everyformer.network.depth import Stack
from everyformer.network.embed import Embed, Features, Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.grid import Grid
from everyformer.network.initial import Xavier
from everyformer.network.layer import Layer
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention, CrossAttention
from everyformer.network.output_head import Language, Logistics, OutputHead
from everyformer.network.residual import PostNorm
from everyformer.value import Count, Share, Size

RGB = {"rows": 32, "columns": 32, "channels": 3}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "width": 64, "heads": 4, "layers": 2, "rows": 28, "columns": 28, "channels": 1, "block": 56, "memory": 56,
        "around": (7, 7), "dropout": 0.1,
    },
    "cifar10": RGB | {"width": 512, "heads": 4, "layers": 12, "hidden": 2048, "dropout": 0.3},
    "cifar10-logistics": RGB
    | {"width": 256, "heads": 8, "layers": 14, "hidden": 512, "dropout": 0.2, "output": "logistics"},
    "imagenet32": RGB | {"width": 512, "heads": 8, "layers": 12, "hidden": 2048},
    "celeba": RGB
    | {"width": 512, "heads": 8, "layers": 12, "encoder_layers": 6, "hidden": 2048, "shrink": 4, "local": "2d"},
}  # fmt: skip


def image_transformer(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 12,
    encoder_layers: Size | None = None,
    hidden: Size | None = None,
    rows: Size = 32,
    columns: Size = 32,
    channels: Size = 3,
    levels: Size = 256,
    local: Literal["1d", "2d"] = "1d",
    block: Size = 256,
    memory: Count = 256,
    rectangle: tuple[Size, Size] | None = None,
    around: tuple[Count, Count] = (8, 64),
    output: Literal["categorical", "logistics"] = "categorical",
    components: Size = 10,
    shrink: Size = 1,
    learned: bool = False,
    dropout: Share = 0.1,
) -> Model | EncoderDecoder:
    """`shrink` above 1 gives an encoder and a decoder; `learned` learns the vectors of rows and columns."""
    if rows % shrink or columns % shrink:
        raise ValueError(f"a picture of {columns} x {rows} is not made smaller by {shrink}; give a divisor of both")
    joint = output == "logistics"
    across = columns if joint else columns * channels  # steps in a row
    rectangle = rectangle or (_divisor(rows, 8), _divisor(across, 32))
    flat = local == "1d"
    near: Pattern = Local(block, memory) if flat else Local2d(across, *rectangle, *around)
    grid = Grid(rows, across, learned, None if flat else rectangle)
    embed: Embed = Features(channels) if joint else Tokens(channels * levels + 1, scaled=True)
    head: OutputHead = (
        Logistics(channels, levels, components) if joint else Language(tied=False, bias=True, vocabulary=levels)
    )
    form, net = Standard(heads or max(1, width // 64), merge_bias=False), FeedForward(hidden or 4 * width)
    everywhere = Attention(form, Full())

    def side(position: Grid, layer: Layer, count: int, outputs: tuple[OutputHead, ...]) -> Model:
        body = Stack(count, (layer,), PostNorm(dropout=dropout))
        return Model(
            width=width, embed=embed, position=position, dropout=dropout, body=body, outputs=outputs, initial=Xavier()
        )

    nearby = Attention(form, Causal() & near)
    if shrink == 1:
        return side(grid, Layer((nearby, net)), layers, (head,))
    decoder = side(grid, Layer((nearby, CrossAttention(form), net)), layers, (head,))
    small = Grid(rows // shrink, across // shrink, learned)
    return EncoderDecoder(encoder=side(small, Layer((everywhere, net)), encoder_layers or layers, ()), decoder=decoder)


def _divisor(number: int, most: int) -> int:
    """The largest divisor but the number itself, and at most so large."""
    return max(one for one in range(1, max(2, min(most + 1, number))) if number % one == 0)
