"""The sweep: tiny models that combine the parts in every legal way, for the contracts.

Every two of the patterns, score modifications, residuals, projections, positions, feed-forward nets, outputs and depths occur
together in some model, and every body without attention occurs. With `triples`, all combinations of pattern, score
modifications and residual occur instead, with random other parts. `illegal_reasons` decides which combinations are legal; the
others are counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, combinations, islice, product
from multiprocessing import get_context
from random import Random
from typing import Any

import torch

from everyformer.attention.four_term import FourTerm
from everyformer.attention.parse import parse
from everyformer.attention.pattern import Pattern
from everyformer.attention.projection import (
    Asymmetric,
    Narrow,
    ParameterFree,
    Projection,
    Shared,
    Sliced,
    Standard,
    Sum,
    Symmetric,
    Wide,
)
from everyformer.attention.rotary import YarnScaling
from everyformer.attention.round_counts import RoundCounts
from everyformer.attention.score_mod import Alibi, ImageBias, Rotary, ScoreMod, Shaw, T5Bias
from everyformer.attention.softmax import Sinks, SoftCap
from everyformer.attention.span import DynamicSpan, Span
from everyformer.network.convolution import Convolution
from everyformer.network.depth import Depth, Stack
from everyformer.network.embed import Embed, Features, Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.grid import Axial, Grid
from everyformer.network.layer import Layer
from everyformer.network.legal import illegal_reasons
from everyformer.network.lstm import AblatedLstm, Lstm
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.ngrams import Ngrams
from everyformer.network.norm import BatchNorm, InstanceNorm, LayerNorm, RMSNorm, SequenceNorm
from everyformer.network.output_head import Classify, Language, Logistics, OutputHead, PerToken, Regress, ReplacedToken
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.position import Concatenated, JointMlp, Learned, OneHot, Position, SeparateMlp
from everyformer.network.repeat import Halt, Repeat
from everyformer.network.residual import Gated, NoResidual, PostNorm, PreNorm, Residual, Reversible
from everyformer.network.sandwich_norm import SandwichNorm
from everyformer.network.sinusoid import Sinusoidal, TimePosition
from everyformer.network.sublayer import Sublayer
from everyformer.study.contract_report import Report, Result
from everyformer.study.contracts import CONTRACTS, contracts

WIDTH, VOCABULARY = 24, 17

PATTERNS: tuple[Pattern, ...] = tuple(
    parse(text)
    for text in (
        "causal",
        "causal & window(3)",
        "causal & block(4)",
        "causal & (window(2) | stride(3))",
        "causal & (block(4) | summary(4, 1))",
        "causal & (prefix(2) | window(2))",
        "causal | prefix(3)",
        "causal & window(3) | prefix",
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
SCORE_MODS: tuple[tuple[ScoreMod, ...], ...] = (
    (),
    (Rotary(),),
    (Alibi(),),
    (Shaw(3),),
    (Shaw(2, values=True),),
    (T5Bias(8, 16),),
    (T5Bias(8, 16, bidirectional=True, shared=True),),
    (ImageBias(4, 4),),
    (Rotary(), Span(5, ramp=3, start=0.35)),
    (Rotary(50.0, "halves", 4, YarnScaling(2.0, 16)), SoftCap(2.0), Sinks()),
    (FourTerm(8),),
    (FourTerm(6, max_distance=3), DynamicSpan(WIDTH, 5, ramp=3)),
)
RESIDUALS: tuple[Residual, ...] = (
    PostNorm(),
    PreNorm(),
    PreNorm(RMSNorm()),
    SandwichNorm(RMSNorm(unit_offset=True)),
    PreNorm(LayerNorm(bias=False), final_norm=False),
    PostNorm(BatchNorm()),
    PreNorm(InstanceNorm()),
    PostNorm(SequenceNorm()),
    Reversible(),
    Reversible(merge="concatenate"),
)
GATES = tuple(Gated(gate, RMSNorm()) for gate in ("input", "output", "highway", "sigmoid_tanh", "gru"))
HEADS: tuple[Projection, ...] = (
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
    Standard(4, key_heads=2, qk_norm=RMSNorm()),
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
    Axial((4, 4), (6, WIDTH - 6)),
    TimePosition(),
)
NETS: tuple[FeedForward | Convolution, ...] = (
    FeedForward(32),
    FeedForward(32, "gelu"),
    FeedForward(32, "gelu_sigmoid"),
    FeedForward(16, "relu_squared", gated=True, bias=False),
    FeedForward(32, "gelu_tanh", chunk=4),
    FeedForward(16, hidden_layers=2),
    Convolution(16, kernels=(2, 3)),
    Convolution(16, "gelu", (3, 1), causal=False),
)
OUTPUTS: tuple[tuple[Embed, tuple[OutputHead, ...]], ...] = (
    (Tokens(VOCABULARY), (Language(scaled=True),)),
    (Tokens(VOCABULARY, scaled=True), (Language(tied=False, bias=True, soft_cap=3.0),)),
    (Tokens(VOCABULARY), (PerToken(3), ReplacedToken())),
    (Tokens(VOCABULARY), (Classify(3, "mean"), Regress(2, "max"))),
    (Tokens(VOCABULARY), (Classify(3, "last", pooler=True),)),
    (Features(5), (PerToken(2),)),
    (Features(2), (Logistics(2, levels=4, components=2),)),
)
DEPTHS: tuple[Callable[[Layer, Residual], Depth], ...] = (
    lambda layer, residual: Stack(2, (layer,), residual),
    lambda layer, residual: Repeat(2, (layer,), residual, TimePosition()),
    lambda layer, residual: Halt(2, (layer,), residual, TimePosition(), "graves", epsilon=0.3),
    lambda layer, residual: Halt(2, (layer,), residual, None, "freeze", epsilon=0.3),
    lambda layer, residual: Halt(2, (layer,), residual, TimePosition(), "t2t", epsilon=0.3),
)


def _stack(num_layers: int, *sublayers: Sublayer, residual: Residual = NoResidual()) -> Depth:
    return Stack(num_layers, (Layer(sublayers),), residual)


BODIES: tuple[Depth, ...] = (  # those without attention
    _stack(2, Lstm()),
    _stack(2, Lstm(activation="sigmoid", bias=False)),
    _stack(2, Lstm(forget=False), residual=PreNorm()),
    _stack(1, Lstm(bidirectional=True), residual=PostNorm()),
    _stack(2, AblatedLstm()),
    _stack(2, AblatedLstm(activation="sigmoid", bias=False), residual=Reversible()),
    _stack(2, AblatedLstm(bidirectional=True)),
    _stack(1, PonderRnn(3, epsilon=0.3, bias=-0.5)),
    _stack(2, PonderRnn(2, "rnn", epsilon=0.3, bias=-0.5), residual=PreNorm()),
)
_CAUSAL = Attention(Standard(2), parse("causal"))
_TOKEN_VALUES = Attention(Standard(4, key_heads=2), parse("causal & window(3)"), (Rotary(),), token_values=VOCABULARY)
_CHUNKED = Attention(Shared(2), parse("chunked(2, (4, 2), 4, True)"), (RoundCounts(),))
_HYBRID = (Layer((Lstm(), _CAUSAL)),)
HYBRIDS: tuple[Depth, ...] = (  # layers of other sublayers than an attention and a net
    Stack(2, _HYBRID, PreNorm()),
    Stack(2, (Layer((_CAUSAL, Lstm())), Layer((_CAUSAL, FeedForward(32)))), PostNorm()),
    _stack(2, Convolution(16, kernels=(2, 3)), _CAUSAL, FeedForward(32), residual=PreNorm()),
    _stack(2, _CAUSAL, residual=PreNorm()),
    _stack(2, _CHUNKED, FeedForward(32), residual=PreNorm()),
    _stack(2, Ngrams((2, 3), rows=7, features=4), _CAUSAL, FeedForward(32), residual=PreNorm()),
    Stack(2, (Layer((_TOKEN_VALUES, FeedForward(32)), shortcut=True),), PreNorm(RMSNorm())),
    Halt(2, (Layer((_TOKEN_VALUES, FeedForward(32))),), PostNorm(), None, "freeze", epsilon=0.3),
    _stack(2, Lstm(), _CAUSAL, residual=Reversible()),
    _stack(
        2,
        Attention(Standard(2), parse("causal & window(3)"), (Rotary(),)),
        PonderRnn(2, epsilon=0.3, bias=-0.5),
        residual=PreNorm(),
    ),
    _stack(2, Lstm(bidirectional=True), Attention(Standard(2), parse("full")), residual=PreNorm()),
    Repeat(2, _HYBRID, PreNorm(), TimePosition()),
    Halt(2, _HYBRID, PreNorm(), TimePosition(), "graves", epsilon=0.3),
    Halt(2, _HYBRID, PreNorm(), None, "freeze", epsilon=0.3),
)


Part = tuple[int, int]  # an index into PARTS, and one into that list
PARTS: tuple[Sequence[Any], ...] = (PATTERNS, SCORE_MODS, (*RESIDUALS, *GATES), HEADS, POSITIONS, NETS, OUTPUTS, DEPTHS)
SWEPT = tuple(name for name in CONTRACTS if name not in ("flex", "compile", "overfit"))  # without the slow ones


@functools.cache
def cells(triples: bool = False) -> tuple[Model | None, ...]:
    """The models of the sweep in a fixed order, None for illegal combinations."""
    return (*(_triples() if triples else _pairs()), *_bodies())


def _pairs() -> Iterator[Model | None]:
    """For each pair of parts that no model has yet: of random choices with this pair, a legal one with the most new pairs.

    Two causal parts count as combined only in a causal model, to which all contracts apply.
    """
    random = Random(0)
    every = [[(slot, number) for number in range(len(parts))] for slot, parts in enumerate(PARTS)]
    wanted = [pair for ones, others in combinations(every, 2) for pair in product(ones, others)]
    future = {(slot, number) for slot, number in chain(*every) if _attends_to_future(PARTS[slot][number])}
    back = [[part for part in parts if part not in future] for parts in every]
    left = set(wanted)

    def new(choice: Sequence[Part]) -> set[tuple[Part, Part]]:
        pairs = left.intersection(combinations(choice, 2))
        return pairs if future.isdisjoint(choice) else {pair for pair in pairs if not future.isdisjoint(pair)}

    def choices(pair: tuple[Part, Part]) -> list[list[Part]]:
        """Forty random choices that include the pair, those with the most new pairs first."""
        fixed, others = dict(pair), back if future.isdisjoint(pair) else every
        sample = [
            [(slot, fixed[slot]) if slot in fixed else random.choice(parts) for slot, parts in enumerate(others)]
            for _ in range(40)
        ]
        return sorted(sample, key=lambda choice: -len(new(choice)))

    for pair in wanted:
        if pair not in left:
            continue
        for choice in chain.from_iterable(choices(pair) for _ in range(3)):
            model = _model(*(PARTS[slot][number] for slot, number in choice))
            if model is not None:
                left -= new(choice)
                yield model
                break
        else:
            yield None  # no legal model has this pair


def _attends_to_future(part: Any) -> bool:
    """Whether a model with this part is not causal."""
    if isinstance(part, Pattern):
        return part.attends_to_future(heads=2)
    if isinstance(part, Residual):
        return part.norm is not None and part.norm.mixes_positions
    return isinstance(part, Convolution) and not part.causal


def _triples() -> Iterator[Model | None]:
    others: tuple[Sequence[Any], ...] = (
        POSITIONS,
        NETS,
        OUTPUTS,
        (DEPTHS[0],) * 5 + DEPTHS,
    )  # half of the depths are stacks
    for pattern, score_mods in product(PATTERNS, SCORE_MODS):
        random = Random(f"{pattern} {score_mods}")
        heads = random.choice(HEADS)
        for residual in (*RESIDUALS, random.choice(GATES)):
            yield _model(pattern, score_mods, residual, heads, *map(random.choice, others))


def _bodies() -> Iterator[Model]:
    """Each body without attention and each hybrid twice, with random legal positions and outputs."""
    for body in (*BODIES, *HYBRIDS):
        choices = list(product(POSITIONS, OUTPUTS))
        Random(str(body)).shuffle(choices)
        models = (
            _legal(Model(width=WIDTH, embed=embed, position=position, body=body, outputs=outputs))
            for position, (embed, outputs) in choices
        )
        yield from islice(filter(None, models), 2)


def _model(
    pattern: Pattern,
    score_mods: tuple[ScoreMod, ...],
    residual: Residual,
    heads: Projection,
    position: Position | None,
    net: FeedForward | Convolution,
    output: tuple[Embed, tuple[OutputHead, ...]],
    depth: Callable[[Layer, Residual], Depth],
) -> Model | None:
    body = depth(Layer((Attention(heads, pattern, score_mods), net)), residual)
    return _legal(Model(width=WIDTH, embed=output[0], position=position, body=body, outputs=output[1]))


def _legal(model: Model) -> Model | None:
    return None if any(True for _ in illegal_reasons(model)) else model


def sweep(
    models: Iterable[Model | None],
    only: Sequence[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
    device: str = "cpu",
    jobs: int = 1,
) -> Report:
    """Check the contracts on every model, in `jobs` processes. `progress(done, total)` is called after each group of models."""
    models = list(models)
    report, groups = Report(refused=sum(model is None for model in models)), dict[Any, list[Model]]()
    for model in models:
        if model is not None:
            groups.setdefault(_kind(model), []).append(model)
    done = report.refused
    with _map(jobs) as run:
        for results in run(_checked, [(group, only, device) for group in groups.values()]):
            report.results += results
            done += 1
            if progress:
                progress(done, report.refused + len(groups))
    return report


def _kind(model: Model) -> Any:
    """What the kernels depend on: the pattern and the score modifications."""
    first = model.body.layers[0].sublayers[0]
    plain = isinstance(first, Attention) and model.body not in HYBRIDS
    return (first.pattern, first.score_mods) if plain else model.body  # type: ignore[attr-defined]


def _checked(work: tuple[list[Model], Sequence[str] | None, str]) -> list[Result]:
    """The results of a group of models of one kind; what the kind decides alone is checked on the first of them."""
    models, only, device = work
    results = []
    for number, model in enumerate(models):
        skipped = ("pattern", "kernels", "flex") if number else ()
        names = [name for name in only or SWEPT if name not in skipped]
        results += contracts(model, names, device=device).results
    return results


@contextmanager
def _map(jobs: int) -> Iterator[Callable[..., Iterable[list[Result]]]]:
    """Yields `map`, in this process or in several with one thread each."""
    if jobs == 1:
        yield map
        return
    with get_context("spawn").Pool(jobs, torch.set_num_threads, (1,)) as pool:
        yield pool.imap
