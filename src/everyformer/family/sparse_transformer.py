"""Paper: Child et al. 2019, Generating Long Sequences with Sparse Transformers.

Equations: Attend(X, S), where each query i attends to its set S_i of keys. The sets A1 and A2 (`strided_sets`, `fixed_sets`) reach
every earlier position in two steps. Layers take them in turn (`interleaved`), heads take their union (`merged`), or heads take them
in turn (`split_by_head`). In A2 of `fixed_sets` groups of heads have columns of their own: the last c of a block, the c before, and
so on. Pre-norm layers with dropout at the end of each branch and nowhere else; positions by the row and column of an array as wide
as the stride; GELU as x sigmoid(1.702 x); weights are initialized with 0.125 / sqrt(inputs), at the end of a branch smaller by
sqrt(2 layers).
Symbols: `stride` l, `columns` c, `width` d, `layers` N. `half_width` halves the feed-forward net, the queries and the keys.
Departures: j <= i wherever the paper omits it, and A1 of `strided` has l keys, as in its kernel, not l + 1. The logits are not
initialized to 0, position tables are initialized like that of the tokens, an image's positions are the row of `stride` bytes and the
column in it (not row, column, channel).
"""

from __future__ import annotations

from collections.abc import Sequence

from everyformer.attention.pattern import ByHead, Pattern, fixed, strided
from everyformer.attention.projection import Standard, head_width
from everyformer.family.member import NO_DROPOUT, Member
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

Sets = tuple[Pattern, tuple[Pattern, ...]]  # A1, and A2 of each group of heads
Patterns = tuple[Pattern, ...]  # of the layers in turn


def strided_sets(stride: int) -> Sets:
    near, far = strided(stride)
    return near, (far,)


def fixed_sets(stride: int, columns: int, groups: int = 1) -> Sets:
    near, _ = fixed(stride, columns)
    return near, tuple(fixed(stride, columns, group * columns)[1] for group in range(groups))


def column_groups(stride: int, columns: int, heads: int) -> int:
    """The largest number of groups of heads for which a block has columns: a divisor of the number of heads."""
    if columns > stride:
        raise ValueError(
            f"columns is {columns}, but a block has {stride} positions (the stride); give at most {stride}"
        )
    return max(groups for groups in range(1, stride // columns + 1) if heads % groups == 0)


def interleaved(near: Pattern, far: Sequence[Pattern]) -> Patterns:
    return near, _by_head(far)  # eq. W23


def merged(near: Pattern, far: Sequence[Pattern]) -> Patterns:
    return (_by_head([near | pattern for pattern in far]),)  # eq. W24


def split_by_head(near: Pattern, far: Sequence[Pattern]) -> Patterns:
    return (_by_head([one for pattern in far for one in (near, pattern)]),)


def _by_head(patterns: Sequence[Pattern]) -> Pattern:
    return patterns[0] if len(patterns) == 1 else ByHead(tuple(patterns))


def sparse_transformer(
    width: Size = 512, heads: Size | None = None, layers: Size = 30, context: Size = 12288,
    stride: Size = 128, columns: Size = 32, patterns: tuple[Pattern, ...] | None = None,
    half_width: bool = False, vocabulary: Size = 256, dropout: Share = 0.4,
) -> Model:  # fmt: skip
    """`patterns` are those of the layers in turn. Default: merged fixed sets of `stride` and `columns`."""
    heads, divisor = heads or max(1, width // 64), 2 if half_width else 1
    patterns = patterns or merged(*fixed_sets(stride, columns, column_groups(stride, columns, heads)))
    size = head_width(width, heads)
    projection = Standard(heads, key_width=size // divisor, value_width=size, bias=True)
    net = FeedForward(4 * width // divisor, "gelu_sigmoid")
    layer_values = tuple(Layer((Attention(projection, one), net)) for one in patterns)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Axial((-(-context // stride), stride)),
        body=Stack(layers, layer_values, PreNorm(dropout=dropout)),
        outputs=(Language(tied=False),),
        initial=Normal(0.125, by_depth=True, by_width=True),
    )


MEMBER = Member(
    "sparse-transformer",
    "Child et al. 2019",
    idea=(
        "Each head attends to about sqrt(n) of n positions: near ones, and either "
        "every l-th one (l is the stride) or a few summary columns of every block. "
        "Two layers together still connect every position with every earlier one."
    ),
    make=sparse_transformer,
    sizes={
        "tiny": {"width": 64, "heads": 4, "layers": 2, "context": 64, "stride": 8, "columns": 2, "dropout": 0.1},
        "tiny-strided": {
            "width": 64, "heads": 4, "layers": 2, "context": 64, "stride": 8, "dropout": 0.1,
            "patterns": ("causal & window(8)", "causal & stride(8)"),
        },
        "enwik8": {"width": 512, "heads": 8, "layers": 30},
        "cifar10": {
            "width": 256, "heads": 2, "layers": 128, "context": 3072, "stride": 96, "dropout": 0.25, "half_width": True,
            "patterns": ("by_head(causal & window(96), causal & stride(96))",),
        },
        "imagenet64": {
            "width": 512, "heads": 16, "layers": 48, "dropout": 0.01,
            "patterns": ("by_head(causal & window(128), causal & stride(128))",),
        },
    },
    size="enwik8",
    recipes={"tiny": NO_DROPOUT, "tiny-strided": NO_DROPOUT},
    paper_parameters={"enwik8": 95, "cifar10": 59, "imagenet64": 152},
    departures={
        "cifar10": "dropout, the use of the sets and the stride (a row of pixels) are not checked against the paper's text",
        "imagenet64": "dropout and the use of the sets are not checked against the paper's text",
    },
)  # fmt: skip
