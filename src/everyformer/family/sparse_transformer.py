"""Paper: Child et al. 2019, Generating Long Sequences with Sparse Transformers.

Equations: Attend(X, S), each query i over its own set S_i of keys; the sets A1, A2 of `strided` or `fixed`, which reach
every earlier position in two steps, are given to the layers in turn (`interleaved`), to every head together (`merged`) or
to the heads in turn (`by_head`). With `fixed`, heads have columns of their own in A2, the last c of a block, the c before and so on, in as
many groups as divide them and the block has (`own=False`: all the last); together they reach every position. Pre-norm blocks with
dropout where a branch joins the stream and nowhere else; positions by the row and column of an array as wide as the stride; GELU as
x sigmoid(1.702 x); weights begin at 0.125 / sqrt(inputs), those that end a branch smaller by sqrt(2 layers).
Symbols: stride l, columns c, width d, layers N.
Departures: j <= i wherever the paper leaves it out, and A1 of `strided` has l keys as its kernel has, not l + 1. The logits
do not begin at 0, position tables begin as the tokens' does, an image's positions are its row of `stride` bytes and the place
in it (not row, column, channel).
Not checked against the paper's text: the dropout of the image models, how they use the sets, and CIFAR-10's stride (here a row
of pixels). The parameters it states come out: 95M, 59M, 152M.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from everyformer.attention.pattern import ByHead, Causal, Pattern, fixed, strided
from everyformer.attention.projection import Standard, head_width
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.grid import Axial
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.residual import PreNorm
from everyformer.value import Share, Size

IMAGE = {"kind": "strided", "uses": "by_head"}
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "stride": 8, "columns": 2, "dropout": 0.1},
    "enwik8": {"width": 512, "heads": 8, "layers": 30},
    "cifar10": IMAGE
    | {"width": 256, "heads": 2, "layers": 128, "context": 3072, "stride": 96, "dropout": 0.25, "half": True},
    "imagenet64": IMAGE | {"width": 512, "heads": 16, "layers": 48, "dropout": 0.01},
}


def sparse_transformer(
    width: Size = 512,
    heads: Size | None = None,
    layers: Size = 30,
    context: Size = 12288,
    vocabulary: Size = 256,
    dropout: Share = 0.4,
    kind: Literal["strided", "fixed", "dense"] = "fixed",
    uses: Literal["interleaved", "merged", "by_head"] = "merged",
    stride: Size = 128,
    columns: Size = 32,
    half: bool = False,
    own: bool = True,
) -> Model:
    """`half` halves the feed-forward net, queries and keys; `dense` sees all earlier positions, to compare with."""
    heads, share = heads or max(1, width // 64), 2 if half else 1
    near, *far = strided(stride) if kind == "strided" else fixed(stride, columns)
    if kind == "fixed" and own:
        served = heads // 2 or 1 if uses == "by_head" else heads
        many = max(n for n in range(1, stride // columns + 1) if served % n == 0)
        far = [fixed(stride, columns, n * columns)[1] for n in range(many)]
    patterns = {
        "interleaved": (near, _by_head(far)),
        "merged": (_by_head([near | one for one in far]),),
        "by_head": (_by_head([one for pair in far for one in (near, pair)]),),
    }[uses]
    patterns = (Causal(),) if kind == "dense" else patterns
    size = head_width(width, heads)
    form = Standard(heads, key_width=size // share, value_width=size, bias=True)
    net = FeedForward(4 * width // share, "gelu_sigmoid")
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Axial((-(-context // stride), stride)),
        body=Stack(layers, tuple(Layer((Attention(form, one), net)) for one in patterns), PreNorm(dropout=dropout)),
        outputs=(Language(tied=False),),
        initial=Normal(0.125, by_depth=True, by_width=True),
    )


def _by_head(patterns: Sequence[Pattern]) -> Pattern:
    return patterns[0] if len(patterns) == 1 else ByHead(tuple(patterns))
