"""Paper: Kitaev et al. 2020, Reformer: The Efficient Transformer.

Equations: reversible layers y1 = x1 + attention(LN x2), y2 = x2 + net(LN y1); attention among keys that hash alike
(attention/hashing.py), with one map for queries and keys, keys of length 1; positions by the row and column of an array.
Symbols: `rounds` n_rounds (n_hashes), `buckets` n_buckets, `window` m (chunk_len), `chunk` positions of the feed-forward net at a
time; `local` puts three layers around each hashed one (local, local, hashed, local) that see their own chunk of `local` positions
and the one before, as the published configurations do; 0: all layers hash.
Departures: `hashed` for the published `chunked`, which leaks (form="chunked" gives it, and its bits are told with the
leak; see docs/design.md). The streams are averaged, not put side by side, for the output, so that it has half the weights;
position vectors are added, not put side by side.
Not checked against the paper's text: head widths and the mixture of layers. They are those of the authors' configurations
(trax) and of their released enwik8 weights; the paper states 12 layers, width 1024, net 4096 and 8 heads.
"""

from __future__ import annotations

from typing import Any, Literal

from everyformer.attention.pattern import Causal, Chunked, Hashed, Local, Pattern, Prefix, Window
from everyformer.attention.projection import Shared, Standard
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
from everyformer.value import Count, Share, Size

SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "width": 64, "heads": 4, "layers": 2, "context": 64, "row": 8,
        "rounds": 2, "buckets": 8, "window": 16, "local": 0, "chunk": 32,
    },
    "enwik8": {"width": 1024, "heads": 8, "layers": 12, "dropout": 0.2},
    "imagenet64": {
        "width": 1024, "heads": 8, "layers": 6, "context": 12288, "row": 192, "activation": "gelu",
        "rounds": 2, "buckets": 192, "window": 128, "local": 0, "head": 64, "dropout": 0.0,
    },
}  # fmt: skip


def reformer(
    width: Size = 1024,
    heads: Size | None = None,
    layers: Size = 12,
    context: Size = 65536,
    hidden: Size | None = None,
    vocabulary: Size = 256,
    rounds: Size = 4,
    buckets: Size = 512,
    window: Size = 256,
    local: Count = 128,
    form: Literal["hashed", "chunked", "full"] = "hashed",
    head: Size | None = None,
    row: Size = 512,
    chunk: Size | None = None,
    activation: Literal["relu", "gelu"] = "relu",
    dropout: Share = 0.1,
) -> Model:
    """`full` sees all earlier keys, to compare with; `head` is the width of a head, `row` of the array of positions."""
    heads = heads or max(1, width // 64)
    kinds: dict[str, Pattern] = {
        "hashed": Hashed(rounds, buckets, window),
        "chunked": Chunked(rounds, buckets, window, leaks=True),
        "full": Causal() & (~Window(1) | Prefix(1)),
    }
    hashed = Attention(Shared(heads, head, head), kinds[form], dropout=dropout)
    near = Attention(
        Standard(heads, head, head, merge_bias=False), Causal() & Local(local or 1, local), dropout=dropout
    )
    net = FeedForward(hidden or 4 * width, activation, chunk=chunk, dropout=dropout)
    attentions = (near, near, hashed, near) if local else (hashed,)
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        position=Axial((-(-context // row), row)),
        dropout=dropout,
        body=Stack(layers, tuple(Layer((one, net)) for one in attentions), Reversible(dropout=dropout)),
        outputs=(Language(tied=False, bias=True),),
        initial=Normal(0.02),
    )
