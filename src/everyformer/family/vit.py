"""Paper: Dosovitskiy et al. 2020, An Image is Worth 16x16 Words. Image patches as in source K.

Equations: a linear map of each patch, a class token, learned positions, pre-norm layers with GELU, a final norm, and a
classification of the class token. Symbols: `width` D, `patch` P, `image` H = W.
`distilled` is DeiT (Touvron et al. 2021), with a second token that learns from a teacher.
Departures: dropout is 0 by default, as published for fine-tuning; it applies to the embedding and to every branch.
"""

from __future__ import annotations

from everyformer.attention.pattern import Full
from everyformer.attention.projection import Standard
from everyformer.family.member import Member
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


def vit(
    width: Size = 768, heads: Size | None = None, layers: Size = 12,
    image: Size = 224, patch: Size = 16, channels: Size = 3, classes: Size = 1000, distilled: bool = False,
    dropout: Share = 0.0,
) -> Model:  # fmt: skip
    attention = Attention(Standard(heads or max(1, width // 64), bias=True), Full())
    return Model(
        width=width,
        embed=Patches(patch, channels),
        position=Learned(_patches(image, patch) + 1 + distilled),
        class_token=2 if distilled else True,
        dropout=dropout,
        body=Stack(layers, (Layer((attention, FeedForward(4 * width, "gelu"))),), PreNorm(LayerNorm(1e-12), dropout)),
        outputs=(Classify(classes, "first"),),
        initial=Normal(0.02),
    )


def _patches(image: int, patch: int) -> int:
    """The number of patches in an image of this height and width."""
    if image % patch:
        raise ValueError(
            f"an image of {image} does not divide into patches of {patch}; set model.patch to a divisor of {image}, or "
            f"task.size to a multiple of {patch}, to which images are then resized"
        )
    return (image // patch) ** 2


MEMBER = Member(
    "vit",
    "Dosovitskiy et al. 2020",
    idea=(
        "An image is a sequence of patches, and a plain Transformer encoder classifies it. "
        "The class is read from a class token; there are no convolutions."
    ),
    make=vit,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "image": 28, "patch": 7, "channels": 1, "classes": 10},
        "small": {"width": 192, "heads": 3, "layers": 6, "image": 32, "patch": 4, "classes": 10},
        "b16": {"width": 768, "heads": 12, "layers": 12},
        "l16": {"width": 1024, "heads": 16, "layers": 24},
    },
    size="b16",
    paper_parameters={"small": None, "b16": 86, "l16": 307},
    departures={
        "small": "for 32 x 32 images; not in the paper",
        "b16": "the paper rounds; the released model with 1,000 classes has 86.6M, as here",
        "l16": "the released model with 1,000 classes has 304M, as here",
    },
)
