"""The sweep: every legal combination of the parts, as tiny models, for the contracts.

Pattern x rules x wiring is built in full, and each body without attention; gates, heads, positions, nets, outputs and
depths are dealt out by a fixed shuffle, so that each meets many of the others. `everything=True` takes the whole product
instead. Which combinations are legal is not decided here: they are offered to `objections`, and the refused ones are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from random import Random

from everyformer.attention.heads import (
    Asymmetric,
    Heads,
    Narrow,
    ParameterFree,
    Shared,
    Sliced,
    Standard,
    Sum,
    Symmetric,
    Wide,
)
from everyformer.attention.pattern import Pattern, parse
from everyformer.attention.relative import FourTerm
from everyformer.attention.rule import Alibi, ImageBias, Rotary, Rule, Shaw, T5Bias
from everyformer.attention.span import DynamicSpan, Span
from everyformer.network.depth import Attention, Depth, Layer, Stack
from everyformer.network.embed import Embed, Features, Tokens
from everyformer.network.feedforward import Convolution, FeedForward
from everyformer.network.halting import Halt, Repeat
from everyformer.network.head import Classify, Head, Language, Logistics, PerToken
from everyformer.network.legal import objections
from everyformer.network.model import Model
from everyformer.network.norm import BatchNorm, InstanceNorm, LayerNorm, RMSNorm, SequenceNorm
from everyformer.network.position import (
    Axial,
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
from everyformer.network.recurrent import AblatedLstm, Lstm
from everyformer.network.wiring import Gated, PostNorm, PreNorm, Reversible, Wiring
from everyformer.study.contracts import CONTRACTS, Report, contracts

WIDTH, VOCABULARY = 24, 17

Others = tuple[
    Position | None, FeedForward | Convolution, tuple[Embed, tuple[Head, ...]], Callable[[Layer, Wiring], Depth]
]

PATTERNS: tuple[Pattern, ...] = tuple(
    parse(text)
    for text in (
        "causal",
        "causal & window(3)",
        "causal & block(4)",
        "causal & (window(2) | stride(3))",
        "causal & (block(4) | summary(4, 1))",
        "causal & (prefix(2) | window(2))",
        "causal & local(3, 2)",
        "causal & local2d(4, 2, 2, 1, 1)",
        "causal & same_document",
        "by_head(causal & graph, causal & window(3))",
        "causal & visible & ~window(1) | causal & window(1)",
        "by_head(causal, causal & window(2))",
        "by_head(causal & window(3), causal & stride(2))",
        "hashed(2, 4, 2)",
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
    (Rotary(), Span(5, ramp=3, start=0.35)),
    (FourTerm(8),),
    (FourTerm(6, reach=3), DynamicSpan(WIDTH, 5, ramp=3)),
)
WIRINGS: tuple[Wiring, ...] = (
    PostNorm(),
    PreNorm(),
    PreNorm(RMSNorm()),
    PreNorm(LayerNorm(bias=False), last=False),
    PostNorm(BatchNorm()),
    PreNorm(InstanceNorm()),
    PostNorm(SequenceNorm()),
    Reversible(),
)
GATES = tuple(Gated(gate, RMSNorm()) for gate in ("input", "output", "highway", "sigmoid_tanh", "gru"))
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
    Shared(2),
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
    Grid(4, 4, block=(2, 2)),
    Axial((3, 2, 3)),
    TimePosition(),
)
NETS: tuple[FeedForward | Convolution, ...] = (
    FeedForward(32),
    FeedForward(32, "gelu"),
    FeedForward(32, "gelu_sigmoid"),
    FeedForward(16, "silu", gated=True),
    FeedForward(32, "gelu_tanh", chunk=4),
    FeedForward(16, hidden_layers=2),
    Convolution(16, kernels=(2, 3)),
    Convolution(16, "gelu", (3, 1), causal=False),
)
OUTPUTS: tuple[tuple[Embed, tuple[Head, ...]], ...] = (
    (Tokens(VOCABULARY), (Language(),)),
    (Tokens(VOCABULARY, scaled=True), (Language(tied=False, bias=True),)),
    (Tokens(VOCABULARY), (PerToken(3),)),
    (Tokens(VOCABULARY), (Classify(3, "mean"), Classify(2, "max"))),
    (Tokens(VOCABULARY), (Classify(3, "last", pooler=True),)),
    (Features(5), (PerToken(2),)),
    (Features(2), (Logistics(2, levels=4, components=2),)),
)
DEPTHS: tuple[Callable[[Layer, Wiring], Depth], ...] = (
    *[lambda layer, wiring: Stack(2, (layer,), wiring)] * 6,
    lambda layer, wiring: Repeat(2, (layer,), wiring, TimePosition()),
    lambda layer, wiring: Halt(2, (layer,), wiring, TimePosition(), "graves", rest=0.3),
    lambda layer, wiring: Halt(2, (layer,), wiring, None, "freeze", rest=0.3),
    lambda layer, wiring: Halt(2, (layer,), wiring, TimePosition(), "t2t", rest=0.3),
)
BODIES: tuple[Depth, ...] = (  # those without attention
    Lstm(2),
    Lstm(2, squash="sigmoid", bias=False),
    Lstm(2, PreNorm(), forget=False),
    Lstm(1, PostNorm(), both_ways=True),
    AblatedLstm(2),
    AblatedLstm(2, Reversible(), squash="sigmoid", bias=False),
    AblatedLstm(2, both_ways=True),
)


SWEPT = tuple(name for name in CONTRACTS if name not in ("compile", "overfit"))


def cells(
    patterns: Iterable[Pattern] = PATTERNS, bodies: Iterable[Depth] = BODIES, everything: bool = False
) -> Iterator[Model | None]:
    """Every combination with these patterns and bodies in a fixed order: the model, or None where it is refused."""
    for pattern, rules in product(patterns, RULES):
        random = Random(f"{pattern} {rules}")  # the same hand whatever else is swept
        forms = HEADS if everything else (random.choice(HEADS),)
        gates = GATES if everything else (Random(f"gate {pattern} {rules}").choice(GATES),)
        for heads, wiring in product(forms, (*WIRINGS[:3], *gates, *WIRINGS[3:])):
            others: Iterable[Others] = product(POSITIONS, NETS, OUTPUTS, DEPTHS[5:])
            if not everything:
                hands = (POSITIONS, NETS, OUTPUTS, DEPTHS)
                others = [tuple(random.choice(hand) for hand in hands)]  # type: ignore[list-item]
            for position, net, (embed, outputs), depth in others:
                body = depth(Layer(Attention(heads, pattern, rules), net), wiring)
                model = Model(width=WIDTH, embed=embed, position=position, body=body, heads=outputs)
                yield None if any(True for _ in objections(model)) else model
    for other in bodies:
        rest = list(product(POSITIONS, OUTPUTS))
        for position, (embed, outputs) in rest if everything else Random(str(other)).sample(rest, 2):
            model = Model(width=WIDTH, embed=embed, position=position, body=other, heads=outputs)
            yield None if any(True for _ in objections(model)) else model


def sweep(
    only: Sequence[str] | None = None,
    *,
    patterns: Iterable[Pattern] = PATTERNS,
    bodies: Iterable[Depth] = BODIES,
    everything: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """The contracts on every legal cell. `progress` is told how many of how many are done."""
    offered = list(cells(patterns, bodies, everything))
    report, seen = Report(refused=sum(model is None for model in offered)), set()
    for done, model in enumerate(offered, 1):
        if model is not None:
            # What a kernel computes depends on the attention alone: each is checked once.
            kind = model.body.each[0].attention if model.body.each else model.body
            chosen = [name for name in only or SWEPT if name != "kernels" or kind not in seen]
            seen.add(kind)
            report.findings += contracts(model, chosen).findings
        if progress:
            progress(done, len(offered))
    return report
