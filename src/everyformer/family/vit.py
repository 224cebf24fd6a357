"""Paper: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words. Image patches as K describes them.

Equations: a linear map of each patch, a class token, learned positions, pre-norm blocks with GELU, a last norm, and
classes read from the class token. Symbols: width D, patch P, image H = W.
Departures: dropout is 0 unless given, as published for fine-tuning; it is of the embedding and of every branch.
"""

from __future__ import annotations

from everyformer.attention.pattern import Full
from everyformer.attention.projection import Standard
from everyformer.network.depth import Stack
from everyformer.network.embed import Patches
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.norm import LayerNorm
from everyformer.network.output_head import Classify
from everyformer.network.position import Learned
from everyformer.network.residual import PreNorm
from everyformer.value import Share, Size

SIZES = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "image": 28, "patch": 7, "channels": 1, "classes": 10},
    "small": {"width": 192, "heads": 3, "layers": 6, "image": 32, "patch": 4, "classes": 10},
    "b16": {"width": 768, "heads": 12, "layers": 12},
    "l16": {"width": 1024, "heads": 16, "layers": 24},
}


def vit(
    width: Size = 768,
    heads: Size | None = None,
    layers: Size = 12,
    image: Size = 224,
    patch: Size = 16,
    channels: Size = 3,
    classes: Size = 1000,
    dropout: Share = 0.0,
) -> Model:
    if image % patch:
        raise ValueError(
            f"an image of {image} does not divide into patches of {patch}; set model.patch to what divides {image}, or give "
            f"images of a multiple of {patch} points"
        )
    attention = Attention(Standard(heads or max(1, width // 64), bias=True), Full())
    return Model(
        width=width,
        embed=Patches(patch, channels),
        position=Learned((image // patch) ** 2 + 1),
        class_token=True,
        dropout=dropout,
        body=Stack(layers, (Layer((attention, FeedForward(4 * width, "gelu"))),), PreNorm(LayerNorm(1e-12), dropout)),
        outputs=(Classify(classes, "first"),),
        initial=Normal(0.02),
    )
