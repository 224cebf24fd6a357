"""Paper: Jiang et al. 2023, Mistral 7B.

Equations: those of Llama (family/llama.py) with heads that share keys in groups; each query attends to the last `window` positions,
so that with N layers a token depends on the N (window - 1) tokens before it. `window=None` attends to all, as later releases do.
Symbols: `window` W. Departures: none known; the published code has no dropout, so its default is 0.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal, Window
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import Rotary
from everyformer.family.llama import ROUNDED, swiglu_width
from everyformer.family.member import Member
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.initial import Normal
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.norm import RMSNorm
from everyformer.network.output_head import Language
from everyformer.network.residual import PreNorm
from everyformer.value import Few, Positive, Share, Size


def mistral(
    width: Size = 4096, heads: Few | None = None, key_heads: Few | None = None, head_width: Size | None = None,
    layers: Few = 32, hidden: Size | None = None, vocabulary: Size = 32000, window: Size | None = 4096,
    base: Positive = 10000.0, tied: bool = False, eps: Positive = 1e-5, dropout: Share = 0.0,
) -> Model:  # fmt: skip
    heads = heads or max(1, width // 128)
    projection = Standard(heads, head_width, head_width, merge_bias=False, key_heads=key_heads)
    pattern = Causal() & Window(window) if window else Causal()
    net = FeedForward(hidden or swiglu_width(width), "silu", gated=True, bias=False)
    layer = Layer((Attention(projection, pattern, (Rotary(base, "halves"),), dropout), net))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        body=Stack(layers, (layer,), PreNorm(RMSNorm(eps), dropout)),
        outputs=(Language(tied=tied),),
        initial=Normal(0.02),
    )


MEMBER = Member(
    "mistral",
    "Jiang et al. 2023",
    idea=(
        "A Llama whose layers attend to a sliding window, so that a long text costs no more per token than a short one. "
        "Through the layers a token still depends on text far before its window."
    ),
    make=mistral,
    sizes={
        "tiny": {
            "width": 64, "heads": 4, "key_heads": 2, "layers": 2, "hidden": 128, "vocabulary": 256, "window": 16,
        },
        "7b": {"key_heads": 8, "hidden": 14336},
        "7b-v0.3": {"key_heads": 8, "hidden": 14336, "vocabulary": 32768, "window": None, "base": 1000000.0},
    },
    size="7b",
    paper_parameters={"7b": 7000, "7b-v0.3": None},
    departures={"7b": ROUNDED},
)  # fmt: skip
