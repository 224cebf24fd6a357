"""Paper: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words. Image patches as K describes them.

Equations: a linear map of each patch, a class token, learned positions, pre-norm blocks with GELU, a last norm, and
classes read from the class token. Symbols: width D, patch P, image H = W.
Departures: dropout after the embedding only, as published for fine-tuning it is 0.
"""

from __future__ import annotations

from everyformer.attention.heads import Standard
from everyformer.attention.pattern import Full
from everyformer.network.depth import Attention, Layer, Stack
from everyformer.network.embed import Patches
from everyformer.network.feedforward import FeedForward
from everyformer.network.head import Classify
from everyformer.network.initial import Normal
from everyformer.network.model import Model
from everyformer.network.norm import LayerNorm
from everyformer.network.position import Learned
from everyformer.network.wiring import PreNorm

SIZES = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "image": 28, "patch": 7, "channels": 1, "classes": 10},
    "small": {"width": 192, "heads": 3, "layers": 6, "image": 32, "patch": 4, "classes": 10},
    "b16": {"width": 768, "heads": 12, "layers": 12},
    "l16": {"width": 1024, "heads": 16, "layers": 24},
}


def vit(
    width: int = 768,
    heads: int | None = None,
    layers: int = 12,
    image: int = 224,
    patch: int = 16,
    channels: int = 3,
    classes: int = 1000,
    dropout: float = 0.0,
) -> Model:
    attention = Attention(Standard(heads or width // 64, bias=True), Full())
    return Model(
        width=width,
        embed=Patches(patch, channels),
        position=Learned((image // patch) ** 2 + 1),
        class_token=True,
        dropout=dropout,
        body=Stack(layers, (Layer(attention, FeedForward(4 * width, "gelu")),), PreNorm(LayerNorm(1e-12), dropout)),
        heads=(Classify(classes, "first"),),
        initial=Normal(0.02),
    )
