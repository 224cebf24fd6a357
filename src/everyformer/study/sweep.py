"""The sweep: every legal combination of the parts, as tiny models, for the contracts.

All pairs of pattern, rule and wiring are built; the other parts (heads, positions, norms, feed-forward nets) are dealt
out in turn so that each meets many of them. `everything=True` takes the whole product instead. Which combinations are
legal is not decided here: they are offered to `objections`, and the refused ones are counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

from everyformer.attention.heads import (
    Asymmetric,
    Heads,
    Narrow,
    ParameterFree,
    Sliced,
    Standard,
    Sum,
    Symmetric,
    Wide,
)
from everyformer.attention.pattern import Pattern, parse
from everyformer.attention.rule import Alibi, ImageBias, Rotary, Rule, Shaw, T5Bias
from everyformer.network.depth import Attention, Layer, Stack
from everyformer.network.embed import Embed, Features, Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.head import Classify, Head, Language, PerToken
from everyformer.network.legal import objections
from everyformer.network.model import Model
from everyformer.network.norm import BatchNorm, InstanceNorm, LayerNorm, RMSNorm, SequenceNorm
from everyformer.network.position import (
    Concatenated,
    Grid,
    JointMlp,
    Learned,
    OneHot,
    Position,
    SeparateMlp,
    Sinusoidal,
    TimePosition,
)
from everyformer.network.wiring import PostNorm, PreNorm, Wiring

WIDTH, LENGTH, VOCABULARY = 24, 9, 17

PATTERNS: tuple[Pattern, ...] = tuple(
    parse(text)
    for text in (
        "causal",
        "causal & window(3)",
        "causal & block(4)",
        "causal & (window(2) | stride(3))",
        "causal & (block(4) | summary(4, 1))",
        "causal & (prefix(2) | window(2))",
        "causal & same_document",
        "causal & graph",
        "causal & visible & ~window(1) | causal & window(1)",
        "by_head(causal, causal & window(2))",
        "by_head(causal & window(3), causal & stride(2))",
        "full",
        "window(3)",
        "block(4)",
        "prefix(3) | window(2)",
        "same_document",
        "graph(((0, 1), (1, 2), (2, 2), (3, 0), (5, 4), (8, 8)))",
        "~causal",
        "by_head(full, ~window(2))",
    )
)
RULES: tuple[tuple[Rule, ...], ...] = (
    (),
    (Rotary(),),
    (Alibi(),),
    (Shaw(3),),
    (Shaw(2, values=True),),
    (T5Bias(8, 16),),
    (T5Bias(8, 16, both_sides=True),),
    (ImageBias(4, 4),),
    (Rotary(), Alibi()),
)
WIRINGS: tuple[Wiring, ...] = (
    PostNorm(),
    PreNorm(),
    PreNorm(RMSNorm()),
    PostNorm(RMSNorm()),
    PreNorm(LayerNorm(bias=False), last=False),
    PostNorm(BatchNorm()),
    PreNorm(InstanceNorm()),
    PostNorm(SequenceNorm()),
)
HEADS: tuple[Heads, ...] = (
    Standard(2),
    Standard(2, key_width=6, value_width=4, bias=True),
    Wide(2),
    Sliced(2),
    Narrow(2),
    Sum(2),
    Sum(2, rank=5),
    ParameterFree(),
    Symmetric(6),
    Asymmetric(6),
)
POSITIONS: tuple[Position | None, ...] = (
    None,
    Learned(16),
    Sinusoidal(),
    Sinusoidal("halves"),
    Concatenated(OneHot(16), 16),
    Concatenated(Sinusoidal(), 4),
    JointMlp(16, 8),
    SeparateMlp(16, 8),
    Grid(4, 4),
    Grid(4, 4, learned=True),
    TimePosition(),
)
NETS = (
    FeedForward(32),
    FeedForward(32, "gelu"),
    FeedForward(16, "silu", gated=True),
    FeedForward(32, "gelu_tanh", chunk=4),
    FeedForward(16, hidden_layers=2),
)
OUTPUTS: tuple[tuple[Embed, tuple[Head, ...]], ...] = (
    (Tokens(VOCABULARY), (Language(),)),
    (Tokens(VOCABULARY, scaled=True), (Language(tied=False, bias=True),)),
    (Tokens(VOCABULARY), (PerToken(3),)),
    (Tokens(VOCABULARY), (Classify(3, "mean"), Classify(2, "max"))),
    (Tokens(VOCABULARY), (Classify(3, "last", pooler=True),)),
    (Features(5), (PerToken(2),)),
)


def cells(everything: bool = False) -> Iterator[Model | None]:
    """Every combination in a fixed order: the model, or None where it is refused."""
    random = Random(0)
    for pattern, rules, wiring in product(PATTERNS, RULES, WIRINGS):
        others = list(product(HEADS, POSITIONS, NETS, OUTPUTS)) if everything else _deal(random)
        for heads, position, net, (embed, outputs) in others:
            model = Model(
                width=WIDTH,
                embed=embed,
                position=position,
                body=Stack(2, (Layer(Attention(heads, pattern, rules), net),), wiring),
                heads=outputs,
            )
            yield None if any(True for _ in objections(model)) else model


def _deal(random: Random) -> list[tuple[Heads, Position | None, FeedForward, tuple[Embed, tuple[Head, ...]]]]:
    """One hand of the other parts."""
    return [(random.choice(HEADS), random.choice(POSITIONS), random.choice(NETS), random.choice(OUTPUTS))]
