"""Paper: Yang et al. 2025, Qwen3 Technical Report.

Equations: those of Llama (family/llama.py) with heads of a width of their own that share keys in groups; the queries and keys of
each head are normed before they are rotated: q <- RMSNorm(q), k <- RMSNorm(k), with one weight for all heads of a layer.
Symbols: `head_width` head_dim, `base` rope theta. Departures: none known; the published code has no dropout, so its default is 0.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal
from everyformer.attention.projection import Standard
from everyformer.attention.rotary import RotaryScaling
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


def qwen3(
    width: Size = 1024, heads: Few | None = None, key_heads: Few | None = None, head_width: Size = 128, layers: Few = 28,
    hidden: Size | None = None, vocabulary: Size = 151936, base: Positive = 1000000.0, scaling: RotaryScaling | None = None,
    tied: bool = True, eps: Positive = 1e-6, dropout: Share = 0.0,
) -> Model:  # fmt: skip
    norm, heads = RMSNorm(eps), heads or max(1, width // head_width)
    projection = Standard(heads, head_width, head_width, merge_bias=False, key_heads=key_heads, qk_norm=norm)
    net = FeedForward(hidden or swiglu_width(width), "silu", gated=True, bias=False)
    layer = Layer((Attention(projection, Causal(), (Rotary(base, "halves", scaling=scaling),), dropout), net))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        body=Stack(layers, (layer,), PreNorm(norm, dropout)),
        outputs=(Language(tied=tied),),
        initial=Normal(0.02),
    )


RELEASED = {
    "0.6b": {"width": 1024, "heads": 16, "key_heads": 8, "layers": 28, "hidden": 3072},
    "1.7b": {"width": 2048, "heads": 16, "key_heads": 8, "layers": 28, "hidden": 6144},
    "4b": {"width": 2560, "heads": 32, "key_heads": 8, "layers": 36, "hidden": 9728},
    "8b": {"width": 4096, "heads": 32, "key_heads": 8, "layers": 36, "hidden": 12288, "tied": False},
    "14b": {"width": 5120, "heads": 40, "key_heads": 8, "layers": 40, "hidden": 17408, "tied": False},
    "32b": {"width": 5120, "heads": 64, "key_heads": 8, "layers": 64, "hidden": 25600, "tied": False},
}
TINY = {"width": 64, "heads": 4, "key_heads": 2, "head_width": 32, "layers": 2, "hidden": 128, "vocabulary": 256}
MEMBER = Member(
    "qwen3",
    "Yang et al. 2025",
    idea=(
        "A Llama whose queries and keys are normed in each head, which keeps the scores of a deep stack in bounds. "
        "Heads are wider than their share of the width."
    ),
    make=qwen3,
    sizes={"tiny": TINY} | RELEASED,
    size="0.6b",
    paper_parameters={name: 1000 * float(name[:-1]) for name in RELEASED},
    departures=dict.fromkeys(RELEASED, ROUNDED),
)
