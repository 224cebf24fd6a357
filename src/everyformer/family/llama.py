"""Paper: Touvron et al. 2023, Llama 2; Llama Team 2024, The Llama 3 Herd of Models.

Equations: pre-norm causal layers with RMSNorm and a final norm; rotary positions in the layout of halves; heads that share keys in
groups (the larger models of Llama 2, all of Llama 3); SwiGLU, W_2 (silu(W_1 x) * W_3 x); no biases, and an output of its own.
Symbols: `width` dim, `heads` n_heads, `key_heads` n_kv_heads, `base` rope theta. `bias` puts biases on queries, keys and values, which
makes it Qwen 2.
Departures: none known; the published code has no dropout, so its default is 0.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal
from everyformer.attention.projection import Standard
from everyformer.attention.rotary import RotaryScaling
from everyformer.attention.score_mod import Rotary
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


def llama(
    width: Size = 4096, heads: Few | None = None, key_heads: Few | None = None, head_width: Size | None = None,
    layers: Few = 32, hidden: Size | None = None, vocabulary: Size = 32000, base: Positive = 10000.0,
    scaling: RotaryScaling | None = None, tied: bool = False, bias: bool = False, eps: Positive = 1e-5, dropout: Share = 0.0,
) -> Model:  # fmt: skip
    heads = heads or max(1, width // 128)
    projection = Standard(heads, head_width, head_width, bias, merge_bias=False, key_heads=key_heads)
    rotary = Rotary(base, "halves", scaling=scaling)
    net = FeedForward(hidden or swiglu_width(width), "silu", gated=True, bias=False)
    layer = Layer((Attention(projection, Causal(), (rotary,), dropout), net))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        body=Stack(layers, (layer,), PreNorm(RMSNorm(eps), dropout)),
        outputs=(Language(tied=tied),),
        initial=Normal(0.02),
    )


def swiglu_width(width: int) -> int:
    """Returns 8/3 of the width, rounded up to a multiple of 256, as the published code does: as many weights as a net of 4 times."""
    return -(-8 * width // (3 * 256)) * 256


ROUNDED = "its name rounds; the released model has the same count as here"
THREE = {"vocabulary": 128256, "base": 500000.0, "key_heads": 8}
LONGER = {"type": "llama3_scaling", "factor": 32.0}
MEMBER = Member(
    "llama",
    "Touvron et al. 2023, Llama Team 2024",
    idea=(
        "A causal Transformer with few parts: RMSNorm before each sublayer, rotary positions, SwiGLU, no biases. "
        "Heads share keys in groups, so that the cache of a long text is small."
    ),
    make=llama,
    sizes={
        "tiny": {"width": 64, "heads": 4, "key_heads": 2, "layers": 2, "hidden": 128, "vocabulary": 256},
        "small": {"width": 768, "heads": 12, "key_heads": 4, "layers": 12},
        "2-7b": {"width": 4096, "layers": 32},
        "2-13b": {"width": 5120, "layers": 40},
        "2-70b": {"width": 8192, "key_heads": 8, "layers": 80, "hidden": 28672},
        "3-8b": {"width": 4096, "layers": 32, "hidden": 14336} | THREE,
        "3-70b": {"width": 8192, "layers": 80, "hidden": 28672} | THREE,
        "3.2-1b": {"width": 2048, "heads": 32, "layers": 16, "hidden": 8192, "tied": True, "scaling": LONGER} | THREE,
        "3.2-3b": {"width": 3072, "layers": 28, "hidden": 8192, "tied": True, "scaling": LONGER} | THREE,
    },
    size="small",
    paper_parameters={
        "small": None, "2-7b": 7000, "2-13b": 13000, "2-70b": 70000, "3-8b": 8000, "3-70b": 70000, "3.2-1b": 1000, "3.2-3b": 3000,
    },
    departures=dict.fromkeys(("2-7b", "2-13b", "2-70b", "3-8b", "3-70b", "3.2-1b", "3.2-3b"), ROUNDED),
)  # fmt: skip
