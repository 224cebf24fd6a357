"""Paper: Parmar et al. 2018, Image Transformer.

Equations: post-norm causal layers whose attention is local, 1-D (a block of l_q positions and l_m before it, raster order) or 2-D
(a rectangle, extended by h_m rows above and w_m columns on either side, block-raster order); sinusoids, half of them for the row
and half for the column and channel. By default each channel of a pixel is a step: an embedding of its own for each channel, scaled by
sqrt(D), and a softmax over the levels, shared by all channels. With `logistics` a pixel is a step: a linear map of its channels,
scaled to -1 .. 1, and a mixture of so many logistics. With `downsample` an encoder reads the image reduced by that factor, with full
attention, and the decoder attends to it (super-resolution).
Symbols: `pattern` Local(l_q, l_m), or Local2d(positions in a row, rows and columns of l_q, h_m, w_m). Both count positions: where each
channel is a step, a row has columns * channels positions.
Departures: a start token (logistics: a pixel of zeros) stands before the image, where the paper shifts in zeros. Classes are no
input. A query block holds l_q positions also at the end of the image.
"""

from __future__ import annotations

from msgspec.structs import replace

from everyformer.attention.pattern import Causal, Full, Local, Local2d, Pattern
from everyformer.attention.projection import Standard
from everyformer.family.member import Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Embed, Features, Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.grid import Grid
from everyformer.network.initial import Xavier
from everyformer.network.layer import Layer
from everyformer.network.model import EncoderDecoder, Model
from everyformer.network.multi_head_attention import Attention, CrossAttention
from everyformer.network.output_head import Language, Logistics
from everyformer.network.residual import PostNorm
from everyformer.value import Share, Size


def image_transformer(
    width: Size = 512, heads: Size | None = None, layers: Size = 12, encoder_layers: Size | None = None,
    hidden: Size | None = None, rows: Size = 32, columns: Size = 32, channels: Size = 3, levels: Size = 256,
    pattern: Pattern = Local(256, 256), logistics: Size | None = None, downsample: Size = 1,
    learned_positions: bool = False, dropout: Share = 0.1,
) -> Model | EncoderDecoder:  # fmt: skip
    embed: Embed = Features(channels) if logistics else Tokens(channels * levels + 1, scaled=True)
    head = Logistics(channels, levels, logistics) if logistics else Language(tied=False, bias=True, vocabulary=levels)
    projection, net = Standard(heads or max(1, width // 64), merge_bias=False), FeedForward(hidden or 4 * width)
    row = columns if logistics else columns * channels  # positions in a row
    local = (Attention(projection, Causal() & pattern), *((CrossAttention(projection),) if downsample > 1 else ()), net)
    decoder = Model(
        width=width, embed=embed, position=Grid(rows, row, learned_positions, _block(pattern, row)), dropout=dropout,
        body=Stack(layers, (Layer(local),), PostNorm(dropout=dropout)), outputs=(head,), initial=Xavier(),
    )  # fmt: skip
    if downsample == 1:
        return decoder
    small = Grid(_divide(rows, downsample), _divide(columns, downsample) * (row // columns), learned_positions)
    body = Stack(encoder_layers or layers, (Layer((Attention(projection, Full()), net)),), PostNorm(dropout=dropout))
    return EncoderDecoder(encoder=replace(decoder, position=small, body=body, outputs=()), decoder=decoder)


def _block(pattern: Pattern, row: int) -> tuple[int, int] | None:
    """The rows and columns of the blocks in which an image is read: those of 2-D attention; None: row by row."""
    if not isinstance(pattern, Local2d):
        return None
    if pattern.columns != row:
        raise ValueError(
            f"image-transformer.pattern is {pattern}, but a row of the image has {row} positions; write {row} as its first number"
        )
    return pattern.height, pattern.width


def _divide(length: int, factor: int) -> int:
    if length % factor:
        raise ValueError(f"image-transformer.downsample is {factor}, which does not divide {length} rows or columns")
    return length // factor


RGB = {"rows": 32, "columns": 32, "channels": 3}
UNCHECKED = "layers, heads and dropout are not checked against the paper's text"
MEMBER = Member(
    "image-transformer",
    "Parmar et al. 2018",
    idea=(
        "An image is generated one channel of a pixel at a time, with attention to the positions near it. "
        "Local blocks, in one or two dimensions, keep the cost linear in the size of the image."
    ),
    make=image_transformer,
    sizes={
        "tiny": {
            "width": 64, "heads": 4, "layers": 2, "rows": 28, "columns": 28, "channels": 1, "pattern": "local(56, 56)",
            "dropout": 0.1,
        },
        "cifar10": RGB | {"width": 512, "heads": 4, "layers": 12, "hidden": 2048, "dropout": 0.3},
        "cifar10-logistics": RGB
        | {"width": 256, "heads": 8, "layers": 14, "hidden": 512, "dropout": 0.2, "logistics": 10},
        "imagenet32": RGB | {"width": 512, "heads": 8, "layers": 12, "hidden": 2048},
        "celeba": RGB
        | {
            "width": 512, "heads": 8, "layers": 12, "encoder_layers": 6, "hidden": 2048, "downsample": 4,
            "pattern": "local2d(96, 8, 32, 8, 64)",
        },
    },
    size="cifar10",
    paper_parameters={"cifar10": None, "cifar10-logistics": None, "imagenet32": None, "celeba": None},
    departures={
        "cifar10": UNCHECKED,
        "cifar10-logistics": UNCHECKED,
        "imagenet32": UNCHECKED,
        "celeba": 'tensor2tensor\'s "best config for img2img"; ' + UNCHECKED,
    },
)  # fmt: skip
