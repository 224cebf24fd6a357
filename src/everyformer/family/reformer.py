"""Paper: Kitaev et al. 2020, Reformer: The Efficient Transformer.

Equations: reversible layers y1 = x1 + attention(LN x2), y2 = x2 + net(LN y1); attention among keys in the same hash bucket
(attention/hashing.py), with one projection for queries and keys, keys of length 1; positions by the row and column of an array.
Symbols: `pattern` Hashed(rounds n_rounds (n_hashes), buckets n_buckets, window m (chunk_len)); `chunk` the positions of the feed-forward
net computed at a time; `axial_columns` the width of the array of positions. The layers are in turn those of `order`, by default local,
local, hashed, local as in the published configurations; `local_pattern` is that of the layers without hashing; None: all layers hash.
Departures: `Hashed` for the published `Chunked`, whose outputs depend on future tokens (`pattern=PUBLISHED_PATTERN`, and the metrics of
a run say so; see docs/design.md). The two streams are averaged, not concatenated, before the output, which therefore has half the
weights (`merge="concatenate"`); position vectors are added, not concatenated (`axial_widths`).
"""

from __future__ import annotations

from typing import Literal

from everyformer.attention.pattern import Causal, Chunked, Hashed, Local, Pattern, Prefix, Window
from everyformer.attention.projection import Shared, Standard
from everyformer.attention.round_counts import RoundCounts
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
from everyformer.network.residual import Reversible
from everyformer.value import Share, Size

PUBLISHED_PATTERN = Chunked(4, 512, 256, leaks=True)
FULL_PATTERN = Causal() & (~Window(1) | Prefix(1))  # all earlier keys, for comparison: what many rounds would find


def reformer(
    width: Size = 1024, heads: Size | None = None, head_width: Size | None = None, layers: Size = 12,
    context: Size = 65536, axial_columns: Size = 512, pattern: Pattern = Hashed(4, 512, 256),
    local_pattern: Pattern | None = Causal() & Local(128, 128), hidden: Size | None = None,
    activation: Literal["relu", "gelu"] = "relu", chunk: Size | None = None, vocabulary: Size = 256, dropout: Share = 0.1,
    order: tuple[Literal["local", "hashed"], ...] = ("local", "local", "hashed", "local"), round_counts: bool = False,
    axial_widths: tuple[Size, ...] | None = None, merge: Literal["mean", "concatenate"] = "mean",
) -> Model:  # fmt: skip
    sizes = (heads or max(1, width // 64), head_width, head_width)
    hashed = Attention(Shared(*sizes), pattern, (RoundCounts(),) if round_counts else (), dropout=dropout)
    local = local_pattern and Attention(Standard(*sizes, merge_bias=False), local_pattern, dropout=dropout)
    kinds = {"local": local or hashed, "hashed": hashed}
    net = FeedForward(hidden or 4 * width, activation, chunk=chunk, dropout=dropout)
    in_turn = tuple(Layer((kinds[kind], net)) for kind in (order if local else ("hashed",)))
    return Model(
        width=width, embed=Tokens(vocabulary), dropout=dropout, initial=Normal(0.02),
        position=Axial((-(-context // axial_columns), axial_columns), axial_widths),
        body=Stack(layers, in_turn, Reversible(dropout=dropout, merge=merge)), outputs=(Language(tied=False, bias=True),),
    )  # fmt: skip


CONFIGURATION = (
    "head width and order of layers are those of the authors' trax configurations, not checked against the paper"
)
MEMBER = Member(
    "reformer",
    "Kitaev et al. 2020",
    idea=(
        "Queries attend to the keys in their hash bucket, where the large scores are. "
        "Reversible layers recompute their inputs in the backward pass, so that memory does not grow with the depth."
    ),
    make=reformer,
    sizes={
        "tiny": {
            "width": 64, "heads": 4, "layers": 2, "context": 64, "axial_columns": 8, "chunk": 32,
            "pattern": "hashed(2, 8, 16)", "local_pattern": None,
        },
        "enwik8": {"width": 1024, "heads": 8, "layers": 12, "dropout": 0.2},
        "imagenet64": {
            "width": 1024, "heads": 8, "head_width": 64, "layers": 6, "context": 12288, "axial_columns": 192,
            "pattern": "hashed(2, 192, 128)", "local_pattern": None, "activation": "gelu", "dropout": 0.0,
        },
    },
    size="enwik8",
    recipes={"tiny": NO_DROPOUT},
    paper_parameters={"enwik8": None, "imagenet64": None},
    departures={"enwik8": CONFIGURATION, "imagenet64": CONFIGURATION},
)  # fmt: skip
