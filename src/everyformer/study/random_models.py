"""Random legal models, with random numbers in all their parts: a contract that fails on one of them is a bug, of the model or of the
contract.

    python -m everyformer.study.random_models --count 300 --seed 0 --jobs 2 > docs/results/logs/random_models.txt
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from random import Random
from typing import Any

from everyformer.attention.four_term import FourTerm
from everyformer.attention.pattern import (
    Block,
    ByHead,
    Causal,
    Full,
    Graph,
    Hashed,
    Local,
    Local2d,
    Pattern,
    Prefix,
    SameDocument,
    Stride,
    Summary,
    Visible,
    Window,
)
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
from everyformer.attention.rotary import LinearScaling, Llama3Scaling, NtkScaling
from everyformer.attention.score_mod import Alibi, ImageBias, Rotary, ScoreMod, Shaw, T5Bias
from everyformer.attention.softmax import Sinks, SoftCap
from everyformer.attention.span import DynamicSpan, Span
from everyformer.network.cache import SegmentMemory
from everyformer.network.convolution import Convolution
from everyformer.network.depth import Depth, Stack
from everyformer.network.embed import Embed, Features, Mixed, Nodes, Patches, Tokens
from everyformer.network.feedforward import FeedForward
from everyformer.network.grid import Axial, Grid
from everyformer.network.initial import AsTorch, Normal, Xavier
from everyformer.network.layer import Layer
from everyformer.network.lstm import AblatedLstm, Lstm
from everyformer.network.model import Model
from everyformer.network.multi_head_attention import Attention
from everyformer.network.norm import BatchNorm, InstanceNorm, LayerNorm, Norm, RMSNorm, SequenceNorm
from everyformer.network.output_head import Classify, Language, Logistics, Masked, OutputHead, PerToken, ReplacedToken
from everyformer.network.ponder_rnn import PonderRnn
from everyformer.network.position import Concatenated, JointMlp, Learned, OneHot, Position, SeparateMlp
from everyformer.network.repeat import Halt, Repeat
from everyformer.network.residual import Gated, NoResidual, PostNorm, PreNorm, Residual, Reversible
from everyformer.network.sandwich_norm import SandwichNorm
from everyformer.network.sinusoid import Sinusoidal, TimePosition
from everyformer.network.sublayer import Sublayer
from everyformer.study.contract_report import Report, Result
from everyformer.study.contracts import CONTRACTS, contracts
from everyformer.train.provenance import start_log

SCALINGS = (LinearScaling, NtkScaling, Llama3Scaling)
SHARE = 10  # models that a process checks at a time
CHECKED = tuple(name for name in CONTRACTS if name not in ("flex", "compile"))  # without those that compile


def random_models(seed: int) -> Iterator[Model]:
    """Yields legal models without end, the same for the same seed."""
    random = Random(seed)
    while True:
        try:
            model = Draw(random).model()
            model.build()
        except ValueError:
            continue  # a part that refuses its numbers, or a combination that is refused
        yield model


@dataclass
class Draw:
    """The random choices of one model."""

    random: Random

    def of(self, *makers: Callable[[], Any]) -> Any:
        return self.random.choice(makers)()

    def size(self, most: int, least: int = 1) -> int:
        return self.random.randint(least, most)

    def yes(self, share: float = 0.5) -> bool:
        return self.random.random() < share

    def model(self) -> Model:
        self.width = self.random.choice((4, 6, 8, 12, 16, 24))
        self.heads = self.random.choice((1, 2, 2, 3, 4))
        self.causal = self.yes(0.7)
        self.embed_width = self.size(12) if self.yes(0.1) else None
        embed = self.embed()
        return Model(
            width=self.width,
            embed=embed,
            position=self.position() if self.yes(0.7) else None,
            body=self.body(),
            outputs=tuple(self.output(embed) for _ in range(self.size(2))),
            class_token=self.yes(0.1),
            segments=self.size(3) if self.yes(0.1) else 0,
            norm=self.norm() if self.yes(0.2) else None,
            embed_width=self.embed_width,
            dropout=0.1 if self.yes(0.2) else 0.0,
            memory=SegmentMemory(self.size(8)) if self.yes(0.2) else None,
            initial=self.of(AsTorch, lambda: Normal(by_depth=self.yes()), Xavier),
        )

    def embed(self) -> Embed:
        embed: Embed = self.of(
            *[lambda: Tokens(self.size(30, 2), scaled=self.yes(0.3))] * 5,
            lambda: Features(self.size(5)),
            lambda: Nodes(self.size(5), self.size(3, 0)),
            lambda: Patches(self.size(2), self.size(3)),
            lambda: Mixed(((Tokens(self.size(9, 2)), None), (Features(self.size(4)), None))),
        )
        return embed

    def position(self) -> Position:
        length = self.size(16, 5)
        position: Position = self.of(
            lambda: Learned(length),
            lambda: Sinusoidal(self.random.choice(("interleaved", "halves"))),
            lambda: Concatenated(OneHot(length), length),
            lambda: Concatenated(Sinusoidal(), 2 * self.size(3)),
            lambda: JointMlp(length, self.size(8)),
            lambda: SeparateMlp(length, self.size(8)),
            lambda: Grid(self.size(4), self.size(4, 2), learned=self.yes()),
            lambda: Axial((self.size(3), self.size(3, 2), self.size(3))),
            TimePosition,
        )
        return position

    def body(self) -> Depth:
        layers, residual = tuple(self.layer() for _ in range(self.size(2))), self.residual()
        step = TimePosition() if self.yes() else None
        body: Depth = self.of(
            *[lambda: Stack(self.size(3), layers, residual)] * 3,
            lambda: Repeat(self.size(3), layers, residual, step),
            lambda: Halt(
                self.size(4),
                layers,
                residual,
                step,
                self.random.choice(("graves", "freeze", "t2t")),
                epsilon=self.random.uniform(0.01, 0.4),
                bias=self.random.uniform(-2, 2),
            ),
        )
        return body

    def layer(self) -> Layer:
        position = self.position() if self.yes(0.1) else None
        return Layer(tuple(self.sublayer() for _ in range(self.size(3))), position)

    def sublayer(self) -> Sublayer:
        sublayer: Sublayer = self.of(
            *[self.attention] * 4,
            *[self.feed_forward] * 2,
            lambda: Convolution(self.size(16), self.activation(), (self.size(3), self.size(3)), causal=self.causal),
            lambda: Lstm(bias=self.yes(), bidirectional=not self.causal, forget=self.yes(0.7)),
            lambda: AblatedLstm(self.random.choice(("tanh", "sigmoid")), bidirectional=not self.causal),
            lambda: PonderRnn(self.size(3), self.random.choice(("rnn", "lstm")), epsilon=0.3, bias=-0.5),
        )
        return sublayer

    def activation(self) -> Any:
        return self.random.choice(("relu", "gelu", "gelu_tanh", "gelu_sigmoid", "silu", "relu_squared"))

    def feed_forward(self) -> FeedForward:
        return FeedForward(
            self.size(32),
            self.activation(),
            gated=self.yes(0.3),
            hidden_layers=self.size(2),
            chunk=self.size(4) if self.yes(0.2) else None,
            bias=self.yes(0.8),
        )

    def attention(self) -> Attention:
        pattern = self.pattern(2)
        score_mods = tuple(self.score_mod() for _ in range(self.random.choice((0, 0, 1, 1, 2))))
        return Attention(self.projection(), Causal() & pattern if self.causal else pattern, score_mods)

    def projection(self) -> Projection:
        heads, bias = self.heads, self.yes()
        projection: Projection = self.of(
            lambda: Standard(heads, bias=bias, merge_bias=self.yes()),
            lambda: Standard(heads, key_width=2 * self.size(4), value_width=self.size(6), bias=bias),
            lambda: Standard(
                heads, key_heads=self.random.choice([n for n in (1, 2, 3) if heads % n == 0]), qk_norm=RMSNorm()
            ),
            *(lambda kind=kind: kind(heads) for kind in (Wide, Sliced, Narrow, Sum, Shared)),
            lambda: Sum(heads, rank=self.size(5)),
            ParameterFree,
            lambda: Symmetric(2 * self.size(4)),
            lambda: Asymmetric(2 * self.size(4)),
        )
        return projection

    def pattern(self, depth: int) -> Pattern:
        """A pattern of at most this depth of the algebra."""
        n = self.size(5, 2)
        if depth == 0 or self.yes(0.3):
            pattern: Pattern = self.of(
                Full,
                Causal,
                lambda: Window(n),
                lambda: Block(n),
                lambda: Stride(n),
                lambda: Summary(n, self.size(n - 1)),
                lambda: Local(n, self.size(4, 0)),
                lambda: Local2d(2 * n, self.size(3), self.random.choice((1, 2, n)), self.size(2, 0), self.size(2, 0)),
                lambda: Prefix(n),
                lambda: Graph(tuple((self.size(8, 0), self.size(8, 0)) for _ in range(9))),
                Graph,
                SameDocument,
                Visible,
                lambda: Hashed(self.size(2), 2 * self.size(3), n),
            )
            return pattern
        parts = tuple(self.pattern(depth - 1) for _ in range(2))
        joined: Pattern = self.of(
            lambda: parts[0] & parts[1],
            lambda: parts[0] | parts[1],
            lambda: Window(n) | ~parts[0],
            lambda: ByHead(parts[: self.heads]),
        )
        return joined

    def score_mod(self) -> ScoreMod:
        score_mod: ScoreMod = self.of(
            Rotary,
            lambda: Rotary(
                self.random.uniform(5, 500),
                "halves",
                2,
                self.of(lambda: None, *(partial(one, 3.0) for one in SCALINGS)),
            ),
            lambda: SoftCap(self.random.uniform(0.5, 5)),
            Sinks,
            Alibi,
            lambda: Shaw(self.size(5), values=self.yes(), future=self.yes(), shared=self.yes()),
            lambda: T5Bias(2 * self.size(4, 2), self.size(20, 9), bidirectional=self.yes()),
            lambda: ImageBias(self.size(4), self.size(4, 2)),
            lambda: Span(self.size(9), ramp=self.size(4), start=self.random.uniform(0.1, 0.9)),
            lambda: FourTerm(2 * self.size(4), self.size(5) if self.yes() else None),
            lambda: DynamicSpan(self.width, self.size(9), ramp=self.size(4), start=self.random.uniform(0.1, 0.9)),
        )
        return score_mod

    def norm(self) -> Norm:
        norm: Norm = self.of(
            LayerNorm,
            lambda: LayerNorm(bias=False),
            RMSNorm,
            lambda: RMSNorm(unit_offset=True),
            *([] if self.causal else [BatchNorm, InstanceNorm, SequenceNorm]),
        )
        return norm

    def residual(self) -> Residual:
        norm, final = self.norm(), self.yes()
        residual: Residual = self.of(
            lambda: PostNorm(norm),
            lambda: PreNorm(norm, final_norm=final),
            lambda: SandwichNorm(norm, final_norm=final),
            lambda: Reversible(norm, final_norm=final),
            lambda: Gated(
                self.random.choice(("input", "output", "highway", "sigmoid_tanh", "gru", "none")),
                norm,
                final_norm=final,
            ),
            NoResidual,
        )
        return residual

    def output(self, embed: Embed) -> OutputHead:
        head: OutputHead = self.of(
            lambda: (
                Language(tied=isinstance(embed, Tokens), bias=self.yes(), vocabulary=None)
                if isinstance(embed, Tokens)
                else Language(tied=False, vocabulary=self.size(9, 2))
            ),
            lambda: Masked(width=self.embed_width),
            ReplacedToken,
            lambda: PerToken(self.size(4, 2)),
            lambda: Classify(self.size(4, 2), self.random.choice(("mean", "max", "last", "first")), pooler=self.yes()),
            lambda: Logistics(self.size(3), levels=4, components=2),
        )
        return head


def check(
    count: int,
    seed: int = 0,
    only: tuple[str, ...] = CHECKED,
    start: int = 0,
    tell: Callable[[Result], None] = lambda result: None,
) -> Report:
    """Checks the contracts on `count` random models. A contract that raises counts as failed. `tell` gets each result at once."""
    report = Report()
    for number, model in enumerate(islice(random_models(seed), start, start + count), start):
        for contract in only:
            try:
                results = contracts(model, [contract], name=f"model {number}").results
            except Exception as error:
                results = [Result(contract, f"model {number}", float("inf"), 0.0, f"{type(error).__name__}: {error}")]
            for result in results:
                tell(result)
            report.results += results
    return report


def tell(result: Result) -> None:
    if not result.passed:
        print(f"{result.model}: {result.contract} {result.error:.1e} {result.reason}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check the contracts on random legal models.")
    parser.add_argument("--count", type=int, default=300, help="the number of models")
    parser.add_argument("--seed", type=int, default=0, help="of the models")
    parser.add_argument("--start", type=int, default=0, help="the number of the first model")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--only", default=",".join(CHECKED), help="contracts, separated by commas")
    given = parser.parse_args()
    start_log(seed=given.seed)
    began, report, only = time.monotonic(), Report(), tuple(given.only.split(","))
    starts = range(given.start, given.start + given.count, SHARE)
    counts = [min(SHARE, given.start + given.count - start) for start in starts]
    with ProcessPoolExecutor(given.jobs) as pool:
        for part in pool.map(check, counts, repeat(given.seed), repeat(only), starts, repeat(tell)):
            report.results += part.results
    print(report)
    checks, failed = len(report.results), len(report.failures)
    print(
        f"{failed} of {checks} checks on {given.count} models failed, seed {given.seed}, {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
