"""Paper: Sukhbaatar et al. 2019, Adaptive Attention Span in Transformers.

Equations: post-norm causal layers, s_ij = q_i . (k_j + p_{i-j}) / sqrt(E) with p learned and shared by all heads and layers, masked
softly by the span of the head (`dynamic`: of the head and the token), over the S keys before the token; segments with a memory
of S positions; loss + lambda / M sum z.
Symbols: `span` S, `ramp` R, `cost` lambda; `initial_span` the fraction of S with which spans start, 0 by default and 0.1 for dynamic
ones. In the paper a token does not attend to itself; `pattern=causal` lets it. The paper's segments have 512 tokens: task.context=512.
Departures: p is initialized smaller than in the published code and has a row for the distance 0. Empty memory has no share in
the attention weights; in the published code it has.
"""

from __future__ import annotations

from everyformer.attention.pattern import Causal, Pattern, Window
from everyformer.attention.projection import Standard
from everyformer.attention.score_mod import ScoreMod, Shaw
from everyformer.attention.span import DynamicSpan, Span
from everyformer.family.member import NO_DROPOUT, Member
from everyformer.network.cache import SegmentMemory
from everyformer.network.depth import Stack
from everyformer.network.embed import Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.layer import Layer
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.output_head import Language
from everyformer.network.residual import PostNorm
from everyformer.value import NotNegative, Part, Share, Size


def adaptive_span(
    width: Size = 512, heads: Size | None = None, layers: Size = 12,
    span: Size = 8192, ramp: Size = 32, cost: NotNegative = 5e-7, initial_span: Part | None = None,
    dynamic: bool = False,
    pattern: Pattern = Causal() & ~Window(1), hidden: Size | None = None, vocabulary: Size = 256,
    dropout: Share = 0.3,
) -> Model:  # fmt: skip
    soft_mask: ScoreMod = Span(span, ramp, cost, initial_span or 0.0)
    if dynamic:
        soft_mask = DynamicSpan(width, span, ramp, cost, 0.1 if initial_span is None else initial_span)
    projection = Standard(heads or max(1, width // 64), merge_bias=False)
    attention = Attention(projection, pattern, (Shaw(span, future=False, shared=True), soft_mask), dropout)
    layer = Layer((attention, FeedForward(hidden or 4 * width, dropout=dropout)))
    return Model(
        width=width,
        embed=Tokens(vocabulary),
        body=Stack(layers, (layer,), PostNorm()),
        outputs=(Language(tied=False, bias=True),),
        memory=SegmentMemory(span),
    )


MEMBER = Member(
    "adaptive-span",
    "Sukhbaatar et al. 2019",
    idea=(
        "Each head learns how far back it attends, with a penalty on the length of its span. "
        "Most heads stay short, so that memories of thousands of positions become affordable."
    ),
    make=adaptive_span,
    sizes={
        "tiny": {
            "width": 64, "heads": 4, "layers": 2, "span": 64, "ramp": 8, "cost": 1e-4, "initial_span": 0.1, "dropout": 0.1,
        },
        "small": {"width": 256, "heads": 4, "layers": 8, "span": 1024, "cost": 2e-6, "dropout": 0.0},
        "enwik8": {"width": 512, "heads": 8, "layers": 12},
        "enwik8-large": {"width": 768, "heads": 8, "layers": 24, "hidden": 4096, "dropout": 0.4},
    },
    size="enwik8",
    recipes={"tiny": NO_DROPOUT},
    paper_parameters={"small": None, "enwik8": 39, "enwik8-large": 209},
    departures={"small": "from the published scripts, for one GPU; not in the paper"},
)  # fmt: skip
