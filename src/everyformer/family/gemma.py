"""Paper: Gemma Team 2024, Gemma 2; Gemma Team 2025, Gemma 3.

Equations: layers with a norm before and after each sublayer, RMSNorm with the factor 1 + weight; embeddings times sqrt(D), tied to
the output; GeGLU, W_2 (gelu(W_1 x) * W_3 x); heads that share keys in groups; layers with a sliding window and layers that attend to
all positions, in turn.
    gemma2    one sliding layer to one full one; scores and logits are bounded, c tanh(s / c)
    gemma     Gemma 3, the part for text: five sliding layers to one full one, whose rotary base is larger; the queries and keys of
              each head are normed
Symbols: `scale` of the scores is query_pre_attn_scalar^-0.5. Departures: none known; the published code has no dropout, so its default
is 0.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal, Window
from everyformer.attention.projection import Standard
from everyformer.attention.rotary import RotaryScaling
from everyformer.attention.score_mod import Rotary
from everyformer.attention.softmax import SoftCap
from everyformer.family.llama import ROUNDED
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
from everyformer.network.sandwich_norm import SandwichNorm
from everyformer.value import Few, Positive, Share, Size


def gemma(
    width: Size = 1152, heads: Few = 4, key_heads: Few = 1, head_width: Size = 256, layers: Few = 26, hidden: Size = 6912,
    vocabulary: Size = 262144, window: Size = 512, sliding: Few = 5, base: Positive = 1000000.0, near_base: Positive = 10000.0,
    scaling: RotaryScaling | None = None, scale: Positive | None = None, eps: Positive = 1e-6, dropout: Share = 0.0,
) -> Model:  # fmt: skip
    norm, net = RMSNorm(eps, unit_offset=True), FeedForward(hidden, "gelu_tanh", gated=True, bias=False)
    projection = Standard(heads, head_width, head_width, False, False, key_heads, norm, scale)
    near = Attention(projection, Causal() & Window(window), (Rotary(near_base, "halves"),), dropout)
    far = Attention(projection, Causal(), (Rotary(base, "halves", scaling=scaling),), dropout)
    in_turn = (Layer((near, net)),) * sliding + (Layer((far, net)),)
    return Model(
        width=width,
        embed=Tokens(vocabulary, scaled=True),
        body=Stack(layers, in_turn, SandwichNorm(norm, dropout)),
        outputs=(Language(),),
        initial=Normal(0.02),
    )


def gemma2(
    width: Size = 2304, heads: Few = 8, key_heads: Few = 4, head_width: Size = 256, layers: Few = 26, hidden: Size = 9216,
    vocabulary: Size = 256000, window: Size = 4096, base: Positive = 10000.0, soft_cap: Positive | None = 50.0,
    final_soft_cap: Positive | None = 30.0, scale: Positive | None = None, eps: Positive = 1e-6, dropout: Share = 0.0,
) -> Model:  # fmt: skip
    norm, net = RMSNorm(eps, unit_offset=True), FeedForward(hidden, "gelu_tanh", gated=True, bias=False)
    projection = Standard(heads, head_width, head_width, False, False, key_heads, None, scale)
    score_mods = (Rotary(base, "halves"), SoftCap(soft_cap)) if soft_cap else (Rotary(base, "halves"),)
    patterns = (Causal() & Window(window), Causal())
    return Model(
        width=width,
        embed=Tokens(vocabulary, scaled=True),
        body=Stack(
            layers,
            tuple(Layer((Attention(projection, one, score_mods, dropout), net)) for one in patterns),
            SandwichNorm(norm, dropout),
        ),
        outputs=(Language(soft_cap=final_soft_cap),),
        initial=Normal(0.02),
    )


TINY = {
    "width": 64, "heads": 4, "key_heads": 2, "head_width": 32, "layers": 2, "hidden": 128, "vocabulary": 256, "window": 16,
}  # fmt: skip
LONGER = {"vocabulary": 262208, "window": 1024, "scaling": {"type": "linear_scaling", "factor": 8.0}}
TEXT = "the paper counts the image encoder too, or rounds; the released model has the same text part as here"
MEMBER = Member(
    "gemma",
    "Gemma Team 2025",
    idea=(
        "Most layers attend to a short window, and every sixth to the whole text with a larger rotary base, so that a cache for long "
        "texts is small. A norm stands before and after each sublayer."
    ),
    make=gemma,
    sizes={
        "tiny": TINY | {"sliding": 1},
        "270m": {"width": 640, "layers": 18, "hidden": 2048},
        "1b": {"width": 1152, "layers": 26, "hidden": 6912},
        "4b": {"width": 2560, "heads": 8, "key_heads": 4, "layers": 34, "hidden": 10240} | LONGER,
        "12b": {"width": 3840, "heads": 16, "key_heads": 8, "layers": 48, "hidden": 15360} | LONGER,
        "27b": {
            "width": 5376, "heads": 32, "key_heads": 16, "head_width": 128, "layers": 62, "hidden": 21504, "scale": 168**-0.5,
        } | LONGER,
    },
    size="1b",
    paper_parameters={"270m": None, "1b": 1000, "4b": 4000, "12b": 12000, "27b": 27000},
    departures=dict.fromkeys(("4b", "12b", "27b"), TEXT),
)  # fmt: skip
GEMMA2 = Member(
    "gemma2",
    "Gemma Team 2024",
    idea=(
        "Layers with a sliding window and layers that attend to the whole text take turns, with a norm before and after each sublayer. "
        "Scores and logits are bounded by a tanh, which keeps training stable."
    ),
    make=gemma2,
    sizes={
        "tiny": TINY,
        "2b": {"width": 2304},
        "9b": {"width": 3584, "heads": 16, "key_heads": 8, "layers": 42, "hidden": 14336},
        "27b": {
            "width": 4608, "heads": 32, "key_heads": 16, "head_width": 128, "layers": 46, "hidden": 36864, "scale": 144**-0.5,
        },
    },
    size="2b",
    paper_parameters={"2b": 2000, "9b": 9000, "27b": 27000},
    departures=dict.fromkeys(("2b", "9b", "27b"), ROUNDED),
)  # fmt: skip
